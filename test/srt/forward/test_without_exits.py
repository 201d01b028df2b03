"""Without the part that has exits from captured prefills, everything else works."""

# ruff: noqa: E402 - first the import is blocked
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

PART = "sglang_gemma4_yoco.exits"
assert not {PART, "sglang_gemma4_yoco.loading.start"} & set(sys.modules), "a process of its own"
sys.modules[PART] = None  # type: ignore[assignment] # as if it were not installed

from harness import stand_ins
from harness.batches import batch_of
from harness.decode_graphs import record_tail
from harness.forwards import ENGINE
from harness.layer_rows import LAYERS
from harness.upstream_fixes import repaired
from sglang_gemma4_reference import prefill_graphs, recorder, releases
from sglang_gemma4_reference.engine import SWITCHED_OFF, Engine, switched
from sglang_gemma4_reference.prefill_graphs import RecordedPrefill
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.commands import preflight
from sglang_gemma4_yoco.commands.console import Report
from sglang_gemma4_yoco.loading import metrics, start

pytestmark = pytest.mark.skipif(
    not releases.records_prefills(), reason="tried with the prefill graphs of SGLang 0.5.23"
)
ROWS = 2


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    """It has captured its prefills and its tail."""
    with prefill_graphs.recordable(), repaired():
        engine = Engine(
            tiny_checkpoint,
            **ENGINE,
            cuda_graph_bs_decode=[ROWS],
            cuda_graph_backend_prefill="breakable",
            cuda_graph_bs_prefill=[64],
        )
        record_tail(engine, ROWS)
        yield engine


def run(engine: Engine, batch: Any, switch: str) -> tuple[torch.Tensor, int, dict[str, int]]:
    """Logits, segments of a captured prefill that were run, and what was counted."""
    engine.poison(batch)
    recorder.replays.clear()
    counters.forwards.clear()
    with switched(switch):
        logits = engine.forward(batch).next_token_logits.clone()
    prefills = [graph for graph in recorder.replays if isinstance(graph, RecordedPrefill)]
    return logits, sum(graph.ran for graph in prefills), dict(counters.forwards)


def test_prefills_are_cut(engine: Engine) -> None:
    """Without a bucket, by the captured tail; three requests with an eager one."""
    for prompts, outcome in (
        (batch_of((0, 90), (30, 7)), counters.TAIL_CAPTURED),
        (batch_of(*((0, 40) for _ in range(ROWS + 1))), counters.TAIL_EAGER),
    ):
        batch = engine.schedule(prompts)
        stock, _, refused = run(engine, batch, "0")
        fast, segments, counted = run(engine, batch, "1")
        assert (refused, counted, segments) == ({SWITCHED_OFF: 1}, {outcome: 1}, 0)
        torch.testing.assert_close(fast, stock, atol=5e-5, rtol=0)


def test_captured_prefills_run_to_their_end(engine: Engine) -> None:
    batch = engine.schedule(batch_of((0, 40)))
    stock, of_stock, _ = run(engine, batch, "0")
    fast, segments, _ = run(engine, batch, "1")
    assert segments == of_stock == LAYERS + 1
    assert torch.equal(fast, stock)


def test_it_is_said() -> None:
    assert vars(start)["prefill_graphs"] is None
    reported = metrics.describe_state()
    assert reported["active"] is True
    assert reported["exits"] == start.NO_EXITS
    report = Report()
    with stand_ins.prefill_graphs("breakable"):
        preflight._prefill_graphs(report, {}, {}.get)
    [line] = report.lines
    assert (report.exit_status, start.NO_EXITS in line) == (0, True)
    assert reported["tail"] == f"captured for up to {ROWS} rows"
