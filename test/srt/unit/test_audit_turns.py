"""Which forwards are audited: one of N, and each outcome in its turn."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sglang_gemma4_yoco.checking.audit import Turns

OUTCOMES = "ABCDE"
EVERY = st.integers(1, 12)


@st.composite
def traffic(draw: st.DrawFn) -> str:
    """Some outcomes in one order, again and again; and then others."""
    found = ""
    for _ in range(draw(st.integers(0, 4))):
        order = draw(st.text(OUTCOMES, min_size=1, max_size=9))
        found += order * draw(st.integers(1, 20))
    return found


def choose(every: int, outcomes: Sequence[str]) -> list[bool]:
    """Whether each of these forwards is audited."""
    turns = Turns(every)
    return list(map(turns.take, outcomes))


@given(traffic(), EVERY)
def test_each_outcome_is_audited_in_time(outcomes: str, every: int) -> None:
    """Whatever comes beside it, and however rare it is."""
    last = dict[str, int]()
    for number, chosen in enumerate(choose(every, outcomes)):
        outcome = outcomes[number]
        since = number - last.setdefault(outcome, number)
        if chosen:
            last[outcome] = number
        else:
            assert since < len(last) * every


@given(traffic(), EVERY)
def test_one_of_so_many_is_audited(outcomes: str, every: int) -> None:
    """Never more; and fewer by one for each outcome whose turn it is and that does not come."""
    audits = 0
    for number, chosen in enumerate(choose(every, outcomes), start=1):
        audits += chosen
        waiting = number // every - audits
        assert 0 <= waiting < len(set(outcomes[:number]))


@given(traffic())
def test_one_of_one_is_all(outcomes: str) -> None:
    assert all(choose(1, outcomes))
