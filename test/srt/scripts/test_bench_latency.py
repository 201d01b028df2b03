"""``bench/bench_latency.py``: its summary of a run, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.bench import bench_latency

#: As SGLang 0.5.23 logs them.
LOG = """
[2026-11-25 10:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 40
[2026-11-25 10:00:01] Prefill batch, #new-seq: 3, #new-token: 200, #cached-token: 8, #queue-req: 0
[2026-11-25 10:00:02] Decode batch, #running-req: 4, #token: 300, token usage: 0.01
[2026-11-25 10:00:02] INFO:     127.0.0.1 - "POST /generate HTTP/1.1" 200 OK
"""


def test_times_are_reported_by_mean_and_percentiles() -> None:
    """A mean shows what a median hides: a few requests that wait long."""
    run: dict[str, Any] = {"duration": 9.0, "output_throughput": 5.0, "batches": {}}
    runs = [run | {"ttfts": [0.1] * 9 + [1.1], "itls": [[0.01, 0.03], []]}]
    found = bench_latency.summed_up(runs * 2)
    assert found["ttft_ms"].keys() == found["itl_ms"].keys() == {"mean", "50", "95", "99"}
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["ttft_ms"]["50"] == pytest.approx(100)
    assert found["ttft_ms"]["99"] == pytest.approx(1100)
    assert found["itl_ms"]["mean"] == pytest.approx(20)
    line = bench_latency.describe_run(runs[0] | {"batches": bench_latency.batch_sizes(LOG)})
    assert "ttft_ms: mean 200, 50 100, 95 650, 99 1010" in line
    assert "requests of a prefill: 2.0 (mean of 2)" in line
