"""Around doors: what ranks compare at start, who asked for a repair, and what is let go.

What leaves a recording, and how, is in ``test_doors``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from batches import batch_of
from decode_graphs import record_tail
from forwards import ENGINE, InjectedError
from prefill_replays import RECORDED, ROWS, assert_served_alike, run
from sglang_gemma4_reference import prefill_graphs, releases
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import log, seams, settings
from sglang_gemma4_yoco.checking import self_check
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.loading import repair, starting

pytestmark = [
    pytest.mark.skipif(
        not releases.records_prefills(), reason="tried with the prefill graphs of SGLang 0.5.23"
    ),
    pytest.mark.usefixtures("forgotten_reports"),
]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    """It has recorded its prefills and its tail."""
    with prefill_graphs.recordable():
        engine = Engine(tiny_checkpoint, **ENGINE, **RECORDED)
        record_tail(engine, ROWS)
        yield engine


@pytest.mark.parametrize("asked", ["doors: [", "doors agree with stock"])
def test_both_comparisons_close_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """That of what was found, and that of what was checked."""
    known = start.of(engine.text_model)
    with monkeypatch.context() as patched, mock.patch.object(starting, "record_tail"):
        patched.setattr(
            ranks, "reason_ranks_differ", lambda f: ranks.NOT_ALIKE if asked in f else None
        )
        starting.record(engine.runner, engine.text_model, from_ids=True)
    assert known.doors.closed == ranks.NOT_ALIKE
    known.forget_replays()
    known.recorded_from_ids(engine.runner)
    starting._open_doors(known, engine.runner)
    assert assert_served_alike(engine, batch_of((0, 64))) == log.EXIT_CAPTURED


def test_a_repair_that_nobody_asked_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repair.needed(engine.runner, engine.text_model) == seams.SHARED_LAYER_IDS
    monkeypatch.setattr(seams, "_published", lambda: mock.Mock(cuda_graph_backend_prefill=None))
    monkeypatch.setattr(seams, "prefill_graph", lambda: "breakable")
    assert repair.needed(engine.runner, engine.text_model) is None


def test_a_replay_that_never_comes_is_not_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tail has been planned by then, and holds memory."""
    known, batch = start.of(engine.text_model), engine.schedule(batch_of((0, 64)))
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.model, "forward", mock.Mock(side_effect=InjectedError))
        with pytest.raises(InjectedError):
            run(engine, batch, fast=True)
    assert known.planned is None
    assert known.replaying is None


def test_a_launched_front_on_a_gpu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its host, which a replayed tail spares whatever the rows; so any number pays."""
    known = start.of(engine.text_model)
    with monkeypatch.context() as patched, settings.changed(min_skipped_rows=None):
        patched.setitem(vars(known), "on_gpu", True)
        seen = run(engine, engine.schedule(batch_of((0, 7))), fast=True)
    assert (seen.segments, seen.outcomes) == (0, {log.TAIL_CAPTURED: 1})


def test_who_checks_doors_looks_at_nothing_else(engine: Engine) -> None:
    known = start.of(engine.text_model)
    with self_check.comparing(engine.runner, known) as both:
        found = both.through_doors()
        assert known.auditor is None
    assert found is not None
    assert found.is_rounding
