"""The bench of checks: what is in its result files, and what it counts."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from scripts.bench import bench_checks
from scripts.bench.bench_checks import ENOUGH
from scripts.bench.breakages import BREAKAGES
from scripts.bench.checked_models import Group, Result
from scripts.environment import SetupError
from scripts.result_files import RESULTS, package_of

# Models and audited prefills, at least; and breakages: Triton plans the windows of all layers
# alike, so that it has no place for two of the donor's alone.
SIZES = {
    "checks_cpu.json": (208, 2075, len(BREAKAGES)),
    "checks_triton.json": (12, 36, len(BREAKAGES) - 2),
}


@pytest.mark.parametrize("file", SIZES)
def test_what_was_found(file: str) -> None:
    """No false alarm, and nothing broken that was missed."""
    document = json.loads((RESULTS / file).read_text())
    models, audited, broken = SIZES[file]
    assert document["models"] == len(document["results"]) >= models
    assert document["audited"] >= audited
    assert document["false_alarms"] == {"check": 0, "audits": 0, "proofs": 0}
    assert set(document["breakages"]) <= set(BREAKAGES)
    assert len(document["breakages"]) == broken
    for name, found in document["breakages"].items():
        tried = [one["found"][name] for one in document["results"] if name in one["found"]]
        assert len(tried) == found["models"], name
        assert all(factor == "infinite" or factor > ENOUGH for factor in tried), name


def test_false_alarms_and_misses_are_counted() -> None:
    kind: dict[str, Any] = {"seed": 0, "sharpness": 1.0, "post_norms": 1.0, "outliers": 1.0}
    good = Result("tiny", "bfloat16", **kind, check=0.5, found={"a": 9.0, "b": math.inf})
    bad = Result("large", "bfloat16", **kind, check=1.5, found={"a": 2.0})
    found = bench_checks.summary([good, bad])
    assert found["false_alarms"] == {"check": 1, "audits": 0, "proofs": 0}
    assert found["breakages"]["a"] == {
        "models": 2,
        "smallest": 2.0,
        "on": "large, bfloat16, seed 0",
    }
    document = bench_checks.finite(found)
    assert document["breakages"]["b"]["smallest"] == "infinite"
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_a_run_that_was_cut_short_is_resumed() -> None:
    """Groups that an earlier run has as a whole are kept, on the same package alone."""
    whole, part = Group("tiny", "bfloat16", 2, triton=False), Group("tiny", "float16", 2, False)
    kind: dict[str, Any] = {"sharpness": 1.0, "post_norms": 1.0, "outliers": 1.0}
    done = [
        Result("tiny", "bfloat16", 0, **kind, check=0.5, found={"a": 9.0}),
        Result("tiny", "bfloat16", 1, **kind, check=0.5, found={"a": math.inf}),
    ]
    cut_short = Result("tiny", "float16", 100, **kind)
    results = [dataclasses.asdict(one) for one in (*done, cut_short)]
    document = {"package": package_of(), "results": bench_checks.finite(results)}
    written = json.dumps(document, allow_nan=False)
    assert bench_checks.earlier_results(json.loads(written), [whole, part]) == done
    document["package"] = "another"
    with pytest.raises(SetupError, match=r"of package another.*leave out --resume"):
        bench_checks.earlier_results(document, [whole, part])
