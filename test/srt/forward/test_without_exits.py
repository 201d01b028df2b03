"""Without the part that has exits from captured prefills, prefills are cut as ever.

SGLang's capture is repaired here by the changes of ``docs/upstream`` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from harness import stand_ins
from harness.batches import batch_of
from harness.decode_graphs import record_tail
from harness.forwards import ENGINE
from harness.layer_rows import LAYERS
from harness.prefill_exits import RECORDED, ROWS, close, run
from harness.upstream_fixes import repaired
from sglang_gemma4_reference import prefill_graphs, releases
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.commands import preflight
from sglang_gemma4_yoco.commands.console import Report
from sglang_gemma4_yoco.loading import start

pytestmark = [
    pytest.mark.skipif(
        not releases.records_prefills(), reason="tried with the prefill graphs of SGLang 0.5.23"
    ),
    pytest.mark.usefixtures("forgotten_reports"),
]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    """It has captured its prefills and its tail."""
    left_out = mock.patch.object(start, "exits", None)
    with left_out, prefill_graphs.recordable(), repaired():
        engine = Engine(tiny_checkpoint, **ENGINE, **RECORDED)
        record_tail(engine, ROWS)
        yield engine


@pytest.mark.parametrize(
    ("lens", "segments", "outcomes"),
    [
        ([(0, 200)], 0, {counters.TAIL_CAPTURED: 1}),  # there is no bucket for so many rows
        ([(0, 40)] * (ROWS + 1), 0, {counters.TAIL_EAGER: 1}),
        ([(0, 40)], LAYERS + 1, {}),  # SGLang replays its graph, to the end
    ],
)
def test_prefills_are_cut_where_sglang_replays_none(
    engine: Engine, lens: list[tuple[int, int]], segments: int, outcomes: dict[str, int]
) -> None:
    batch = engine.schedule(batch_of(*lens))
    stock, fast = run(engine, batch, eagerly=True), run(engine, batch, fast=True)
    assert (fast.segments, fast.outcomes) == (segments, outcomes)
    close(fast.logits, stock.logits)
    close(fast.cache, stock.cache)


def test_it_is_said(engine: Engine) -> None:
    state = start.get_state(engine.text_model)
    assert state.unsupported is None
    assert state.report["exits"] == start.NO_EXITS
    assert state.report["tail"] == f"captured for up to {ROWS} rows"
    report = Report()
    left_out = mock.patch.object(preflight, "capture", None)
    with left_out, stand_ins.prefill_graphs("breakable"):
        preflight._prefill_graphs(report, {}, {}.get)
    [line] = report.lines
    assert (report.exit_status, start.NO_EXITS in line) == (0, True)
