"""The bench of checks: what it has found is in the documents, and it misses nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import bench_checks
from bench_checks import ENOUGH, Result
from breakages import BREAKAGES
from generated import inserted

REPO = Path(__file__).resolve().parents[3]
FOLDER = REPO / "benchmark" / "results"
RESULTS = {bench_checks.PART: "checks_cpu.json", bench_checks.PART_ON_TRITON: "checks_triton.json"}
# Models and audited prefills, at least.
SIZES = {bench_checks.PART: (208, 2075), bench_checks.PART_ON_TRITON: (12, 36)}


@pytest.mark.parametrize("part", RESULTS)
def test_what_was_found(part: str) -> None:
    """No false alarm, and nothing broken that was missed."""
    document = json.loads((FOLDER / RESULTS[part]).read_text())
    models, audited = SIZES[part]
    assert document["models"] == len(document["results"]) >= models
    assert document["audited"] >= audited
    assert document["false_alarms"] == {"check": 0, "audits": 0, "proofs": 0}
    assert set(document["breakages"]) <= set(BREAKAGES)
    for name, found in document["breakages"].items():
        factors = [
            math.inf if one["found"][name] == "infinite" else one["found"][name]
            for one in document["results"]
            if name in one["found"]
        ]
        assert len(factors) == found["models"], name
        assert min(factors) > ENOUGH, name


@pytest.mark.parametrize("part", RESULTS)
def test_the_document_has_it(part: str) -> None:
    page = (FOLDER / "checks.md").read_text()
    table = bench_checks.table(json.loads((FOLDER / RESULTS[part]).read_text()))
    assert inserted(page, part, table) == page


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
