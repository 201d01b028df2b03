"""``bench/bench_latency.py``: its summary of a run, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.bench import bench_latency


def test_times_are_reported_by_mean_and_percentiles() -> None:
    """A mean shows what a median hides: a few requests that wait long."""
    run: dict[str, Any] = {"duration": 9.0}
    runs = [run | {"ttfts": [0.1] * 9 + [1.1], "itls": [[0.01, 0.03], []]}]
    found = bench_latency.summed_up(runs * 2)
    assert found["ttft_ms"].keys() == found["itl_ms"].keys() == {"mean", "50", "95", "99"}
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["ttft_ms"]["50"] == pytest.approx(100)
    assert found["ttft_ms"]["99"] == pytest.approx(1100)
    assert found["itl_ms"]["mean"] == pytest.approx(20)
    assert "ttft_ms: median 100, p95 650; itl_ms" in bench_latency.describe_run(runs[0])
