"""``bench/bench_checks.py``: its counts of false alarms and of missed breakages."""

from __future__ import annotations

import json
import math
from typing import Any

from harness.checked_models import Result
from scripts.bench import bench_checks


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
