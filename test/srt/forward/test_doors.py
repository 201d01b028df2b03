"""Prefills that SGLang has recorded, left by the door of layer K-1, on the ModelRunner.

SGLang's own runner, backend and breaks record and replay (``prefill_graphs``), repaired by the
package. At the door everything in the recording's memory is spoiled that may not be read there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

import prefill_replays
from audited_prefills import audited, counts
from batches import batch_of
from decode_graphs import record_tail
from forwards import ENGINE, InjectedError
from layer_rows import FIRST_CUT, FIRST_SHARED, LAYERS
from media import MediaPrompt, media_batch
from prefill_replays import RECORDED, ROWS, assert_served_alike, close, run
from random_batches import HARD_LAST_ROWS, HARD_LOGPROBS, HARD_UNREAD, Batch, batches
from sglang_gemma4_reference import prefill_graphs, releases
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import log, seams, settings
from sglang_gemma4_yoco.checking import self_check
from sglang_gemma4_yoco.checking.checked import Checked
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.cutting import doors, fallback, gate
from sglang_gemma4_yoco.cutting.doors import Door, Doors
from sglang_gemma4_yoco.cutting.forward import ReplayedFront
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.loading import repair, starting
from sglang_gemma4_yoco.core import donor
from sglang_gemma4_yoco.core.attention import TailBackend
from sglang_gemma4_yoco.captured.graphs import TailGraphs

pytestmark = [
    pytest.mark.skipif(
        not releases.records_prefills(), reason="tried with the prefill graphs of SGLang 0.5.23"
    ),
    pytest.mark.usefixtures("forgotten_reports"),
]

WHOLE = LAYERS + 1  # segments of a recording
BY_THE_DOOR = FIRST_CUT + 1  # of them, those before the attention of layer K-1
FULL = batch_of((0, 64))
HARD = (*HARD_LAST_ROWS, *HARD_LOGPROBS, *HARD_UNREAD)


@pytest.fixture(scope="module")
def recorded_engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    """It has recorded its prefills and its tail."""
    with prefill_graphs.recordable():
        engine = Engine(tiny_checkpoint, **ENGINE, **RECORDED)
        assert type(engine.runner.prefill_cuda_graph_runner) is PrefillCudaGraphRunner
        assert engine.runner.model_config.is_multimodal
        record_tail(engine, ROWS)
        yield engine


@pytest.fixture
def engine(recorded_engine: Engine) -> Iterator[Engine]:
    """As recorded, whatever the test before has left."""
    yield recorded_engine
    fallback.reset()
    known = start.of(recorded_engine.text_model)
    known.refused = None
    known.checked = Checked(unchecked="of an earlier test")
    if known.captured is None:
        record_tail(recorded_engine, ROWS)
    elif known.doors.closed is not None:
        starting._open_doors(known, recorded_engine.runner)
    assert known.doors.closed is None


# ---------------------------------------------------------------- what leaves, and what does not


def test_random_batches(engine: Engine) -> None:
    """All kinds in turns, over pools that are emptied in between."""
    window = engine.text_model.config.sliding_window
    outcomes: list[str] = []

    @hypothesis_settings(
        max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(batches(24, 8, logprobs=True))
    def property_(batch: Batch) -> None:
        outcomes.append(assert_served_alike(engine, batch.prompts(window)))

    for batch in HARD:
        property_ = example(batch)(property_)
    property_()
    assert outcomes.count(log.EXIT_CAPTURED) >= 5
    assert outcomes.count(log.EXIT_SKIPPED) >= 1
    assert outcomes.count(gate.NOT_RECORDED) >= 5
    assert not {gate.REPLAYED, gate.NOT_PLANNED, log.FAILED} & set(outcomes)


@pytest.mark.parametrize("rows", [8, 9, 15, 16, 17, 33, 63, 64, 65, 127, 128])
def test_padded_rows(engine: Engine, rows: int) -> None:
    """A bucket that is full, one row short of it, or half empty."""
    assert assert_served_alike(engine, batch_of((0, rows))) == log.EXIT_CAPTURED


@pytest.mark.parametrize("rows", [7, 129, 200])
def test_lengths_without_a_bucket(engine: Engine, rows: int) -> None:
    """SGLang runs them eagerly, and they are cut as ever."""
    assert assert_served_alike(engine, batch_of((0, rows))) == log.TAIL_CAPTURED


def test_as_many_prompts_as_the_tail_has_rows(engine: Engine) -> None:
    fits = batch_of((0, 9), (3, 5), (40, 2), (0, 33))
    assert assert_served_alike(engine, fits) == log.EXIT_CAPTURED
    assert assert_served_alike(engine, [*fits, *batch_of((7, 1))]) == gate.NOT_RECORDED


def test_decoding_requests_beside_a_prompt(engine: Engine) -> None:
    decoding = [Prompt(prompt.cached, prompt.new, decodes=True) for prompt in batch_of((40, 1))]
    prompts = [*batch_of((0, 20), (5, 9)), *decoding]
    assert assert_served_alike(engine, prompts) == log.EXIT_CAPTURED


def test_media_run_eagerly(engine: Engine) -> None:
    """The recording looks text up by its ids, and has no place for an image."""
    picture = MediaPrompt("<|image|>a picture of what", size=(336, 480))
    scheduled = media_batch(engine, picture)
    assert prefill_replays.is_replayed(scheduled.extend_num_tokens)
    stock = run(engine, scheduled)
    scheduled = media_batch(engine, picture)
    fast = run(engine, scheduled, fast=True)
    assert (stock.segments, fast.segments) == (0, 0)
    assert fast.outcomes == {log.TAIL_CAPTURED: 1}
    close(fast.logits, stock.logits)
    close(fast.cache, stock.cache)


def test_media_that_sglang_replays_are_not_cut(engine: Engine) -> None:
    known, batch = start.of(engine.text_model), mock.Mock(mm_input_embeds=object())
    assert gate._media(batch) == gate.REPLAYED_MEDIA
    assert known.doors.closed is None


def test_switched_off(engine: Engine) -> None:
    """A refused batch runs the recording to its end, and nothing is planned for it."""
    batch = engine.schedule(FULL)
    with mock.patch.object(TailBackend, "plan", side_effect=InjectedError):
        seen = run(engine, batch)
    assert (seen.segments, seen.outcomes) == (WHOLE, {gate.OFF: 1})


def test_too_little_to_skip_on_a_gpu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """There stock's own recording is as good for a short prompt, but not for an unread chunk."""
    known = start.of(engine.text_model)
    with monkeypatch.context() as patched, settings.changed(min_skipped_rows=None):
        patched.setitem(vars(known), "on_gpu", True)
        short = run(engine, engine.schedule(batch_of((0, 128))), fast=True)
        chunk = batch_of((0, 20), to_come=(7,))
        unread = run(engine, engine.schedule(chunk), fast=True, unread=True)
    assert (short.segments, short.outcomes) == (WHOLE, {gate.TOO_LITTLE: 1})
    assert (unread.segments, unread.outcomes) == (BY_THE_DOOR, {log.EXIT_SKIPPED: 1})


# ---------------------------------------------------------------- a cut before layer K


@pytest.fixture
def before_layer_k(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The donor cannot be cut: recorded anew, doors and tail begin at layer K."""
    known, runner = start.of(engine.text_model), engine.runner
    before = runner.prefill_cuda_graph_runner
    with monkeypatch.context() as patched:
        patched.setitem(vars(known), "donor_cut", DonorCut.NONE)
        with torch.no_grad():
            runner.init_prefill_cuda_graph()
        record_tail(engine, ROWS)
        yield
    runner.prefill_cuda_graph_runner = before
    known.drop_graphs("recorded from layer K on")


@pytest.mark.usefixtures("before_layer_k")
def test_a_cut_before_layer_k(engine: Engine) -> None:
    """One segment more, whose break has written K and V itself."""
    for prompts in (FULL, batch_of((30, 40), (0, 7), (90, 1)), batch_of((0, 20), to_come=(7,))):
        batch, unread = engine.schedule(prompts), prefill_replays.is_unread(prompts)
        with mock.patch.object(TailBackend, "write_keys_and_values", side_effect=InjectedError):
            outcome = assert_served_alike(engine, prompts)
            seen = run(engine, batch, fast=True, unread=unread)
        assert outcome == (log.EXIT_SKIPPED if unread else log.EXIT_CAPTURED)
        assert seen.segments == FIRST_SHARED + 1


# ---------------------------------------------------------------- when it fails


def assert_served_by_stock(engine: Engine, prompts: list[Prompt]) -> Any:
    """A forward that fails behind the door is served by the whole recording."""
    batch = engine.schedule(prompts)
    stock = run(engine, batch)
    fast = run(engine, batch, fast=True)
    assert fast.outcomes == {log.FAILED: 1}
    assert torch.equal(fast.logits, stock.logits)
    assert all(map(torch.equal, fast.cache, stock.cache))
    assert fast.segments in (WHOLE, 2 * WHOLE)  # of one recording, which counts its latest replay
    return fast


@pytest.mark.parametrize("where", ["write_keys_and_values", "index_copy"])
def test_a_failure_behind_the_door(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    broken = mock.Mock(side_effect=InjectedError)
    with monkeypatch.context() as patched:
        if where == "index_copy":
            patched.setattr(ReplayedFront, "_fill", broken)
        else:
            patched.setattr(TailBackend, where, broken)
        assert_served_by_stock(engine, batch_of((0, 30), (4, 5)))
    assert broken.called
    assert assert_served_alike(engine, FULL) == log.EXIT_CAPTURED


def test_with_other_ranks_a_failure_is_raised(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = start.of(engine.text_model)
    batch = engine.schedule(FULL)
    with monkeypatch.context() as patched:
        patched.setattr(fallback, "is_alone", lambda: False)
        patched.setattr(ReplayedFront, "_fill", mock.Mock(side_effect=InjectedError))
        with pytest.raises(InjectedError):
            run(engine, batch, fast=True)
    assert known.planned is None
    assert known.replaying is None
    assert assert_served_alike(engine, FULL) == log.EXIT_CAPTURED


def test_a_replay_that_fails_is_the_last(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """The tail is launched from then on, so nothing but an unread chunk leaves by a door."""
    broken = mock.patch.object(seams.GraphBackend, "replay", side_effect=InjectedError)
    with caplog.at_level(logging.INFO), broken:
        assert_served_by_stock(engine, FULL)
    assert "the tail is launched layer by layer: a replay failed: InjectedError" in caplog.text
    assert assert_served_alike(engine, FULL) == gate.NOT_RECORDED
    chunk = batch_of((0, 20), to_come=(7,))
    assert assert_served_alike(engine, chunk) == log.EXIT_SKIPPED
    assert assert_served_alike(engine, batch_of((0, 200))) == log.TAIL_EAGER


# ---------------------------------------------------------------- opened, and closed


def reopened(engine: Engine, caplog: pytest.LogCaptureFixture) -> str:
    """What is logged when these recordings are there for the first time."""
    known = start.of(engine.text_model)
    known.checked = None
    caplog.clear()
    log.reset()
    tail_is_recorded = mock.patch.object(starting, "record_tail")
    with caplog.at_level(logging.INFO), tail_is_recorded:
        starting.record(engine.runner, engine.text_model, from_ids=True)
    return caplog.text


def test_they_are_checked_at_start(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    log = reopened(engine, caplog)
    known = start.of(engine.text_model)
    assert "leave its recording behind segment 4" in log
    assert "Gemma 4 fast prefill 0.1.0 is on" in log
    assert "does not reach" not in log
    assert isinstance(known.checked, Checked)
    assert known.checked.doors is not None
    assert known.checked.doors.error <= 0.2 * known.checked.doors.allowed


@contextmanager
def another_door(change: Callable[[Door], Door]) -> Iterator[None]:
    """What lies at a door is not what it should be."""
    stock = Doors.reach

    def reach(self: Doors, bucket: Any) -> Any:
        door, output = stock(self, bucket)
        return change(door), output

    with mock.patch.object(Doors, "reach", reach):
        yield


def _shifted(door: Door) -> Door:
    return Door(door.segments, door.rows.roll(1, 0), door.keys, door.values)


def _with_values_for_keys(door: Door) -> Door:
    return Door(door.segments, door.rows, door.values, door.keys)


def _with_larger_values(door: Door) -> Door:
    assert door.values is not None
    return Door(door.segments, door.rows, door.keys, door.values * 1.001)


WRONG = {
    "rows of another place": _shifted,
    "values for keys": _with_values_for_keys,
    "larger values": _with_larger_values,
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_doors_are_closed_at_start(
    engine: Engine, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """And the rest stays on: what SGLang does not replay is cut."""
    known = start.of(engine.text_model)
    with another_door(WRONG[what]):
        log = reopened(engine, caplog)
    assert "does not reach prefills that are replayed" in log
    assert "the check at start found" in log
    assert known.refused is None
    assert assert_served_alike_without_doors(engine) == {gate.REPLAYED: 1}
    assert run(engine, engine.schedule(batch_of((0, 200))), fast=True).outcomes == {
        log.TAIL_CAPTURED: 1
    }


def assert_served_alike_without_doors(engine: Engine) -> dict[str, int]:
    """SGLang's recording runs to its end with the fast path on, and nothing is planned for it."""
    batch = engine.schedule(FULL)
    stock = run(engine, batch)
    with mock.patch.object(TailGraphs, "planned", side_effect=InjectedError):
        seen = run(engine, batch, fast=True)
    assert seen.segments == WHOLE
    assert torch.equal(seen.logits, stock.logits)
    return seen.outcomes


def test_forgotten_keys_are_found_at_start(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(TailBackend, "write_keys_and_values"):
        log = reopened(engine, caplog)
    assert "its self-check at start failed" in log  # the eager cut writes them so as well


def test_wrong_doors_stay_closed(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """When the tail is recorded anew, as for new weights, nothing is checked again."""
    known = start.of(engine.text_model)
    with another_door(_shifted):
        reopened(engine, caplog)
    with mock.patch.object(starting, "record_tail"):
        starting.record(engine.runner, engine.text_model, from_ids=True)
    assert known.doors.closed is not None


def test_wrong_doors_of_another_rank(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = start.of(engine.text_model)
    with monkeypatch.context() as patched:
        patched.setattr(
            ranks, "reason_ranks_differ", lambda f: ranks.NOT_ALIKE if "agree" in f else None
        )
        reopened(engine, caplog)
    assert known.doors.closed == ranks.NOT_ALIKE


def test_doors_that_no_check_leaves_by(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows whether they are right, so they are closed."""
    with monkeypatch.context() as patched:
        patched.setattr(ModelState, "by_recordings", ModelState.eagerly)
        log = reopened(engine, caplog)
    assert self_check.NO_DOOR_TAKEN in log
    assert start.of(engine.text_model).doors.closed is not None


def test_buckets_that_are_too_small_for_the_check(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Doors, "room", 16)
        log = reopened(engine, caplog)
    assert f"{self_check.NO_DOOR_TAKEN}: they have up to 16 rows" in log
    assert start.of(engine.text_model).doors.closed is not None


def test_the_check_leaves_by_recordings_of_any_size(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang would run so few rows eagerly, where the next bucket has more than twice as many."""
    with monkeypatch.context() as patched:
        prefills = engine.runner.prefill_cuda_graph_runner
        patched.setattr(prefills, "capture_num_tokens", [128])
        log = reopened(engine, caplog)
    assert "does not reach" not in log
    assert start.of(engine.text_model).doors.closed is None


def test_a_door_that_writes_elsewhere(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    stock = TailBackend.write_keys_and_values

    def write(self: TailBackend, attention: Any, batch: Any, k: Any, v: Any) -> None:
        stock(self, attention, batch, k, v)
        if start.of(engine.text_model).replaying is batch:
            table = engine.runner.req_to_token_pool.req_to_token
            first = table[batch.req_pool_indices[-1], :1].long()  # of a prefix
            keys, slots = seams.cache_of(self.tail, attention.layer_id, first)
            keys[0][slots] += 1

    with mock.patch.object(TailBackend, "write_keys_and_values", write):
        log = reopened(engine, caplog)
    assert self_check.OTHERS_SLOTS in log
    assert start.of(engine.text_model).doors.closed is not None


def test_rows_that_nobody_writes_are_numbers(engine: Engine) -> None:
    """SGLang's memory for them may hold anything, and what is multiplied by zero must be one."""
    known = start.of(engine.text_model)
    for output in engine.runner.prefill_cuda_graph_runner.backend._outputs.values():
        output.fill_(torch.nan)
    known.forget_replays()
    known.recorded_from_ids(engine.runner)
    starting._open_doors(known, engine.runner)
    batch = engine.schedule(FULL)
    with mock.patch.object(log, "active"):
        run(engine, batch, fast=True)
    for output in engine.runner.prefill_cuda_graph_runner.backend._outputs.values():
        assert output.isfinite().all()


def test_a_residual_that_is_owed_an_update(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What lies at such a door is not the residual."""
    runner = engine.runner
    before = runner.prefill_cuda_graph_runner
    with monkeypatch.context() as patched:
        patched.setattr(seams, "residual_is_written", lambda *_: False)
        with torch.no_grad():
            runner.init_prefill_cuda_graph()
    assert doors.NOT_NOTED in reopened(engine, caplog)
    runner.prefill_cuda_graph_runner = before


def test_a_server_that_is_not_cut_notes_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = start.of(engine.text_model)
    monkeypatch.setattr(seams, "segmented_recording", object)
    with known.refusing("whatever"):
        assert isinstance(known.noting_doors(), nullcontext)
    assert not isinstance(known.noting_doors(), nullcontext)


def test_doors_of_ranks_are_told_apart(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with other buckets, or another door, would leave where this one does not."""
    of_model = start.of(engine.text_model).doors
    told = of_model.describe()
    smallest = min(of_model._ways, key=lambda bucket: bucket.size)
    with monkeypatch.context() as patched:
        patched.delitem(of_model._ways, smallest)
        assert of_model.describe() != told
    first, door, output = of_model._ways[smallest]
    later = Door(door.segments + 1, door.rows, door.keys, door.values)
    with monkeypatch.context() as patched:
        patched.setitem(of_model._ways, smallest, (first, later, output))
        assert of_model.describe() != told
    assert of_model.describe() == told


@pytest.mark.parametrize("lacking", ["_segments", "_graphs"])
def test_another_sglang_without_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: str
) -> None:
    backend = engine.runner.prefill_cuda_graph_runner.backend
    with monkeypatch.context() as patched:
        if lacking == "_graphs":
            patched.delattr(backend, "_graphs")
        else:
            for graph in backend._graphs.values():
                patched.delattr(graph, "_segments")
        log = reopened(engine, caplog)
    assert "does not reach prefills that are replayed from a CUDA graph" in log
    assert "SGLang 0.5.23 lacks" in log
    assert start.of(engine.text_model).doors.closed is not None


def test_recordings_that_do_not_come_by(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = start.of(engine.text_model)
    with monkeypatch.context() as patched:
        patched.setattr(known.doors, "_noted", {})
        log = reopened(engine, caplog)
    assert doors.NOT_NOTED in log
    assert assert_served_alike_without_doors(engine)


def test_recorded_in_one_piece(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the backend ``full`` does: there is no break, and no door."""

    class FullCudaGraphBackend:
        pass

    with monkeypatch.context() as patched:
        prefills = engine.runner.prefill_cuda_graph_runner
        patched.setattr(prefills, "backend", FullCudaGraphBackend())
        log = reopened(engine, caplog)
    assert "recorded by FullCudaGraphBackend, without breaks" in log


def test_another_rank_without_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        differs = lambda found: ranks.NOT_ALIKE if "doors" in found else None  # noqa: E731
        patched.setattr(ranks, "reason_ranks_differ", differs)
        log = reopened(engine, caplog)
    assert ranks.NOT_ALIKE in log
    assert start.of(engine.text_model).doors.closed == ranks.NOT_ALIKE
    assert start.of(engine.text_model).graphs is not None


def test_the_setting(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with settings.changed(prefill_graphs=False):
        log = reopened(engine, caplog)
        assert repair.needed(engine.runner, engine.text_model) is None
        with repair.repaired(engine.runner, engine.text_model) as repaired:
            assert not repaired
    assert f"({repair.OFF})" in log or repair.OFF in log
    assert assert_served_alike_without_doors(engine)


# ---------------------------------------------------------------- repaired


def test_the_repair_lasts_while_sglang_records(engine: Engine) -> None:
    index, forward = (
        cuda_graph_setup.index_attention_layers_by_global_id,
        engine.text_model.forward,
    )
    with repair.repaired(engine.runner, engine.text_model) as repaired:
        assert repaired
        assert cuda_graph_setup.index_attention_layers_by_global_id is not index
        assert engine.text_model.forward.__wrapped__ == forward
    assert cuda_graph_setup.index_attention_layers_by_global_id is index
    assert engine.text_model.forward == forward


def test_what_is_repaired_is_not_foretold(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        starting._foretell(engine.runner, engine.text_model)
        assert caplog.text == ""
        with settings.changed(prefill_graphs=False):
            starting._foretell(engine.runner, engine.text_model)
    assert "may stop now" in caplog.text


def test_a_server_that_is_not_cut_is_not_repaired(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own error is SGLang's, and a line before it names the remedy."""
    known = start.of(engine.text_model)
    index = cuda_graph_setup.index_attention_layers_by_global_id
    with known.refusing("data-parallel attention"):
        with repair.repaired(engine.runner, engine.text_model) as repaired:
            assert not repaired
            assert cuda_graph_setup.index_attention_layers_by_global_id is index
        with caplog.at_level(logging.INFO):
            starting._foretell(engine.runner, engine.text_model)
    assert "may stop now" in caplog.text


def test_nobody_asked_for_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own choice of prefill graphs is its own affair."""
    args = seams._published()
    assert args is not None
    with monkeypatch.context() as patched:
        patched.setattr(seams, "_published", lambda: mock.Mock(cuda_graph_backend_prefill=None))
        assert not seams.prefill_graphs_are_asked_for()
    assert seams.prefill_graphs_are_asked_for()


def test_recordings_of_ids_go_with_the_package(engine: Engine) -> None:
    """Nobody else would keep media out of them."""
    runner, known = engine.runner, start.of(engine.text_model)
    before = runner.prefill_cuda_graph_runner
    try:
        known.close()
        assert runner.prefill_cuda_graph_runner is None
        assert not {"execute", "can_run_graph"} & set(vars(before))
        assert "replay" not in vars(before.backend)
    finally:
        runner.prefill_cuda_graph_runner = before
        known.attach(gate.plan_ahead)
        known.doors.close(doors.NOT_YET)


def test_recorded_anew(engine: Engine) -> None:
    """Doors belong to the recording that they were noted in."""
    runner = engine.runner
    with torch.no_grad():
        runner.init_prefill_cuda_graph()
    record_tail(engine, ROWS)
    assert assert_served_alike(engine, FULL) == log.EXIT_CAPTURED


# ---------------------------------------------------------------- audited


@pytest.mark.parametrize(
    "prompts", [FULL, batch_of((30, 40), (0, 7), (90, 1)), batch_of((0, 20), to_come=(7,))]
)
def test_audits(engine: Engine, prompts: list[Prompt]) -> None:
    """The recording runs to its end as well; who asked gets the fast answer."""
    batch, unread = engine.schedule(prompts), prefill_replays.is_unread(prompts)
    unaudited = run(engine, batch, fast=True, unread=unread)
    with audited(engine):
        seen = run(engine, batch, fast=True, unread=unread)
    assert counts() == (1, 0)
    assert 0 <= log.audits.worst < 0.5
    assert seen.outcomes == unaudited.outcomes
    assert seen.segments == 2 * WHOLE  # of one recording, which counts its latest replay
    assert all(map(torch.equal, seen.cache, unaudited.cache))
    if not unread:
        assert torch.equal(seen.logits, unaudited.logits)
        assert not torch.equal(seen.logits, run(engine, batch).logits)


@pytest.mark.parametrize("what", WRONG)
def test_an_audit_that_finds_a_defect(engine: Engine, what: str) -> None:
    """Who asked gets stock's answer, and stock's K and V are what stays in the pool."""
    batch = engine.schedule(batch_of((30, 40), (0, 7), (90, 1)))
    stock = run(engine, batch)
    with audited(engine), another_door(WRONG[what]):
        seen = run(engine, batch, fast=True)
    assert counts() == (0, 1)
    assert torch.equal(seen.logits, stock.logits)
    assert all(map(torch.equal, seen.cache, stock.cache))


def test_an_audit_that_finds_keys_elsewhere(engine: Engine) -> None:
    """What lies at the door is right, and what is written is not."""
    batch = engine.schedule(FULL)
    stock = run(engine, batch)
    write = TailBackend.write_keys_and_values

    def reversed_(self: TailBackend, attention: Any, batch: Any, k: Any, v: Any) -> None:
        write(self, attention, batch, k.flip(0), v.flip(0))

    with audited(engine), mock.patch.object(TailBackend, "write_keys_and_values", reversed_):
        seen = run(engine, batch, fast=True)
    assert counts() == (0, 1)
    assert torch.equal(seen.logits, stock.logits)
    assert all(map(torch.equal, seen.cache, stock.cache))


def test_an_audit_that_finds_another_tail(engine: Engine) -> None:
    batch = engine.schedule(FULL)
    stock = run(engine, batch)
    replay = seams.GraphBackend.replay

    def larger(self: Any, key: int) -> torch.Tensor:
        rows: torch.Tensor = replay(self, key)
        return rows * 1.001

    with audited(engine), mock.patch.object(seams.GraphBackend, "replay", larger):
        seen = run(engine, batch, fast=True)
    assert counts() == (0, 1)
    assert torch.equal(seen.logits, stock.logits)


def test_an_audit_that_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = engine.schedule(FULL)
    unaudited = run(engine, batch, fast=True)
    with audited(engine), monkeypatch.context() as patched:
        patched.setattr(donor, "keys_and_values", mock.Mock(side_effect=InjectedError))
        seen = run(engine, batch, fast=True)
        assert start.of(engine.text_model).auditor is None
    assert torch.equal(seen.logits, unaudited.logits)
    assert counts() == (0, 0)
