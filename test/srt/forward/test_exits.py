"""Captured prefills of SGLang's that end at the exit of layer S-1, on the ModelRunner.

SGLang's own runner, backend and breaks capture and replay (``prefill_graphs``), repaired by the
package. At the exit, all graph memory that must not be read there is overwritten.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.model_executor.runner_utils import pool
from sglang.srt.speculative.frozen_kv_mtp_utils import select_last_extend_hidden
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from harness import prefill_exits
from harness.batches import batch_of
from harness.checking import audited, counts
from harness.decode_graphs import record_tail
from harness.fixtures import Change
from harness.forwards import ENGINE, InjectedError, state_of
from harness.layer_rows import FIRST_CUT, LAYERS
from harness.media import MediaPrompt, media_batch
from harness.prefill_exits import (
    RECORDED,
    ROWS,
    TOLERANCE,
    assert_served_alike,
    close,
    run,
)
from harness.random_batches import (
    HARD_CHUNKS,
    HARD_LAST_ROWS,
    HARD_LOGPROBS,
    Batch,
    batches,
    try_batches,
)
from harness.upstream_fixes import REPORTS, fixed
from sglang_gemma4_reference import prefill_graphs as graphs_on_a_cpu
from sglang_gemma4_reference.engine import Engine, Prompt, reset_log
from sglang_gemma4_yoco import compat, counters, settings
from sglang_gemma4_yoco.captured import graphs, lifecycle
from sglang_gemma4_yoco.checking import audit, exit_check
from sglang_gemma4_yoco.checking import self_check as check_at_start
from sglang_gemma4_yoco.checking.synthetic_requests import SyntheticRequests
from sglang_gemma4_yoco.compat.captured_prefills import ExitPoint
from sglang_gemma4_yoco.core import planning, ranks
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.counters import Outcome
from sglang_gemma4_yoco.patched import patched
from sglang_gemma4_yoco.prefill_exits import exit_setup, graph_exits
from sglang_gemma4_yoco.prefill_exits.graph_exits import ExitForward

pytestmark = pytest.mark.usefixtures("forgotten_reports")

WHOLE = LAYERS + 1  # segments of a graph
TO_THE_EXIT = FIRST_CUT + 1  # of them, those before the attention of layer S-1
FULL = batch_of((0, 64))
SEVERAL = batch_of((30, 40), (0, 7), (90, 1))
CHUNK = batch_of((0, 20), to_come=(7,))


@pytest.fixture(scope="module")
def captured_engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    """Yield an engine that has captured its prefills and its tail."""
    with graphs_on_a_cpu.recordable():
        engine = Engine(tiny_checkpoint, **ENGINE, **RECORDED)
        record_tail(engine, ROWS)
        yield engine


@pytest.fixture
def engine(captured_engine: Engine) -> Iterator[Engine]:
    """Yield the captured engine in its initial state."""
    yield captured_engine
    state = state_of(captured_engine)
    state.off_because, state.failures_in_a_row = None, 0
    if state.captured is None:
        record_tail(captured_engine, ROWS)
    if not exits_of(captured_engine).are_open:
        reopened(captured_engine)
    assert exits_of(captured_engine).are_open


def exits_of(engine: Engine) -> graph_exits.Exits:
    """Return the exits of the engine's captured prefills, which it must have."""
    exits = exit_setup.find_exits(engine.runner)
    assert exits is not None
    return exits


def reopened(engine: Engine) -> str:
    """Open the exits as at start; return why they are closed, or ""."""
    reset_log()
    exit_setup.open_exits(engine.runner, state_of(engine))
    fact = state_of(engine).report.exits
    assert fact is not None
    if exits_of(engine).are_open:
        assert fact.startswith(f"open after {TO_THE_EXIT} segments")
        return ""
    assert fact.startswith("closed: ")
    return fact


# ---------------------------------------------------------------- forwards that exit, and others


def test_random_batches(engine: Engine) -> None:
    """All kinds of batches alternate, over pools that are emptied in between."""
    window = engine.text_model.config.sliding_window
    outcomes = []

    def check(batch: Batch) -> None:
        outcomes.append(assert_served_alike(engine, batch.prompts(window)))

    hard = (*HARD_LAST_ROWS, *HARD_LOGPROBS, *HARD_CHUNKS)
    try_batches(check, hard, batches(24, 8, logprobs=True), 60)
    assert outcomes.count(counters.EXIT_CAPTURED) >= 5
    assert outcomes.count(counters.EXIT_SKIPPED) >= 1
    assert outcomes.count(graph_exits.TAIL_NOT_CAPTURED) >= 5
    assert not {graph_exits.EXITS_CLOSED, planning.NOT_PLANNED, counters.FAILED} & set(outcomes)


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_text_with_a_literal_placeholder(engine: Engine, kind: str) -> None:
    """SGLang's eager model takes its per-layer embeddings from the padding; so must a graph."""
    placeholder = getattr(engine.runner.model.config, f"{kind}_token_id")
    [plain] = FULL
    ids = list(plain.new)
    for place in (0, 5, 6, 63):
        ids[place] = placeholder
    assert assert_served_alike(engine, [Prompt((), tuple(ids))]) == counters.EXIT_CAPTURED


@pytest.mark.parametrize("outcome", [counters.EXIT_CAPTURED, counters.TAIL_CAPTURED])
@pytest.mark.parametrize("donor", [FIRST_CUT - 1, FIRST_CUT])
def test_a_donor_that_arrives_late(engine: Engine, donor: int, outcome: Outcome) -> None:
    """A replay waits for nothing: what its attention reads must have been loaded before it.

    A layer's K and V of cached tokens are loaded when it is waited for. If they never are, the
    answers must differ.
    """
    scheduled, forward = engine.schedule(SEVERAL), engine.runner.forward
    stock, is_waited_for = run(engine, scheduled).logits, True
    pool, table = engine.runner.token_to_kv_pool, engine.runner.req_to_token_pool.req_to_token
    slots = table[scheduled.req_pool_indices[0], : scheduled.prefix_lens[0]].long()
    cached = compat.pools.get_cached_tokens(pool, donor, slots)
    loaded = cached.read()

    def wait_until(layer: int) -> None:
        if is_waited_for and layer == donor:
            cached.write(loaded)

    def run_late(batch: Any) -> Any:
        cached.write((9.0, 9.0))
        with patched(pool, layer_transfer_counter=SimpleNamespace(wait_until=wait_until)):
            return forward(batch)

    with mock.patch.object(engine.runner, "forward", run_late):
        for is_waited_for in (True, False):
            fast = run(engine, scheduled, fast=True, eagerly=outcome == counters.TAIL_CAPTURED)
            assert fast.outcomes == {outcome: 1}
            assert torch.allclose(fast.logits, stock, atol=TOLERANCE) == is_waited_for


def test_memory_is_not_lent_while_segments_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang lends the memory of its graphs only while none is replayed.

    Attention runs eagerly between the segments, and must find it in use on the way to an exit too.
    """
    monkeypatch.setattr(pool, "is_cuda", lambda: True)
    attention, users = engine.runner.attn_backend, list[str | None]()
    attend = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        users.append(pool._get_graph_pool_borrow_state().active_user)
        return attend(*args, **kwargs)

    with envs.SGLANG_ENABLE_GRAPH_POOL_BORROW.override(True), patched(attention, forward=forward):
        seen = run(engine, engine.schedule(FULL), fast=True)
    assert seen.outcomes == {counters.EXIT_CAPTURED: 1}
    assert users == ["CUDA graph"] * FIRST_CUT


@pytest.mark.parametrize("are_open", [True, False])
def test_media_run_eagerly(engine: Engine, are_open: bool) -> None:
    """The graph embeds text by ids, and has no input for an image."""
    exits_of(engine).are_open = are_open
    picture = MediaPrompt("<|image|>a picture of what", size=(336, 480))
    scheduled = media_batch(engine, picture)
    assert prefill_exits.is_replayed(scheduled.extend_num_tokens)
    stock = run(engine, scheduled)
    fast = run(engine, media_batch(engine, picture), fast=True)
    assert (stock.segments, fast.segments) == (0, 0)
    assert fast.outcomes == {counters.TAIL_CAPTURED: 1}
    close(fast.logits, stock.logits)
    close(fast.cache, stock.cache)
    state_of(engine).turn_off(audit.DIFFERED)
    off = run(engine, media_batch(engine, picture), fast=True)
    assert (off.segments, torch.equal(off.logits, stock.logits)) == (0, True)


UNFINISHED = batch_of((0, 33), (9, 1), (40, 20), (3, 5), to_come=tuple(range(20, 34)))


def test_answers_that_are_read_late(engine: Engine, batches_with: Change) -> None:
    """Answers and drafts' hidden states stay valid after second chunks ran on the same tail."""
    batches_with(
        capture_hidden_mode=CaptureHiddenMode.FULL,
        spec_algorithm=SpeculativeAlgorithm.FROZEN_KV_MTP,
    )
    first = engine.schedule(UNFINISHED)
    early = run(engine, first, fast=True, eagerly=True)
    second = engine.next_chunk(first, UNFINISHED)
    late = run(engine, second, fast=True, eagerly=True)
    for batch, fast in ((first, early), (second, late)):
        assert fast.outcomes == {counters.TAIL_CAPTURED: 1}
        stock = run(engine, batch, eagerly=True)
        close(fast.output.next_token_logits, stock.logits)
        read = select_last_extend_hidden(batch, fast.output.hidden_states)
        close(read, select_last_extend_hidden(batch, stock.output.hidden_states))


# ---------------------------------------------------------------- checked at start


def found_by_exits() -> Any:
    """Return a patch whose mock records the calls of ``compare_exit``."""
    return mock.patch.object(exit_check, "compare_exit", side_effect=exit_check.compare_exit)


def test_they_are_checked_at_start(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of(engine)
    with caplog.at_level(logging.INFO), found_by_exits() as compared:
        assert reopened(engine) == ""
    assert compared.call_count == 1
    line = f"exits from captured prefills are open after {TO_THE_EXIT} segments"
    assert line in caplog.text
    found = state.report.exits_check
    assert found is not None
    assert found["largest_difference"] <= 0.2 * found["allowed"]
    assert state.after_cut is None


def wrong_on_the_way() -> Any:
    """Return a patch: layer 0 attends wrongly before the exit, so K and V agree with wrong rows."""
    attend, replay = AttentionBackend.forward, compat.captured_prefills.replay_to_exit

    def forward(*args: Any, **kwargs: Any) -> Any:
        return attend(*args, **kwargs).roll(int(args[4].layer_id == 0), -1)  # args[4]: the layer

    def replay_to_exit(graph: Any) -> ExitPoint:
        with mock.patch.object(AttentionBackend, "forward", forward):
            return replay(graph)

    return mock.patch.object(compat.captured_prefills, "replay_to_exit", replay_to_exit)


def replayed_in_full(span: Callable[[], Any]) -> Any:
    """Return a patch: comparisons replay in full in the context ``span()``."""
    compare = exit_check.compare_exit

    def compare_exit(forward: ExitForward, *args: Any) -> Any:
        replay = forward.stock

        def stock() -> Any:
            with span():
                return replay()

        with patched(forward, stock=stock):
            return compare(forward, *args)

    return mock.patch.object(exit_check, "compare_exit", compare_exit)


def another_exit(change: Callable[[ExitPoint], ExitPoint]) -> Any:
    """Return a patch that changes what replays return at the exit."""
    prefills = compat.captured_prefills
    stock = prefills.replay_to_exit
    return mock.patch.object(prefills, "replay_to_exit", lambda graph: change(stock(graph)))


_replay = graphs.Bucket.replay
WRONG: dict[str, Callable[[], Any]] = {
    "rows before the exit": wrong_on_the_way,
    "no keys written in full": lambda: replayed_in_full(
        lambda: mock.patch.object(SWAKVPool, "set_kv_buffer")
    ),
    "rows": lambda: another_exit(lambda p: p._replace(rows=p.rows.roll(1, 0))),
    "values for keys": lambda: another_exit(lambda p: p._replace(keys=p.values, values=p.keys)),
    "values": lambda: another_exit(lambda p: p._replace(values=p.values * 1.001)),
    "no keys written": lambda: mock.patch.object(compat.pools, "write_keys_and_values"),
    "embeddings": lambda: mock.patch.object(ExitForward, "fast", without_embeddings),
    "tail": lambda: mock.patch.object(graphs.Bucket, "replay", lambda b: _replay(b) * 1.001),
}
_fast = ExitForward.fast


def without_embeddings(self: ExitForward, plan: Plan) -> torch.Tensor:
    """Leave out the embeddings in the forward itself; it reads ids from SGLang's static batch."""

    def embed(ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
        embeds, embedded = right(ids)
        return torch.zeros_like(embeds), embedded

    right = self.embed
    with mock.patch.object(self, "embed", embed):
        return _fast(self, plan)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_exits_are_closed_at_start(
    engine: Engine, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """The rest stays on: prefills that SGLang does not replay are cut."""
    with WRONG[what]():
        assert "the check found error " in reopened(engine)  # and no failure
    assert "exits from captured prefills are closed: the check found" in caplog.text
    assert_closed(engine)
    seen = run(engine, engine.schedule(batch_of((0, 200))), fast=True)
    assert seen.outcomes == {counters.TAIL_CAPTURED: 1}


def assert_closed(engine: Engine) -> None:
    """Assert that SGLang's graph runs to its end with the fast path on, without a plan for it."""
    batch = engine.schedule(FULL)
    stock = run(engine, batch)
    with mock.patch.object(graphs.Bucket, "fill", side_effect=InjectedError):
        seen = run(engine, batch, fast=True)
    assert (seen.segments, seen.outcomes) == (WHOLE, {graph_exits.EXITS_CLOSED: 1})
    assert torch.equal(seen.logits, stock.logits)
    assert all(map(torch.equal, seen.cache, stock.cache))


def test_an_exit_that_writes_elsewhere(engine: Engine) -> None:
    stock = compat.pools.write_keys_and_values

    def write(main: Any, pool: Any, attention: Any, batch: Any, k: Any, v: Any) -> None:
        stock(main, pool, attention, batch, k, v)
        table = engine.runner.req_to_token_pool.req_to_token
        first = table[batch.req_pool_indices[0], :1].long()  # of a prefix
        token = compat.pools.get_cached_tokens(pool, attention.layer_id, first)
        token.keys[token.slots] += 1

    with mock.patch.object(compat.pools, "write_keys_and_values", write):
        assert check_at_start.OTHERS_SLOTS in reopened(engine)


def test_exits_that_the_check_does_not_take(engine: Engine) -> None:
    """An exit that was not compared, or whose comparison failed, stays closed."""
    for owner, name in ((ExitForward, "fast"), (exit_check, "compare_exit")):
        with mock.patch.object(owner, name, side_effect=InjectedError):
            assert exit_setup.NOT_TAKEN in reopened(engine)
    with (
        mock.patch.object(SyntheticRequests, "run", side_effect=InjectedError),
        pytest.raises(InjectedError),
    ):
        reopened(engine)
    assert_closed(engine)


def test_the_check_takes_buckets_of_any_size(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would run so few rows eagerly if the next bucket has more than twice as many."""
    prefills = engine.runner.prefill_cuda_graph_runner
    monkeypatch.setattr(prefills, "capture_num_tokens", [128])
    assert reopened(engine) == ""


def test_a_tail_of_fewer_rows_than_the_check_has_requests(engine: Engine) -> None:
    """Prompts that finish are compared all the same."""
    state = state_of(engine)
    assert isinstance(state.captured, graphs.TailGraphs)
    for rows in (4, 2):
        del state.captured.buckets[rows]
    with found_by_exits() as compared:
        assert reopened(engine) == ""
    assert [call.args[1].kept_batch.kept.count for call in compared.call_args_list] == [1]
    lifecycle.drop_tail(state, "fewer rows")


def test_a_tail_that_is_not_captured(engine: Engine) -> None:
    """Chunks still exit."""
    lifecycle.drop_tail(state_of(engine), "no rows")
    with found_by_exits() as compared:
        assert reopened(engine) == ""
    assert [call.args[1].runner for call in compared.call_args_list] == [None]


# ---------------------------------------------------------------- audited


@pytest.mark.parametrize("prompts", [FULL, SEVERAL, CHUNK])
def test_what_is_found_of_a_served_batch(engine: Engine, prompts: list[Prompt]) -> None:
    """The graph runs to its end as well; the pool keeps its K and V."""
    batch = engine.schedule(prompts)
    stock = run(engine, batch)
    with audited(engine):
        seen = run(engine, batch, fast=True)
    assert counts() == (1, 0)
    assert counters.served.worst_audit < 0.5
    assert seen.segments == 2 * WHOLE  # of one graph, which counts its latest replay
    assert all(map(torch.equal, seen.cache, stock.cache))


def test_a_defect_that_an_audit_finds_is_answered_by_stock(engine: Engine) -> None:
    batch = engine.schedule(FULL)
    stock = run(engine, batch)
    with audited(engine), WRONG["tail"]():
        seen = run(engine, batch, fast=True)
    assert counts() == (0, 1)
    assert torch.equal(seen.logits, stock.logits)


# ---------------------------------------------------------------- opened, and closed


def test_graphs_that_are_captured_again(engine: Engine) -> None:
    """Exits of graphs that are captured again are closed, since they were not compared.

    SGLang's memory for rows that are not written may hold anything, and what is multiplied by zero
    must be a number.
    """
    runner, prefills = engine.runner, engine.runner.prefill_cuda_graph_runner
    outputs = [output for _, output in compat.captured_prefills.list_graphs(prefills).values()]
    for output in outputs:
        output.fill_(torch.nan)
    new = mock.Mock(spec=compat.server.PrefillCudaGraphRunner)
    new.backend = copy.copy(prefills.backend)
    with mock.patch.object(runner, "prefill_cuda_graph_runner", new):
        exit_setup.add_closed_exits(runner, state_of(engine))
        assert not exits_of(engine).are_open
    assert all(output.isfinite().all() for output in outputs)


def test_exits_of_ranks_are_compared(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one rank alone found a difference, it would exit alone."""
    compared = []
    monkeypatch.setattr(ranks, "find_difference", lambda found: compared.append(found))
    assert reopened(engine) == ""
    assert compared == ["exits agree with stock: True"]
    monkeypatch.setattr(ranks, "find_difference", lambda _: ranks.NOT_ALIKE)
    assert ranks.NOT_ALIKE in reopened(engine)
    assert_closed(engine)
    monkeypatch.undo()


def test_without_the_check(engine: Engine) -> None:
    with settings.changed(self_check=False):
        assert reopened(engine) == ""
    found = state_of(engine).report.exits_check
    assert found == check_at_start.NOT_WANTED.to_json()


# ---------------------------------------------------------------- repaired


def test_the_proposed_fix_works() -> None:
    """With the diff of ``docs/upstream`` SGLang does not report shared layers as an error."""
    index = fixed(
        cuda_graph_setup.index_attention_layers_by_global_id, REPORTS / "shared_layer_ids.md"
    )
    layers = [SimpleNamespace(layer_id=number) for number in (0, 1, 1)]
    assert index(layers, [None] * 3) == (layers, [None] * 3)


@pytest.mark.parametrize("setting", [True, False])
def test_the_repair_lasts_while_sglang_captures(
    engine: Engine, caplog: pytest.LogCaptureFixture, setting: bool
) -> None:
    """On a server that is not cut, SGLang's error stays."""
    state, model = state_of(engine), engine.text_model

    layer = model.layers[FIRST_CUT]
    index, forward = cuda_graph_setup.index_attention_layers_by_global_id, model.forward

    def what_is_repaired() -> list[bool]:
        other_index = cuda_graph_setup.index_attention_layers_by_global_id is not index
        return [model.forward != forward, "forward" in vars(layer.self_attn.attn), other_index]

    capturing = partial(exit_setup.repair_capture, engine.runner, state)
    with caplog.at_level(logging.INFO), settings.changed(prefill_graphs=setting), capturing():
        assert what_is_repaired() == [setting] * 3
    assert ("SGLANG_GEMMA4_YOCO_PREFILL_GRAPHS=0 disables the fix" in caplog.text) is setting
    assert (compat.captured_prefills.SHARED_LAYER_IDS in caplog.text) is setting
    with patched(state, off_because="data-parallel attention"), capturing():
        assert not any(what_is_repaired())
    assert not any(what_is_repaired())


def test_graphs_that_get_no_exits_are_not_used(engine: Engine) -> None:
    """Without an exit nothing keeps media out of a graph."""
    prefills = mock.Mock(spec=compat.server.PrefillCudaGraphRunner)
    captured = SimpleNamespace(model=engine.runner.model, prefill_cuda_graph_runner=prefills)
    with (
        mock.patch.object(exit_setup, "add_exits", side_effect=InjectedError),
        pytest.raises(InjectedError),
    ):
        exit_setup.add_closed_exits(captured, state_of(engine))
    assert captured.prefill_cuda_graph_runner is None


def test_closing_drops_captured_prefills(engine: Engine) -> None:
    """Without the package nothing keeps media out of a graph."""
    runner, state = engine.runner, state_of(engine)
    before = runner.prefill_cuda_graph_runner
    try:
        state.close()
        assert runner.prefill_cuda_graph_runner is None
    finally:
        runner.prefill_cuda_graph_runner = before
        state.attach(planning.plan_batch)
        state.on_close(partial(setattr, runner, "prefill_cuda_graph_runner", None))
