"""Selection of audited forwards: one of N of each outcome."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_gemma4_yoco.checking.audit import Auditor
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.counters import Counters


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
    state, plan, found = SimpleNamespace(counters=Counters(logs=False)), SimpleNamespace(), ""
    auditor: Any = Auditor(cast("ModelState", state), every)
    monkeypatch.setattr(Auditor, "_audit", lambda _, __, plan, ___: plan.outcome)
    for plan.outcome in outcomes:
        found += auditor(None, plan, ".")
        state.counters.count_cut(str, plan.outcome, computed=1, skipped=1)
    assert found == expected
