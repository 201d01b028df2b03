"""``bench/bench_latency.py``: its summary of a run, and the search for capacity."""

from __future__ import annotations

import argparse
import subprocess
from typing import Any
from unittest import mock

import pytest

from scripts.bench import bench_latency
from scripts.environment import SetupError

RUN = {"duration": 9.0, "ttfts": [0.1] * 9 + [1.1], "itls": [[0.01, 0.03], []]}


def test_times_are_reported_by_mean_and_percentiles() -> None:
    """A mean shows what a median hides: a few requests that wait long."""
    found = bench_latency.summed_up([RUN, RUN])
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["ttft_ms"]["50"] == pytest.approx(100)


def test_a_run_without_its_times_is_an_error() -> None:
    with pytest.raises(SetupError, match="Use --special"):
        bench_latency.summed_up([RUN | {"ttfts": [0.1, 0.0]}])


@pytest.mark.parametrize("most", [0.7, 8.0])
def test_capacity_is_found_by_bisection(most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers up to a rate is slower above it, and then does not keep up."""

    def send(server: object, rate: float, *_: object, **options: int) -> dict[str, Any]:
        if rate > 2 * most:
            raise subprocess.TimeoutExpired("the benchmark", 240)
        return RUN | {"ttfts": [0.3 + (rate > most)]}

    monkeypatch.setattr(bench_latency, "send", send)
    monkeypatch.setattr(bench_latency, "check_way", lambda _: {})
    args = argparse.Namespace(capacity=12, seconds=120)
    *_, last = bench_latency.search(mock.Mock(), 300, 5.0, args)
    assert last["within"] <= most < last["above"] <= 1.1 * last["within"]
