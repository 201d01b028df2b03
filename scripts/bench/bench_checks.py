#!/usr/bin/env python3
"""Measure how well the self-check, audits and proofs tell defects from rounding.

Random models of many shapes, types and kinds of weights (sharp attention, large norms, outlier
channels; ``checked_models.py``) run on SGLang's ModelRunner with the correct package: no check,
audit or proof (a comparison of a captured tail with its eager layers) may report a difference. Then
each defect of ``breakages.py`` is injected, and the self-check must find it on every model to which
it applies, with an error of several times the bound. Both files are in ``test/srt/harness``::

    python scripts/bench/bench_checks.py --results benchmark/results/checks_cpu.json  # 1 to 3 hours
    python scripts/bench/bench_checks.py --models 12 --only tiny        # a few minutes
    TRITON_INTERPRET=1 python scripts/bench/bench_checks.py --triton    # on SGLang's Triton backend

The file is updated after each group of models of one shape and type.

Output contract: a line for each model and for each defect on stdout; the last line is one JSON
document. The exit status is 1 after a false alarm or a missed defect; 2 if the run failed.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import failed, new_parser
from scripts.environment import HARNESS, SetupError
from scripts.result_files import origin, write_result
from sglang_gemma4_yoco.commands.verify.verify import parse_positive

if TYPE_CHECKING:
    from harness.checked_models import Group, Result

sys.path.append(HARNESS)
ENOUGH = 4.0  # every defect's error must exceed this multiple of its bound
INFINITE = "infinite"  # in a result file, since JSON has no infinity


def in_a_process_of_its_own(group: Group) -> list[Result]:
    """Return the results of all models of a group, computed in a separate process."""
    from harness import checked_models, forked

    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawning, forked.end_with_parent) as process:
        return process.submit(checked_models.judged, group).result()


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return false alarms, errors, costs, and each defect's smallest error by its bound."""
    largest = {"check": 0.0, "audits": 0.0, "proofs": 0.0}
    alarms = dict.fromkeys(largest, 0)
    factors = defaultdict(list)
    for result in results:
        errors = {"check": result.check, "audits": result.audits, "proofs": result.proof}
        for kind, error in errors.items():
            largest[kind] = max(largest[kind], error)
            alarms[kind] += error > 1
        for name, factor in result.found.items():
            model = f"{result.model}, {result.dtype}, seed {result.seed}"
            factors[name].append((factor, model))
    breakages = {}
    for name, found in factors.items():
        smallest, model = min(found)
        breakages[name] = {"models": len(found), "smallest": smallest, "on": model}
    return {
        "models": len(results),
        "false_alarms": alarms,
        "largest": largest,
        "cost": {f"{r.model}, seed {r.seed}": r.cost for r in results if r.cost},
        "audited": sum(result.audited for result in results),
        "proved": sum(result.proved for result in results),
        "breakages": breakages,
    }


def finite(document: Any) -> Any:
    """Return a document for JSON: rounded, with ``INFINITE`` for numbers that are not finite."""
    return json.loads(
        json.dumps(document),
        parse_float=lambda number: float(f"{float(number):.3g}"),
        parse_constant=lambda _: INFINITE,
    )


def run(args: Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the requested models; return the summary and the whole document."""
    from harness import checked_models

    about = origin()  # before the result file changes the checkout
    results = []
    wanted = checked_models.groups(args.only, args.models, args.triton)
    if not wanted:
        raise SetupError(f"no shape has {args.only!r} in its name")
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(in_a_process_of_its_own, wanted):
            results += found
            counts = summary(results)
            document = about | finite(counts)
            of_models = finite(list(map(dataclasses.asdict, results)))
            # So an interrupted run leaves the results so far.
            write_result(args.results, document | {"results": of_models})
    return counts, document


def main() -> int:
    """Run, print, and return the exit status."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--models", type=parse_positive, help="maximum number of models of each shape and type")
    add("--only", default="", help="shapes with this in their name")
    add("--triton", action="store_true", help="on SGLang's Triton backend")
    add("--results", type=Path, help="where to put the results, as JSON")
    args = parser.parse_args()
    if args.triton and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--triton needs TRITON_INTERPRET=1: without it SGLang has no Triton on a CPU")
    try:
        counts, document = run(args)
    except (SetupError, OSError, ValueError, ImportError) as failure:
        return failed(failure)
    good = not any(counts["false_alarms"].values())
    for name, one in counts["breakages"].items():
        print(f"{name:45} {one['models']:4} models, at least {one['smallest']:.3g} times")
        good &= one["smallest"] > ENOUGH
    print(json.dumps(document))
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
