"""Selection of audited forwards: one of N, and each outcome in its turn."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from sglang_gemma4_yoco.checking.audit import Turns

OUTCOMES = "ABCDE"


@st.composite
def traffic(draw: st.DrawFn) -> str:
    """Return outcomes in one order, repeated, and then others."""
    found = ""
    for _ in range(draw(st.integers(0, 4))):
        order = draw(st.text(OUTCOMES, min_size=1, max_size=9))
        found += order * draw(st.integers(1, 20))
    return found


@example("BAAAAACDB", 2)
@given(traffic(), st.integers(1, 12))
def test_each_outcome_has_its_turn(outcomes: str, every: int) -> None:
    """Rare outcomes have their turn among any others; no more than one of N forwards is audited."""
    turns, last, audits = Turns(every), dict[str, int](), 0
    for number, outcome in enumerate(outcomes):
        since = number - last.setdefault(outcome, number)
        if turns.take(outcome):
            last[outcome] = number
            audits += 1
        else:
            assert every > 1
            assert since < len(last) * every
        assert 0 <= (number + 1) // every - audits < len(last)
