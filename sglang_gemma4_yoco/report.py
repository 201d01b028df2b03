"""What the package tells: once-only log lines, and counters of forwards by outcome.

Counters count prefill forwards of patched models (a decode step is counted nowhere). One process
runs one forward at a time, so there is no lock.
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger("sglang_gemma4_yoco")

ACTIVE = "active"
TAIL_REPLAYED = "active, tail replayed"
TAIL_SKIPPED = "active, tail skipped"
ALL_REPLAYED = "active, front and tail replayed"
FRONT_REPLAYED = "active, front replayed, tail skipped"
FAILED = "failed, served by stock"
CUT = frozenset({ACTIVE, TAIL_REPLAYED, TAIL_SKIPPED, ALL_REPLAYED, FRONT_REPLAYED})

#: Forwards by outcome: ``ACTIVE`` (the tail was launched), ``TAIL_REPLAYED``, ``TAIL_SKIPPED``,
#: the same two behind a front that SGLang had recorded (``ALL_REPLAYED``, ``FRONT_REPLAYED``),
#: ``FAILED`` or the reason for stepping aside.
forwards: Counter[str] = Counter()

COMPUTED, SKIPPED = "computed", "skipped"
PARTS = (COMPUTED, SKIPPED)
#: Rows of those forwards, by whether the last layer has computed them.
rows: Counter[str] = Counter()


@dataclass
class Audits:
    """What came of the forwards that were run again as stock.

    Attributes:
        agree: those of which each step differed by no more than rounding does.
        differ: the others.
        greedy_changes: rows whose likeliest token was another one.
        worst: the largest error of all, in multiples of what is rounding; see ``rounding``.
    """

    agree: int = 0
    differ: int = 0
    greedy_changes: int = 0
    worst: float = 0.0


#: Of this process so far.
audits = Audits()

_ASIDE = "steps aside"
_observers: list[Callable[[str, Mapping[str, int]], None]] = []
_audit_observers: list[Callable[[Audits], None]] = []
# Outcomes of the forwards that are nobody's, in a span of those.
_unheard: Counter[str] | None = None
_said: set[Hashable] = set()
_told_active: weakref.WeakSet[object] = weakref.WeakSet()


def _first(said: Hashable) -> bool:
    """Whether this has not been said before in this process."""
    if said in _said:
        return False
    _said.add(said)
    return True


def once(line: str, level: int = logging.INFO) -> None:
    """Log ``line`` the first time it is said in this process."""
    if _first(line):
        logger.log(level, "%s", line)


def error(line: str) -> None:
    """Log ``line`` as an error the first time it is said in this process."""
    once(line, logging.ERROR)


def failure(line: str, error: Exception) -> None:
    """Log ``line`` and the error with its traceback, the first time for this kind of error.

    The kind is the error's type and the place that raised it: messages of one kind can all differ,
    as those of a device out of memory do.
    """
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    kind = (line, type(error), *((frame.filename, frame.lineno) for frame in raised))
    if _first(kind):
        logger.error("%s: %r", line, error, exc_info=error)


def observe(tell: Callable[[str, Mapping[str, int]], None]) -> None:
    """Have ``tell(outcome, rows by part)`` called with every forward that is counted."""
    _observers.append(tell)


def observe_audits(tell: Callable[[Audits], None]) -> None:
    """Have ``tell`` called with every audit, as if it were the only one."""
    _audit_observers.append(tell)


@contextmanager
def unheard() -> Iterator[Counter[str]]:
    """Forwards in the span are nobody's: counted by outcome in what it yields, and not said."""
    global _unheard
    _unheard = outcomes = Counter[str]()
    try:
        yield outcomes
    finally:
        _unheard = None


def _count(outcome: str, computed: int, skipped: int = 0) -> None:
    if _unheard is not None:
        _unheard[outcome] += 1
        return
    forwards[outcome] += 1
    rows[COMPUTED] += computed
    rows[SKIPPED] += skipped
    _tell(_observers, outcome, {COMPUTED: computed, SKIPPED: skipped})


def _tell(observers: list[Callable[..., None]], *counted: object) -> None:
    for tell in tuple(observers):
        try:
            tell(*counted)
        except Exception as broken:  # noqa: BLE001 - no forward may fail over its metrics
            observers.remove(tell)
            failure("Gemma 4 fast prefill: its metrics are collected no longer", broken)


def audited(excess: float, *, agrees: bool, greedy_changes: int) -> None:
    """Count a forward that was run again as stock."""
    audits.agree += agrees
    audits.differ += not agrees
    audits.greedy_changes += greedy_changes
    audits.worst = max(audits.worst, excess)
    _tell(_audit_observers, Audits(int(agrees), int(not agrees), greedy_changes, excess))


def active(
    model: object, describe: Callable[[], str], outcome: str, *, computed: int, skipped: int
) -> None:
    """Count a forward that took the fast path; say so the first time for this ``model``.

    ``describe()`` says what was cut, and how; it is not called again for the same model.
    """
    _count(outcome, computed, skipped)
    if _unheard is None and model not in _told_active:
        _told_active.add(model)
        once(f"Gemma 4 fast prefill is active: {describe()}")


def stepped_aside(reason: str, rows_in_all: int, *, tell: bool = True) -> None:
    """Count a forward that ran as stock; ``tell`` why, if it was not told before."""
    _count(reason, rows_in_all)
    if tell and _unheard is None and _first((_ASIDE, reason)):
        once(f"Gemma 4 fast prefill steps aside: {reason}")


def steps_aside(reason: str, level: int = logging.INFO) -> None:
    """Say why no batch of this server will be cut. Of its batches that need not be told again."""
    _said.add((_ASIDE, reason))
    once(f"Gemma 4 fast prefill steps aside for this server: {reason}", level)


def failed(error: Exception, rows_in_all: int) -> None:
    """Count a forward that failed on the fast path, to be served by stock; say how."""
    _count(FAILED, rows_in_all)
    failure("Gemma 4 fast prefill failed, the stock forward serves the batch", error)


def reset() -> None:
    """Forget counters and what was said (for tests and for a new measurement)."""
    forwards.clear()
    rows.clear()
    vars(audits).update(vars(Audits()))
    _said.clear()
    _told_active.clear()
