"""Predictions of the prefill model, against measurements on a CPU and on GPUs."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from scripts.bench import predict, prefill_model
from scripts.result_files import RESULTS, load_predictions, load_results

CLOSE = 0.15
#: Nothing is fitted on a CPU: attention reaches what a matrix product does, and PyTorch needs about
#: 5 us for an operation.
ON_A_CPU = {"matrix": 1.0, "operation": 5e-6, "planning": 400.0, "passes": 30.0}
NOTHING = dict.fromkeys(("skipped", "kernels", "key", "request", "step"), 0.0)


def test_on_a_cpu() -> None:
    """The ratios of E2B's and E4B's proportions, from one core's data."""
    core = json.loads((RESULTS / "device_cpu.json").read_text())
    sheet = {"peak": core["peak"], "bandwidth": core["bandwidth"], "link": math.inf}
    device = SimpleNamespace(itemsize=4, overlaps=False, **sheet)
    rates = dict.fromkeys(("wide", "narrow"), core["peak"])
    values = SimpleNamespace(**rates, **ON_A_CPU, **NOTHING)
    found = []
    for document in load_results("prefill_e*_cpu_*.json"):
        about = {"model": document["model"], "ways": ("stock", "eager")}
        for point in document["points"]:
            load = point["load"]
            if load["length"] >= 128 and load["batch_size"] == 1:
                case = predict.new_case(tokens=load["length"], **about)
                stock, fast = prefill_model.predict(case, values, device)
                found.append((stock / fast).item() / point["ratio"] - 1)
    assert len(found) == 7
    assert max(map(abs, found)) < CLOSE


def test_on_a_gpu() -> None:
    """The ratios of our prefills on the H200 and, where the device limits it, stock's time."""
    values, found = SimpleNamespace(**load_predictions()["fitted"]), []
    for case in predict.list_cases():
        if case.file and case.what == "forward" and case.ways[1] != "stock replayed":
            off, on = prefill_model.predict(case, values)
            found.append((off / on).item() / case.ratio - 1)
            if case.tokens >= 4096:
                found.append(off.item() / case.off - 1)
    assert len(found) == 26
    assert max(map(abs, found)) < CLOSE


def test_leave_one_out() -> None:
    """E4B's prefills are predicted by a fit to E2B's, and the other way round."""
    cases = [case for case in predict.list_cases() if case.file and case.tokens in (1024, 8192)]
    cases = [case for case in cases if case.ways[1] == "captured"]
    assert {case.model for case in cases} == {"E2B", "E4B"}
    predict.leave_one_out(cases)
    for case in cases:
        assert case.predicted == pytest.approx(case.ratio, rel=CLOSE)


def test_what_is_written_is_of_these_measurements() -> None:
    """If this fails: run ``predict.py``."""
    for case, known in zip(predict.list_cases(), load_predictions()["cases"], strict=True):
        for name in ("name", "ratio", "tokens"):
            assert getattr(case, name) == known[name]
