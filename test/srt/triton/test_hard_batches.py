"""On equals off on SGLang's own Triton backend, for batches chosen to be hard.

Tiny models whose windows are shorter than most prompts, and slots in random order: none has the
same number in the full pool and in the window's. Each batch is run off and on, over a cache that
is emptied in between: its prefill, what is left of its unfinished prompts, and two decode steps
after the same tokens. Both sides must leave the same bytes in the cache and give the same answers;
the fast one must first be shown to be fast, by the rows of every layer's FFN and attention, and to
have left the runner's own plan as it was.

Triton's decode step by itself sees one key fewer in a window than its prefill does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from harness.batches import batch_of, rest_of, tokens
from harness.decode_graphs import record_tail
from harness.fixtures import Checkpoints
from harness.forwards import INTERPRETED_ENGINE, backends_of, state_of, times
from harness.layer_rows import TWO_POOLS
from harness.observe import (
    TOLERANCE,
    Metadata,
    Observed,
    assert_as_expected,
    assert_metadata_unchanged,
    assert_same_answers,
    assert_same_cache,
    assert_same_objects,
    assert_stock,
    expected,
    replayed,
    run,
    skips_tail,
    step,
)
from sglang_gemma4_reference import interpreter
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import SWITCHED_OFF, Engine, Prompt, reset_log, switched
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.patched import patched

interpreter.make_quick()

# s: layer with a window, f: without; shared layers are set apart. One donor has a window, one none.
SHAPES = {
    "two pools": TWO_POOLS,
    "pages of four": replace(TWO_POOLS, sliding_window=6, seed=4),
    "one pool": replace(  # sfsf sf
        E2B_TINY,
        layers=6,
        kv_shared_layers=2,
        sliding_per_full=1,
        kv_heads=2,
        head_dim=E2B_TINY.global_head_dim,  # SGLang's one pool has one width of heads
        sliding_window=7,
        seed=2,
    ),
}


def prompt(cached: int, new: int, **more: Any) -> Prompt:
    """Return one request, whose tokens are seeded by its lengths."""
    draw = random.Random(f"{cached} {new}")
    return Prompt(tokens(draw, cached), tokens(draw, new), **more)


def hard_batches(window: int) -> dict[str, list[Prompt]]:
    """Return batches by what is hard about them, for a window of this many keys."""
    w, far = window, 40  # Triton splits the keys of a decode step into parts of at least 32
    shared = prompt(w + 2, 3)
    to_come = {"to_come": (21, 22, 23)}
    return {
        "totals at the window": batch_of((0, w - 1), (0, w), (0, w + 1), (0, far)),
        "prefixes at the window": batch_of((w - 1, 2), (w, 3), (w + 1, 2), (far, 5)),
        "one new token beside long prompts": batch_of((w, 1), (0, far), (2 * w + 1, 1), (0, 1)),
        "one request": batch_of((w + 1, w)),
        "five requests": batch_of((0, 1), (w - 1, 1), (3, w), (0, w + 2), (2 * w, 2)),
        "suffixes beside last rows": [
            prompt(w + 1, w + 4, logprob_start=w + 3),
            prompt(0, w),
            prompt(2, 4, logprob_start=2),
            prompt(w, 1),
        ],
        "prefill beside decode rows": [
            prompt(w, 3),
            prompt(0, w + 2),
            prompt(w - 1, 1, decodes=True),
            prompt(2 * w, 1, decodes=True),
        ],
        "finished beside unfinished": [prompt(w, 3), prompt(2, w, **to_come)],
        "intermediate chunks": batch_of((w + 1, 4), (0, w + 1), **to_come),
        "unfinished beside decode rows": [
            prompt(0, w + 1, **to_come),
            prompt(w + 1, 1, decodes=True),
        ],
        "one prefix of two requests": [
            shared,
            replace(prompt(w + 2, 5), cached=shared.cached, shares=0),
            prompt(0, 4),
        ],
        "logprobs of unfinished": [
            prompt(3, 5, logprob_start=5, **to_come),
            prompt(0, w, **to_come),
        ],
        "logprobs beside unfinished": [
            prompt(w - 1, 4, logprob_start=w + 1),
            prompt(0, 6, **to_come),
        ],
        "one unfinished token": [prompt(w, 1, **to_come), prompt(0, 6, **to_come)],
    }


EVERY_BATCH = tuple(hard_batches(5))
EAGER, CAPTURED = "eager tail", "captured tail"
MOST_CAPTURED = 4
PREFIXES = "prefixes at the window"
#: By model and tail, the batches of every run, and those that are left to a release. With the
#: captured tail: as many requests as a graph has rows, fewer, more, and with suffixes. "two pools"
#: comes last, since the tests below go on with its engine and its captured tail.
CASES = {
    ("pages of four", EAGER): ((), (PREFIXES, "suffixes beside last rows")),
    ("pages of four", CAPTURED): ((), (PREFIXES,)),
    ("one pool", EAGER): (("one request",), (PREFIXES,)),
    ("one pool", CAPTURED): ((), (PREFIXES,)),  # its donor has no window
    ("two pools", EAGER): (
        (
            PREFIXES,
            "suffixes beside last rows",
            "prefill beside decode rows",
            "intermediate chunks",
        ),
        EVERY_BATCH,
    ),
    ("two pools", CAPTURED): (
        (PREFIXES,),
        (
            *("prefill beside decode rows", "one prefix of two requests", "one request"),
            *("five requests", "suffixes beside last rows"),
        ),
    ),
}


def cases() -> Iterator[Any]:
    """Yield (model, tail, batch): one model after the other, the eager tail first."""
    for (shape, tail), (every_run, release) in CASES.items():
        for name in every_run:
            yield pytest.param(shape, tail, name)
        for name in release:
            if name not in every_run:
                yield pytest.param(shape, tail, name, marks=pytest.mark.release)


# SGLang's own, which is replaced while the tail is planned.
_WINDOW_PLANNER = triton_backend.update_sliding_window_buffer
_last_engine: dict[str, Engine] = {}


@pytest.fixture
def engine(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Engine:
    """Return an engine of one of ``SHAPES``, by its name, kept until another one is needed.

    pytest would make a module's fixture again for each combination with other parameters.
    """
    shape = request.param
    if shape not in _last_engine:
        _last_engine.clear()
        _last_engine[shape] = Engine(
            checkpoints(SHAPES[shape]),
            **INTERPRETED_ENGINE,
            disable_hybrid_swa_memory=shape == "one pool",
            page_size=4 if shape == "pages of four" else 1,
            cuda_graph_bs_decode=[MOST_CAPTURED],
        )
    return _last_engine[shape]


def set_up(engine: Engine, tail: str) -> None:
    """Make the tail eager, or capture it."""
    reset_log()
    state = state_of(engine)
    if tail == EAGER:
        lifecycle.drop_tail(state, lifecycle.GRAPHS_OFF)
    elif state.captured is None:
        record_tail(engine, MOST_CAPTURED)


def run_batch(
    engine: Engine,
    prompts: list[Prompt],
    switch: str,
    *,
    prefix: str = "0",
    stock: Sequence[Observed] = (),
) -> list[Observed]:
    """Run a batch: its prefill, that of unfinished prompts' rest, and two decode steps.

    Args:
        prefix: the switch with which cached tokens are computed.
        stock: the stock run of this batch, if this is the fast one.
    """
    before = iter(stock)
    batch = engine.schedule(prompts, prefix=prefix)
    assert batch.forward_mode.is_mixed() == any(p.decodes for p in prompts)
    pool, slots = engine.runner.token_to_kv_pool, batch.out_cache_loc
    assert (slots.diff() != 1).any()  # out of order
    if hasattr(pool, "translate_loc_from_full_to_swa"):
        assert (pool.translate_loc_from_full_to_swa(slots) != slots).all()
    seen = [run(engine, batch, switch, planned_as=next(before, None))]
    if rest_of(prompts):
        batch = engine.next_chunk(batch, prompts)
        seen.append(run(engine, batch, switch, planned_as=next(before, None)))
    for seed in range(2):
        answers = tokens(random.Random(seed), len(batch.reqs))
        seen.append(step(engine, batch, answers, switch))
    return seen


@cache
def stock_of(engine: Engine, shape: str, name: str) -> list[Observed]:
    """Return the stock forwards of a batch, which are the same for either tail."""
    prompts = hard_batches(SHAPES[shape].sliding_window)[name]
    seen = run_batch(engine, prompts, "0")
    assert_stock(engine, prompts, seen[0])
    return seen


def assert_fast(engine: Engine, prompts: Sequence[Prompt], tail: str, seen: Observed) -> None:
    """Assert that the tail ran on kept rows only, on its backend, and left no trace."""
    wanted = expected(engine, prompts)
    main, backends = engine.runner.attn_backend, backends_of(engine)
    assert type(main) is TritonAttnBackend
    if wanted is None:
        assert_stock(engine, prompts, seen)
    else:
        has_graph = wanted.tail_mode == "DECODE" and len(prompts) <= MOST_CAPTURED
        if tail == CAPTURED and has_graph and not skips_tail(prompts):
            wanted = replayed(wanted)
        assert_as_expected(seen, wanted)
        assert type(backends.tail_backend) is TritonAttnBackend
        assert all(backend is main for backend in seen.backends[: wanted.front])
        assert all(backend is backends.tail_backend for backend in seen.backends[wanted.front :])
    assert_same_objects(seen)
    assert triton_backend.update_sliding_window_buffer is _WINDOW_PLANNER
    assert backends.main_backend is main
    assert backends.tail_backend is not main
    assert backends.tail_backend.forward_metadata is None
    # Its window is restored too: the next plan starts from it.
    assert Metadata.of(backends.tail_backend).settings == Metadata.of(main).settings
    assert_metadata_unchanged(seen)


def compare(
    engine: Engine,
    prompts: list[Prompt],
    tail: str,
    stock: list[Observed],
    fast: list[Observed],
) -> None:
    prefills = [prompts]
    if rest_of(prompts):
        prefills = [prompts, rest_of(prompts)]
    assert expected(engine, prompts) is not None
    for chunk, seen in zip(prefills, fast, strict=False):
        assert_fast(engine, chunk, tail, seen)
    for off, on in zip(stock, fast, strict=True):
        assert_same_cache(off, on)
        if not (off is stock[0] and skips_tail(prompts)):
            assert_same_answers(off, on, TOLERANCE)
    for decoded in fast[len(prefills) :]:
        assert set(decoded.modes) == {"DECODE"}
        assert set(map(id, decoded.backends)) == {id(engine.runner.attn_backend)}
        assert decoded.rows == stock[-1].rows
    assert fast[0].hidden.isfinite().all()


@pytest.mark.parametrize(("engine", "tail", "name"), cases(), indirect=["engine"])
def test_hard_batch(engine: Engine, request: pytest.FixtureRequest, tail: str, name: str) -> None:
    shape = request.node.callspec.params["engine"]
    prompts = hard_batches(SHAPES[shape].sliding_window)[name]
    stock = stock_of(engine, shape, name)
    set_up(engine, tail)
    # With the captured tail the cached tokens too are computed by the fast path.
    prefix = str(int(tail == CAPTURED))
    fast = run_batch(engine, prompts, "1", prefix=prefix, stock=stock)
    stock_before = any(p.cached for p in prompts) and prefix == "0"
    assert (SWITCHED_OFF in counters.served.forwards) == stock_before, counters.served.forwards
    assert counters.FAILED not in counters.served.forwards
    compare(engine, prompts, tail, stock, fast)


@pytest.mark.parametrize("engine", ["two pools"], indirect=True)
def test_an_eager_plan_leaves_the_graphs_buffers(engine: Engine) -> None:
    """If both used the same buffers, a replay would read another batch's keys."""
    set_up(engine, CAPTURED)
    batches, tail = (
        hard_batches(SHAPES["two pools"].sliding_window),
        backends_of(engine).tail_backend,
    )
    with switched("1"):
        engine.forward(engine.schedule(batches["one request"]))
        buffers = {}
        for name, buffer in vars(tail).items():
            if name.startswith("cuda_graph_") and isinstance(buffer, torch.Tensor):
                buffers[name] = buffer, buffer.clone()
        for name in ("five requests", "suffixes beside last rows"):
            engine.forward(engine.schedule(batches[name]))
    assert times(counters.TAIL_CAPTURED) == 1
    assert times(counters.TAIL_EAGER) == 2
    assert {"cuda_graph_kv_indices", "cuda_graph_window_kv_indices"} <= buffers.keys()
    for name, (buffer, before) in buffers.items():
        assert getattr(tail, name) is buffer, name
        assert torch.equal(buffer, before), name


@contextmanager
def tables_rewritten_once_planned(engine: Engine) -> Iterator[None]:
    """Rewrite the tables as the scheduler may on a PRE_REPLAY backend (trtllm_mha)."""
    runner, main = engine.runner, engine.runner.attn_backend
    tables = (
        runner.req_to_token_pool.req_to_token,
        runner.token_to_kv_pool.full_to_swa_index_mapping,
    )
    saved = [table.clone() for table in tables]
    plan = main.init_forward_metadata

    def init_forward_metadata(batch: Any) -> None:
        plan(batch)
        for table in tables:
            table.zero_()

    with patched(main, init_forward_metadata=init_forward_metadata):
        yield
    for table, before in zip(tables, saved, strict=True):
        table.copy_(before)


@pytest.mark.parametrize("engine", ["two pools"], indirect=True)
@pytest.mark.parametrize("tail", [EAGER, pytest.param(CAPTURED, marks=pytest.mark.release)])
def test_no_table_is_read_once_a_batch_is_planned(engine: Engine, tail: str) -> None:
    """The donor reads none either: window slots for its K and V were looked up before."""
    prompts = hard_batches(SHAPES["two pools"].sliding_window)[PREFIXES]
    stock = stock_of(engine, "two pools", PREFIXES)
    set_up(engine, tail)
    batch = engine.schedule(prompts)
    with tables_rewritten_once_planned(engine):
        fast = run(engine, batch, "1", planned_as=stock[0])
    assert_fast(engine, prompts, tail, fast)
    assert_same_cache(stock[0], fast)
    assert_same_answers(stock[0], fast, TOLERANCE)
