"""The captured tail on the ModelRunner: when it is replayed, its output, and its release.

What is captured are operations on a CPU (``recorder``). A replay runs no Python of the layers: rows
and modules of the tail are not seen, which shows that it ran. On Triton: ``test_hard_batches``.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.layers.attention.verify_mask import maybe_create_verify_mask
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from harness.batches import BATCHES, batch_of
from harness.decode_graphs import record_tail, recorded_decode_steps, static_tensors
from harness.fixtures import Change, Said
from harness.forwards import (
    ENGINE,
    TWO_PROMPTS,
    InjectedError,
    assert_fast,
    backends_of,
    norms_that_add_in_place,
    outcomes,
    state_of,
)
from harness.layer_rows import FIRST_CUT, LAYERS
from harness.observe import (
    both_ways,
    run,
)
from sglang_gemma4_reference import recorder, releases
from sglang_gemma4_reference.engine import Engine, reset_log
from sglang_gemma4_reference.recorder import tensors_in
from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.captured import graphs, lifecycle
from sglang_gemma4_yoco.captured.graphs import Bucket, TailGraphs
from sglang_gemma4_yoco.checking import rounding, tail_graphs
from sglang_gemma4_yoco.core import cut, ranks
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.patched import patched
from sglang_gemma4_yoco.startup import graphs_captured

pytestmark = pytest.mark.usefixtures("forgotten_reports")

MOST = 4


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    """Return the engine of other tests, whose graphs may be captured."""
    return Engine(tiny_checkpoint, **ENGINE, cuda_graph_bs_decode=[MOST])


@pytest.fixture
def tail(engine: Engine) -> TailGraphs:
    """Return the engine's captured tail; it is captured again after a test that releases it."""
    captured = state_of(engine).captured
    if isinstance(captured, TailGraphs):
        return captured
    return record_tail(engine, MOST)


@pytest.fixture
def eager_state(engine: Engine) -> Iterator[ModelState]:
    """Yield the engine's model state; the tail is eager before and after the test."""
    state = state_of(engine)
    lifecycle.drop_tail(state, lifecycle.NOT_YET)
    yield state
    lifecycle.drop_tail(state, lifecycle.NOT_YET)


assert_replayed = partial(assert_fast, replays=True)


def why_eager(engine: Engine) -> str:
    """Return the reason in /server_info why the tail is not captured."""
    reported = state_of(engine).report.tail_mode
    assert reported is not None
    assert reported.startswith("eager (")
    return reported[len("eager (") : -1]


# ---------------------------------------------------------------- graphs that must not be replayed


@contextmanager
def rows_swapped_in_graphs(static_input: str) -> Iterator[None]:
    """Swap rows of one input in graphs captured in the ``with`` block."""
    run_layers = graphs.run_layers
    field = {"requests": "req_pool_indices", "lengths": "seq_lens"}.get(static_input)

    def captured(state: ModelState, inputs: graphs.Inputs, batch: Any) -> torch.Tensor:
        if not recorder.is_recording():  # it is run eagerly
            return run_layers(state, inputs, batch)
        swapped = getattr(inputs, static_input).flip(0)
        if field is not None:
            with patched(batch, **{field: swapped}):
                return run_layers(state, inputs, batch)
        return run_layers(state, dataclasses.replace(inputs, **{static_input: swapped}), batch)

    with mock.patch.object(graphs, "run_layers", captured):
        yield


@pytest.mark.parametrize(
    "static_input", ["rows", "positions", "requests", "lengths", "embeds", "embedded"]
)
def test_a_graph_that_takes_a_row_for_another_is_not_used(
    engine: Engine, eager_state: ModelState, said: Said, static_input: str
) -> None:
    """With several prompts, a user would get an answer to another prompt, or at another length."""
    with rows_swapped_in_graphs(static_input), pytest.raises(AssertionError):
        record_tail(engine, MOST)  # which needs graphs for these row counts
    assert isinstance(eager_state.captured, TailGraphs)
    assert eager_state.captured.sizes == (1,)  # without swapped rows
    for rows, line in zip((2, 4), said(logging.ERROR), strict=True):
        assert f"the tail captured for {rows} rows differs" in line
    assert_fast(engine, TWO_PROMPTS)


def test_one_graph_that_rounds_differently(
    engine: Engine, eager_state: ModelState, said: Said
) -> None:
    """The next larger graph is replayed instead, and was compared with as much padding."""
    stock, compared = tail_graphs.compare_graph, dict[int, tuple[int, ...]]()

    def compare(tail: TailGraphs, runner: Any, size: int) -> list[rounding.Difference]:
        compared[size] = tail.sizes
        if size == 2:
            return [rounding.make_defect("a kernel for few rows")]
        return stock(tail, runner, size)

    with mock.patch.object(tail_graphs, "compare_graph", compare):
        tail = record_tail(engine, MOST)
    assert tail.sizes == (1, 4)
    assert compared == {1: (1, 2, 4), 2: (1, 2, 4), 4: (1, 4)}
    assert len(said(logging.ERROR)) == 1
    assert_replayed(engine, TWO_PROMPTS)
    assert outcomes() == {counters.TAIL_CAPTURED: 1}


# ---------------------------------------------------------------- replays


@contextmanager
def watched_replays(tail: TailGraphs) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield the contents of a graph's static inputs, for each replay in the ``with`` block."""
    seen = []
    replay = tail.captured.replay

    def noting(size: int, batch: Any) -> Any:
        seen.append({name: t[:size].clone() for name, t in vars(tail.inputs[-1]).items()})
        return replay(size, batch)

    with patched(tail.captured, replay=noting):
        yield seen


@pytest.mark.parametrize(("requests", "size"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_one_row_of_each_request(
    engine: Engine, tail: TailGraphs, requests: int, size: int
) -> None:
    """The smallest graph with room is replayed; windows of 32 cover all keys of some requests.

    Three are padded to four: an earlier batch's values in that row are not read.
    """
    prompts = batch_of((0, 40), (5, 3), (90, 1), (33, 20))[:requests]
    assert_replayed(engine, prompts)
    for stale in vars(tail.inputs[-1]).values():
        stale.fill_(torch.nan if stale.is_floating_point() else 7)
    with watched_replays(tail) as replays:
        assert_replayed(engine, prompts)
    [read] = replays
    lengths = [len(prompt.cached) + len(prompt.new) for prompt in prompts]
    assert read["lengths"].tolist() == lengths + [1] * (size - requests)
    assert not read["requests"][requests:].any()
    assert outcomes() == {counters.TAIL_CAPTURED: 2}
    assert tail.sizes == (1, 2, 4)


def test_more_rows_than_the_largest_graph_has(engine: Engine, tail: TailGraphs) -> None:
    """Other tails that are not replayed: ``server/test_workload``."""
    assert_fast(engine, batch_of((0, 9), (3, 5), (40, 2), (0, 33), (7, 1)))
    assert outcomes() == {counters.TAIL_EAGER: 1}


# ---------------------------------------------------------------- host work and memory


def test_its_graphs_have_a_memory_pool_of_their_own(
    engine: Engine, eager_state: ModelState
) -> None:
    """In SGLang's pool, memory that is free while one of its graphs is captured may be in use."""
    with recorded_decode_steps(engine) as decode_steps:
        assert isinstance(eager_state.captured, TailGraphs)
        ours = eager_state.captured.captured
        assert ours is not decode_steps.backend
        assert ours._pool is not decode_steps.backend._pool


@pytest.fixture
def buffers(engine: Engine, eager_state: ModelState) -> Iterator[Callable[[], list[str]]]:
    """Yield a function that names the buffers that the tail's backend has allocated and planned.

    It allocates and plans as GPU backends do; the CPU's does neither.
    """
    planner = backends_of(engine).tail_backend
    stock = planner.init_forward_metadata_out_graph

    def allocating(most: int, tokens: int) -> None:
        assert most == tokens
        planner.cuda_graph_kv_indices = torch.zeros(most)

    def planning(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        planner.forward_metadata = object()

    def left() -> list[str]:
        names = [name for name in vars(planner) if name.startswith("cuda_graph_")]
        return names + ["a plan"] * (planner.forward_metadata is not None)

    with patched(
        planner, init_cuda_graph_state=allocating, init_forward_metadata_out_graph=planning
    ):
        yield left


@pytest.mark.parametrize("rebuilt", [False, True], ids=["dropped", "backends are rebuilt"])
def test_nothing_is_held_of_a_tail_that_is_dropped(
    engine: Engine, buffers: Callable[[], list[str]], rebuilt: bool
) -> None:
    """All memory is released at once: Python's cyclic GC does not track GPU memory."""
    eager_state = state_of(engine)
    held = weakref.ref(record_tail(engine, MOST))
    assert isinstance(eager_state.captured, TailGraphs)
    assert buffers() == ["cuda_graph_kv_indices"]
    batches = [bucket._batch for bucket in eager_state.captured.buckets.values()]
    assert [getattr(batch, "residual_stream", None) for batch in batches] == [None] * 3
    assert_replayed(engine, TWO_PROMPTS)
    gc.collect()
    gc.disable()
    try:
        if rebuilt:
            engine.runner.init_attention_backends()
        else:
            lifecycle.drop_tail(eager_state, lifecycle.NOT_YET)
        assert held() is None
    finally:
        gc.enable()
    assert buffers() == []


@pytest.mark.parametrize(
    ("fails", "why", "errors"),
    [
        ("capture", "capturing failed: InjectedError", 1),
        ("a comparison", tail_graphs.DIFFERS, 3),
        ("captured: None", ranks.NOT_ALIKE, 0),
        ("replayed: (1, 2, 4), None", ranks.NOT_ALIKE, 0),
    ],
    ids=["capture", "a comparison", "another rank's memory", "another rank's comparison"],
)
def test_nothing_is_held_of_a_tail_that_is_not_used(
    engine: Engine,
    buffers: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    said: Said,
    fails: str,
    why: str,
    errors: int,
) -> None:
    def disagreement(findings: str) -> str | None:
        if findings == fails:
            return ranks.NOT_ALIKE
        return None

    defect = mock.Mock(return_value=[rounding.make_defect("the captured tail")])
    with monkeypatch.context() as broken:
        if fails == "capture":
            broken.setattr(Bucket, "_run", mock.Mock(side_effect=InjectedError))
        elif fails == "a comparison":
            broken.setattr(tail_graphs, "compare_graph", defect)
        else:
            broken.setattr(ranks, "find_difference", disagreement)
        with pytest.raises(AssertionError):
            record_tail(engine, MOST)
    # All graphs are compared, since other ranks, which may find nothing, run the same layers.
    assert defect.call_count in (0, 3)
    eager_state = state_of(engine)
    assert (eager_state.captured, why_eager(engine)) == (None, why)
    assert len(said(logging.ERROR)) == errors
    assert buffers() == []
    assert_fast(engine, TWO_PROMPTS)


def test_norms_that_add_in_place(engine: Engine, eager_state: ModelState) -> None:
    """Their CUDA kernel does so: the layers must add into a copy of the static rows.

    A graph is compared with the same inputs twice, and would find them changed.
    """
    with norms_that_add_in_place(engine):
        assert record_tail(engine, MOST).sizes == (1, 2, 4)
        for prompts in (TWO_PROMPTS, batch_of((0, 9), (3, 5), (40, 2))):
            assert_replayed(engine, prompts)


def test_no_mask_for_drafts_is_allocated(
    engine: Engine, eager_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang allocates one for draft verification, whose size depends on the context length."""
    tail, seen = backends_of(engine).tail_backend, list[int | None]()
    allocate = tail.init_cuda_graph_state

    def allocating(*sizes: int) -> None:
        seen.append(tail.num_draft_tokens)
        allocate(*sizes)

    monkeypatch.setattr(tail, "num_draft_tokens", 4, raising=False)
    monkeypatch.setattr(tail, "init_cuda_graph_state", allocating)
    record_tail(engine, MOST)
    assert (seen, tail.num_draft_tokens) == ([None], 4)
    sizes = {"max_bs": 1, "max_context_len": 8, "num_draft_tokens": seen[0], "device": "cpu"}
    runner = {"is_draft_runner": False, "skip_prefill": False, "is_read": True}
    assert maybe_create_verify_mask(**sizes, **runner) is None


def test_captured_in_inference_mode(engine: Engine, eager_state: ModelState) -> None:
    """SGLang captures in inference mode after a weight update; its forwards may run without it."""
    with torch.inference_mode():
        record_tail(engine, MOST)
    assert_replayed(engine, TWO_PROMPTS)


@pytest.mark.parametrize("collects", [False, True])
def test_garbage_is_not_collected_during_a_capture(
    engine: Engine, eager_state: ModelState, monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    """SGLang's own captures disable the collector too, unless --enable-cudagraph-gc is set."""
    frozen, seen, stock = [False], list[bool](), Bucket._run

    def run(bucket: Bucket) -> torch.Tensor:
        seen.append(frozen[-1])
        return stock(bucket)

    monkeypatch.setattr(gc, "freeze", partial(frozen.append, True))
    monkeypatch.setattr(gc, "unfreeze", partial(frozen.append, False))
    monkeypatch.setattr(Bucket, "_run", run)
    read, given = compat.server.read_argument, {"enable_cudagraph_gc": collects}
    monkeypatch.setattr(compat.server, "read_argument", lambda name: given.get(name) or read(name))
    record_tail(engine, MOST)
    assert set(seen) == {not collects}
    assert frozen[-1] is False


@pytest.mark.parametrize(
    ("wanted", "requests", "rows"),
    [(None, 8, (1, 2, 4, 8)), (None, 99, (1, 2, 4, 8, 16, 32)), (2, 8, (1, 2)), (4, 3, (1, 2))],
)
def test_rows_that_are_captured(
    engine: Engine,
    eager_state: ModelState,
    monkeypatch: pytest.MonkeyPatch,
    setting: Change,
    wanted: int | None,
    requests: int,
    rows: tuple[int, ...],
) -> None:
    """The maximum is the operator's, and the number of requests that can run at a time."""
    setting(graph_rows=wanted)
    pool = SimpleNamespace(**vars(engine.runner.req_to_token_pool) | {"size": requests})
    with monkeypatch.context() as other:
        other.setattr(engine.runner, "req_to_token_pool", pool)
        other.setattr(tail_graphs, "check_graphs", lambda *_: None)
        with recorded_decode_steps(engine):
            assert isinstance(eager_state.captured, TailGraphs), why_eager(engine)
            assert eager_state.captured.sizes == rows


# ---------------------------------------------------------------- inputs of a graph


def test_nothing_is_captured_by_accident(engine: Engine, tail: TailGraphs) -> None:
    planned = list(vars(backends_of(engine).tail_backend).values())
    declared = [*static_tensors(engine), *tensors_in([vars(tail.inputs[-1])])]
    rows_at = tail.inputs[-1].rows.data_ptr()
    without_rows = [tensor for tensor in declared if tensor.data_ptr() != rows_at]
    for rows, graph in tail.captured.graphs.items():
        assert len(graph) > 20 * (LAYERS - FIRST_CUT)
        assert graph.undeclared(declared, planned) == [], rows
        assert len(graph.undeclared(without_rows, planned)) == 1


# ---------------------------------------------------------------- failures


def test_a_capture_that_fails_beside_other_ranks_ends_the_server(
    engine: Engine, eager_state: ModelState
) -> None:
    """The other ranks have captured theirs, and wait for this one in collectives."""
    with (
        mock.patch.object(Bucket, "_run", side_effect=InjectedError),
        mock.patch.object(compat.server, "is_single_rank", return_value=False),
        pytest.raises(InjectedError),
    ):
        record_tail(engine, MOST)
    engine.runner.decode_cuda_graph_runner = None  # SGLang's own graphs were there by then
    assert eager_state.captured is None
    assert_fast(engine, TWO_PROMPTS)


# ---------------------------------------------------------------- when, and what is logged


def reason(engine: Engine) -> str:
    """Return why the tail is eager after SGLang has captured its graphs."""
    state = state_of(engine)
    graphs_captured.set_up(engine.runner, engine.text_model)
    assert state.captured is None
    return why_eager(engine)


@pytest.fixture
def can_be_captured(eager_state: ModelState) -> Iterator[None]:
    """Pretend that decode steps are captured: only the test's reason keeps the tail eager."""
    with mock.patch.object(compat.decode_graphs, "get_captured_steps", return_value=mock.Mock()):
        yield


def test_without_graphs_of_sglangs_own(engine: Engine) -> None:
    assert engine.runner.decode_cuda_graph_runner is None
    assert reason(engine) == lifecycle.NO_GRAPHS
    with releases.published(disaggregation_mode="prefill"):
        assert reason(engine) == lifecycle.NO_GRAPHS_BY_ROLE


@pytest.mark.parametrize("backend", ["breakable", "tc_piecewise", "disabled"])
def test_decode_steps_in_graphs_of_another_kind(
    engine: Engine, tail: TailGraphs, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Piecewise graphs run Python between the pieces."""
    config = SimpleNamespace(decode=SimpleNamespace(backend=backend))
    steps = object.__new__(DecodeCudaGraphRunner)
    with monkeypatch.context() as other, releases.published(cuda_graph_config=config):
        other.setattr(engine.runner, "decode_cuda_graph_runner", steps)
        assert reason(engine) == lifecycle.NO_GRAPHS


@pytest.mark.usefixtures("can_be_captured")
class TestReasons:
    def test_switched_off(self, engine: Engine, setting: Change) -> None:
        setting(graph_rows=0)
        assert reason(engine) == lifecycle.GRAPHS_OFF
        assert_fast(engine, TWO_PROMPTS)

    @pytest.mark.parametrize(
        "name", ["enable_memory_saver", "enable_symm_mem", "disable_cuda_graph_padding"]
    )
    def test_arguments(self, engine: Engine, name: str) -> None:
        with releases.published(**{name: True}):
            assert reason(engine).startswith(f"{name}: ")
        assert_fast(engine, TWO_PROMPTS)

    def test_lent_memory(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SGLANG_ENABLE_GRAPH_POOL_BORROW", "1")
        assert reason(engine).startswith("SGLANG_ENABLE_GRAPH_POOL_BORROW: ")

    def test_little_memory(self, eager_state: ModelState, monkeypatch: pytest.MonkeyPatch) -> None:
        """A capture that fails ends a server of several ranks, which wait for each other."""
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (900 << 20, 80 << 30))
        why = lifecycle.find_eager_reason(SimpleNamespace(device="cuda"), eager_state)
        assert why == "less than 1024 MiB of GPU memory is free: lower --mem-fraction-static"

    def test_what_is_known_of_the_server(self, engine: Engine, eager_state: ModelState) -> None:
        with patched(eager_state.backends, decodes=False):
            assert reason(engine) == lifecycle.NOT_DECODING
        with patched(eager_state, splits_per_layer_inputs=False):
            assert reason(engine) == lifecycle.QUANTISED

    @pytest.mark.usefixtures("eager_state")
    @pytest.mark.parametrize("part", ["", ".full_kv_pool", ".swa_kv_pool"])
    def test_prefixes_that_are_loaded_while_layers_run(self, engine: Engine, part: str) -> None:
        """No server argument tells that layers' prefixes may be loaded while others run."""
        pool = operator.attrgetter(f"token_to_kv_pool{part}")(engine.runner)
        with patched(pool, layer_transfer_counter=object()):
            assert reason(engine) == lifecycle.LOADED_MEANWHILE


def test_without_per_layer_embeddings_stock_serves(engine: Engine, tail: TailGraphs) -> None:
    """The graph was captured with them; its memory still has those of the batch before."""
    run(engine, engine.schedule(BATCHES["one prompt"]), "1")
    scheduled, model = engine.schedule(TWO_PROMPTS), type(engine.text_model)
    reset_log()
    with mock.patch.object(model, "get_per_layer_inputs", return_value=None):
        stock, fast = both_ways(engine, scheduled, 0.0)
    assert fast.rows[-LAYERS:] == stock.rows
    assert [*map(str, outcomes())] == [cut.OTHER_INPUTS]
    engine.runner.init_attention_backends()
