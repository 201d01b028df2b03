#!/usr/bin/env python3
"""Predict the prefill speedup on a GPU, and compare the model with measurements.

The model is ``prefill_model.py``. ``benchmark/model.toml`` contains the ranges of its values.
Some are fitted to ``benchmark/results/gpu_*.json`` and to ``benchmark/others.toml``. Each
measurement is predicted by a fit that leaves out its whole run.

It prints each measurement and its prediction, and writes ``benchmark/predicted.json``, from which
``tables.py`` and ``plot_prefill.py`` make tables and pictures. A range is from the 5th to the 95th
percentile, with every value drawn from its own range; all are widened until each measurement is
within its range.

    python scripts/bench/predict.py
    python scripts/bench/predict.py --measure-cpu    # writes benchmark/results/device_cpu.json

Needs an environment with SGLang and ``test/reference``.
"""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import product
from operator import getitem
from timeit import repeat
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import new_parser
from scripts.result_files import PREDICTED, RESULTS, begin_result, origin, write_result
from sglang_gemma4_yoco.commands.console import say

#: Tokens that a prompt shares with earlier ones and that are cached, and tokens of its own.
PREFIX, OWN = 1500, (200, 1000, 2000, 6000)
LENGTHS = (32, 128, 512, 1024, 2048, 4096, 8192, 32768)
WAYS = ("stock", "captured", "stock replayed", "both")
DRAWS = 300


def new_case(**about: Any) -> Any:
    """Return a case: ``ratio`` is stock's time / fast's, ``off`` is stock's in seconds if known."""
    from scripts.bench.prefill_model import MODEL

    case = SimpleNamespace(**MODEL["case"] | about)
    if case.off:
        case.ratio = case.off / case.on
    return case


def read_results(entry: Mapping[str, Any]) -> list[Any]:
    """Return the measurements in a result file, one for each length that ``entry`` lists."""
    document = json.loads((RESULTS / entry["file"]).read_text())
    points = {}
    for point in document["points"]:
        length = document.get("prompt")  # of a server's load
        if "load" in point:
            length = point["load"]["length"]
        points[length] = point
    cases = []
    for tokens in entry["tokens"]:
        off, on = (reduce(getitem, entry[side], points[tokens]) for side in ("off", "on"))
        about = {"model": document["model"], "tokens": tokens, "off": off, "on": on}
        about["sglang"] = document["sglang"]
        cases.append(new_case(**{**entry, **about}))
    return cases


def list_cases() -> list[Any]:
    """Return our own measurements and those of others."""
    from scripts.bench.prefill_model import MODEL

    cases = []
    for entry in MODEL["own"]:
        cases += read_results(entry)
    others = tomllib.loads(RESULTS.with_name("others.toml").read_text())["measured"]
    return cases + [new_case(**entry) for entry in others]


def fit(cases: Sequence[Any]) -> Any:
    """Return the values that fit these measurements best."""
    import numpy as np
    from scipy.optimize import least_squares

    from scripts.bench.prefill_model import MODEL, predict

    low, start, high = np.log(list(MODEL["fitted"].values())).T

    def values_of(logarithms: Any) -> Any:
        return SimpleNamespace(**dict(zip(MODEL["fitted"], np.exp(logarithms), strict=True)))

    def residuals(logarithms: Any) -> Any:
        found, values = [], values_of(logarithms)
        for case in cases:
            off, on = predict(case, values)
            found.append(off / on / case.ratio)
            if case.off and case.what != "TTFT":  # whose mean includes waiting for others
                found.append((off / case.off) ** 0.5)
        prior = (logarithms - start) / 10  # for values that the measurements do not determine
        return np.append(np.log(found), prior)

    return values_of(least_squares(residuals, start, bounds=(low, high), diff_step=1e-3).x)


def leave_one_out(cases: Sequence[Any]) -> None:
    """Set ``predicted`` of each measurement, the ratio by a fit without those of its run."""
    from scripts.bench.prefill_model import predict

    runs = defaultdict(list)
    for case in cases:
        runs[case.file, case.source, case.model].append(case)
    for run in runs.values():
        values = fit([case for case in cases if case.fit and case not in run])
        for case in run:
            off, on = predict(case, values)
            case.predicted = (off / on).item()


def find_ranges(cases: Sequence[Any]) -> Any:
    """Return the 5th and the 95th percentiles of ratios, with values drawn at random: [2, cases].

    A ratio is stock's time divided by that of the case's second way.
    """
    import numpy as np

    from scripts.bench.prefill_model import MODEL, predict

    random, drawn, ends = np.random.default_rng(0), {}, []
    for name, (low, _, high) in MODEL["fitted"].items():
        drawn[name] = np.exp(random.uniform(np.log(low), np.log(high), (DRAWS, 1)))
    for case in cases:
        stock, faster, *_ = predict(case, SimpleNamespace(**drawn))
        ends.append(np.percentile(stock / faster, (5, 95)))
    return np.transpose(ends)


def find_slack(cases: Sequence[Any]) -> Any:
    """Return the factor by which ranges must be widened to contain their measurements."""
    ratios = [case.ratio for case in cases]
    low, high = find_ranges(cases)
    return max(1.0, *(low / ratios), *(ratios / high))


def predict_prefills(lengths: Sequence[int], fitted: Any, slack: float, **about: Any) -> list[Any]:
    """Return predictions: for a model and a length, the ratio, its range, and milliseconds.

    Args:
        about: what all cases share, such as their device.
    """
    from scripts.bench.prefill_model import predict

    cases = []
    for model, tokens in product(("E2B", "E4B"), lengths):
        cases.append(new_case(ways=WAYS, model=model, tokens=tokens, **about))
    for case, (low, high) in zip(cases, find_ranges(cases).T.tolist(), strict=True):
        stock, captured, *_ = seconds = [found.item() for found in predict(case, fitted)]
        case.ratio, case.low, case.high = stock / captured, low / slack, high * slack
        case.range = f"{case.low:.2f} to {case.high:.2f}"
        vars(case).update((way, f"{1e3 * one:.1f}") for way, one in zip(WAYS, seconds, strict=True))
    return list(map(vars, cases))


def describe(case: Any) -> None:
    """Set the fields of a measurement that tables show."""
    case.way, case.expected, unit, scale = case.ways[1], "", "ms", 1e3
    case.measured = f"{case.ratio:.2f}x"
    if case.source:
        case.link, unit, scale = f"[{case.name}]({case.source})", "s", 1.0
    else:
        case.run = case.file.partition("_nvidia")[0]
    if case.off:
        case.measured += f" ({case.off * scale:.2f} / {case.on * scale:.2f} {unit})"
    if not case.verified:
        case.measured += "*"
    if case.predict:
        error = f"{case.predicted / case.ratio - 1:+z.0%}".replace("+0%", "0%")
        case.expected = f"{case.predicted:.2f}x ({error})"


def measure_cpu() -> dict[str, float]:
    """Return operations/s of a matrix product and bytes/s of a copy, on one core.

    Each is the best of many short runs, in the thread's own time: other work does not count.
    """
    import torch

    torch.set_num_threads(1)
    rows, weights, copied = torch.randn(1024, 512), torch.randn(512, 2048), torch.randn(2**23)
    into = torch.empty_like(copied)

    def quickest(run: Callable[[], Any]) -> float:
        return min(repeat(run, number=1, repeat=100, timer=time.thread_time))

    product_of = quickest(lambda: rows @ weights)
    copy = quickest(lambda: into.copy_(copied))
    return {"peak": 2 * rows.numel() * 2048 / product_of, "bandwidth": 4 * copied.numel() / copy}


def main() -> None:
    """Fit, predict, compare, and write."""
    parser = new_parser(__doc__)
    parser.add_argument("--measure-cpu", action="store_true", help="measure this CPU instead")
    if parser.parse_args().measure_cpu:
        document = begin_result("none", "cpu", "float32") | measure_cpu()
        write_result(RESULTS / "device_cpu.json", document)
        return
    cases = list_cases()
    known = [case for case in cases if case.predict]
    leave_one_out(known)
    for case in cases:
        describe(case)
        about = (case.name, case.model, case.device, case.way, case.tokens, case.what)
        say(f"{about}: {case.measured}, predicted {case.expected}")
    fitted, slack = fit([case for case in known if case.fit]), find_slack(known)
    document = {"fitted": vars(fitted), "slack": slack, "cases": list(map(vars, cases))}
    predict_each = partial(predict_prefills, fitted=fitted, slack=slack)
    document["H100"] = predict_each(LENGTHS, device="H100")
    document["H200"] = predict_each(LENGTHS, device="H200", visits=True)
    document["cached"] = []
    for device in ("H100", "H200"):
        document["cached"] += predict_each(OWN, device=device, prefix=PREFIX)
    write_result(PREDICTED, origin() | document)


if __name__ == "__main__":
    main()
