"""``host_work`` and ``bench_prefill.py`` on prefills that SGLang replays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.batches import batch_of
from harness.decode_graphs import record_tail
from harness.forwards import ENGINE
from harness.layer_rows import FIRST_CUT, LAYERS
from harness.prefill_exits import RECORDED
from scripts.bench import bench_prefill
from scripts.bench.bench_prefill import OFF_REPLAYED, ON_REPLAYED, Load, Point
from sglang_gemma4_reference import prefill_graphs
from sglang_gemma4_reference.engine import SWITCHED_OFF, Engine
from sglang_gemma4_yoco import counters

pytestmark = pytest.mark.usefixtures("forgotten_reports")

ROWS = 64
SEGMENTS = LAYERS + 1
WAYS = ("off", "on", OFF_REPLAYED, ON_REPLAYED)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    """Return an engine with captured prefills of two lengths, and a captured tail."""
    lengths = {"cuda_graph_bs_decode": [1], "cuda_graph_bs_prefill": [bench_prefill.CHECKED, ROWS]}
    with prefill_graphs.recordable():
        engine = Engine(tiny_checkpoint, **ENGINE, **RECORDED | lengths)
    record_tail(engine, 1)
    return engine


@pytest.fixture(scope="module")
def point(engine: Engine) -> Point:
    """Return the measurement of one prompt of a captured length."""
    return bench_prefill.measure(engine, Load(ROWS, batch_size=1), 1)


def test_each_way_is_what_it_says(point: Point) -> None:
    assert point.path == counters.TAIL_CAPTURED
    assert point.replayed[OFF_REPLAYED].path == SWITCHED_OFF.text
    assert point.replayed[ON_REPLAYED].path == counters.EXIT_CAPTURED
    assert tuple(point.host) == WAYS
    assert not point.differs


def test_what_is_replayed_is_not_the_hosts_work(point: Point) -> None:
    """Stock replays every segment, the fast path those before the exit, and the tail."""
    expected = {"off": 0, "on": 1, OFF_REPLAYED: SEGMENTS, ON_REPLAYED: FIRST_CUT + 1 + 1}
    eager, besides = point.host["off"], {}
    for way, work in point.host.items():
        assert work.replays == expected[way], way
        assert work.device_reads == eager.device_reads, way
        besides[way] = work.operations - work.replays
    assert besides[ON_REPLAYED] < besides[OFF_REPLAYED] < besides["on"] < eager.operations
    assert besides[ON_REPLAYED] <= eager.operations / 4


def test_nothing_is_reported_where_nothing_was_replayed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = engine.schedule(batch_of((0, ROWS)))
    runner = engine.runner.prefill_cuda_graph_runner
    monkeypatch.setattr(runner, "can_run_graph", lambda *_: False)
    with pytest.raises(bench_prefill.NotActiveError, match="has replayed no segments"):
        bench_prefill.measure_host(engine, batch, (OFF_REPLAYED,))


def test_another_answer_is_seen(point: Point) -> None:
    seen = point.replayed[ON_REPLAYED]
    for wrong in (replace(seen, same_tokens=False), replace(seen, max_logit_difference=0.1)):
        assert replace(point, replayed={ON_REPLAYED: wrong}).differs
