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

TAIL_EAGER = "active"
TAIL_CAPTURED = "active, tail replayed"
TAIL_SKIPPED = "active, tail skipped"
EXIT_CAPTURED = "active, front and tail replayed"
EXIT_SKIPPED = "active, front replayed, tail skipped"
FAILED = "failed, served by stock"
CUT = frozenset({TAIL_EAGER, TAIL_CAPTURED, TAIL_SKIPPED, EXIT_CAPTURED, EXIT_SKIPPED})

#: Forwards by outcome: ``TAIL_EAGER`` (the tail was launched), ``TAIL_CAPTURED``, ``TAIL_SKIPPED``,
#: the same two behind a front that SGLang had recorded (``EXIT_CAPTURED``, ``EXIT_SKIPPED``),
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
#: Each is called with every forward that is counted: its outcome, and its rows by part.
on_forward: list[Callable[[str, Mapping[str, int]], None]] = []
#: Each is called with every audit, as if it were the only one.
on_audit: list[Callable[[Audits], None]] = []
# Outcomes of the forwards that are nobody's, in a span of those.
_not_counted: Counter[str] | None = None
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


@contextmanager
def not_counted() -> Iterator[Counter[str]]:
    """Forwards in the span are nobody's: counted by outcome in what it yields, and not said."""
    global _not_counted
    _not_counted = outcomes = Counter[str]()
    try:
        yield outcomes
    finally:
        _not_counted = None


def _count(outcome: str, computed: int, skipped: int = 0) -> None:
    if _not_counted is not None:
        _not_counted[outcome] += 1
        return
    forwards[outcome] += 1
    rows[COMPUTED] += computed
    rows[SKIPPED] += skipped
    _tell(on_forward, outcome, {COMPUTED: computed, SKIPPED: skipped})


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
    _tell(on_audit, Audits(int(agrees), int(not agrees), greedy_changes, excess))


def active(
    model: object, describe: Callable[[], str], outcome: str, *, computed: int, skipped: int
) -> None:
    """Count a forward that took the fast path; say so the first time for this ``model``.

    ``describe()`` says what was cut, and how; it is not called again for the same model.
    """
    _count(outcome, computed, skipped)
    if _not_counted is None and model not in _told_active:
        _told_active.add(model)
        once(f"Gemma 4 fast prefill is active: {describe()}")


def batch_refused(reason: str, rows_in_all: int, *, logged: bool = True) -> None:
    """Count a forward that ran as stock; ``tell`` why, if it was not told before."""
    _count(reason, rows_in_all)
    if logged and _not_counted is None and _first((_ASIDE, reason)):
        once(f"Gemma 4 fast prefill steps aside: {reason}")


def server_refused(reason: str, level: int = logging.INFO) -> None:
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
