"""Selection of audited forwards: one of N of each outcome."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_gemma4_yoco.checking.audit import Auditor


@pytest.mark.parametrize(
    ("every", "outcomes", "expected"),
    [
        (1, "ABA", "ABA"),
        (3, "ABAAAB", "AB..A."),
        (2, "AAAAAAAAAB", "A.A.A.A.AB"),
    ],
)
def test_one_of_n_of_each_outcome(
    monkeypatch: pytest.MonkeyPatch, every: int, outcomes: str, expected: str
) -> None:
    """A rare outcome is audited the first time, however many others come before it."""
    planned: Any = type("Plan", (), {})
    nothing: Any = None
    monkeypatch.setattr(Auditor, "_audit", lambda _, __, plan, ___: plan.outcome)
    auditor, found = Auditor(nothing, every), ""
    for planned.outcome in outcomes:
        found += auditor(nothing, planned, ".")  # type: ignore[arg-type, operator]
    assert found == expected
