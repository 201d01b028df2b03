"""Selection of audited forwards: the first of each outcome, and one of N of the others."""

from __future__ import annotations

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_gemma4_yoco.checking.audit import Auditor
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.counters import Counters


@pytest.mark.parametrize("every", [1, 2, 20])
def test_one_of_n_of_any_rhythm(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Of prompts of three chunks each chunk is audited, and a rare outcome the first time."""
    state, plan = SimpleNamespace(counters=Counters(logs=False)), SimpleNamespace()
    audits = Counter[str]()
    monkeypatch.setattr(Auditor, "_audit", lambda _, __, plan, ___: audits.update([plan.name]))
    auditor: Any = Auditor(cast("ModelState", state), every, Random(0))
    for plan.name in ["first", "second", "last"] * 3000 + ["rare"]:
        plan.outcome = "active_intermediate_chunk"
        if plan.name in ("last", "rare"):
            plan.outcome = plan.name
        auditor(None, plan, None)
        state.counters.count_cut(str, plan.outcome, computed=1, skipped=1)
    assert audits.pop("rare") == 1
    # Six standard deviations of 3,000 draws.
    spread = 6 * (3000 * (1 / every) * (1 - 1 / every)) ** 0.5
    assert len(audits) == 3
    for count in audits.values():
        assert abs(count - 3000 / every) <= spread + 1
