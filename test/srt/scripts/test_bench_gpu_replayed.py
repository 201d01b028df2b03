"""What part h of ``bench_gpu.py`` makes of its measurements, and ``gpu_report.py`` of those."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import bench_gpu
import gpu_report
from sglang_gemma4_yoco import log

WAYS = bench_gpu.FOUR_WAYS


def answer(**fields: Any) -> bench_gpu.Answer:
    return replace(
        bench_gpu.Answer("active", torch.arange(4.0)[None].double(), [torch.ones(2, 1, 3)]),
        **fields,
    )


@pytest.mark.parametrize(
    ("other", "right", "same_cache"),
    [
        ({}, True, True),
        ({"cache": [torch.ones(2, 1, 3) + 1e-3]}, True, False),  # rounding
        ({"logits": torch.tensor([[3.0, 2.0, 1.0, 0.0]]).double()}, False, True),
        ({"logits": torch.full((1, 4), torch.nan).double()}, False, True),
        ({"cache": [torch.tensor([[[1.0, 1, 1]], [[1.0, 1, 1.1]]])]}, False, False),
        ({"cache": [torch.full((2, 1, 3), torch.nan)]}, False, False),
    ],
)
def test_answers(other: dict[str, Any], right: bool, same_cache: bool) -> None:
    found = answer(**other).beside(answer())
    assert (found["right"], found["same_cache"]) == (right, same_cache)
    assert found["same_logits"] is ("logits" not in other)


def steps(ms: dict[int, list[float]], *, stock: bool = True) -> dict[str, Any]:
    """What part h has measured of these lengths."""
    found: dict[str, Any] = {"prefill_graphs": {"failed": None, "rows": list(ms), "exits": "open"}}
    right = {"right": True, "same_cache": True}
    for length, times in ms.items():
        about = {"length": length, "model": "E2B"}
        found[f"{length} tokens, answers"] = about | {
            "paths": dict.fromkeys(WAYS, log.EXIT_CAPTURED),
            "stock replayed beside stock": right | {"right": stock},
            "package replayed beside package": right,
            "package replayed beside stock replayed": right,
        }
        seconds = {way: {"median": t / 1e3} for way, t in zip(WAYS, times, strict=True)}
        found[f"{length} tokens, times"] = about | {"seconds": seconds, "host": {}}
    return found


def document(**measured: Any) -> dict[str, Any]:
    part = {"commit": "c0ffee", "summary": bench_gpu.summarise_replayed(measured)}
    about = {"device": "a GPU", "device_kind": "cuda", "model": "E2B", "sglang": "1"}
    return {**about, "parts": {"h": part}}


def test_times_beside_their_predictions() -> None:
    times = {512: [16.0, 10.0, 9.0, 8.0], 64: [9.0, 7.9, 8.0, 8.0], 65: [9.0, 9.0, 7.6, 8.0]}
    text = gpu_report.table([document(**steps(times))])
    assert "stock's replays give the answers of its eager prefills at 3 lengths." in text
    assert "on replayed: faster than off / off replayed / on" in text
    assert "| 512 | 16.0 (14.9) | 10.0 (9.7) | 9.0 (10.0) | 8.0 (7.2) |" in text
    assert "| 2.00 / 1.25 / 1.12 | right | yes |" in text
    for too_slow in ("1.12 / 0.99 / 1.00", "1.12 / 1.12 / 0.95"):  # beside one of the two alone
        assert f"| {too_slow} | right | no |" in text


def test_a_wrong_answer_is_told() -> None:
    text = gpu_report.table([document(**steps({512: [1.0] * 4}, stock=False))])
    assert "**stock's replays give other answers than its eager prefills** at 512" in text
    assert "| **wrong** |" in text


def test_a_failed_capture_is_a_finding_and_is_not_tried_again() -> None:
    engine = mock.Mock(side_effect=RuntimeError("capture failed"))
    work = replace(bench_gpu.TINY, replayed=(32,))
    machine: Any = SimpleNamespace(workload=work, engine=engine, unrecordable=None, preset="E2B")
    measured = {name: step(machine) for name, step in bench_gpu.replayed_steps(work).items()}
    assert engine.call_count == 1
    summary = bench_gpu.summarise_replayed(measured)
    assert (summary["rows"], summary["stock_right"]) == ([], [])
    assert "they cannot be captured (" in gpu_report.table([document(**measured)])
