"""What the package tells: once-only log lines, and counters of forwards by outcome.

Counters count prefill forwards of patched models (a decode step is counted nowhere). One process
runs one forward at a time, so there is no lock.
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping

logger = logging.getLogger("sglang_gemma4_yoco")

ACTIVE = "active"
TAIL_REPLAYED = "active, tail replayed"
TAIL_SKIPPED = "active, tail skipped"
FAILED = "failed, served by stock"

#: Forwards by outcome: ``ACTIVE`` (the tail was launched), ``TAIL_REPLAYED``, ``TAIL_SKIPPED``,
#: ``FAILED`` or the reason for stepping aside.
forwards: Counter[str] = Counter()

COMPUTED, SKIPPED = "computed", "skipped"
PARTS = (COMPUTED, SKIPPED)
#: Rows of those forwards, by whether the last layer has computed them.
rows: Counter[str] = Counter()

_ASIDE = "steps aside"
_observers: list[Callable[[str, Mapping[str, int]], None]] = []
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


def _count(outcome: str, computed: int, skipped: int = 0) -> None:
    forwards[outcome] += 1
    rows[COMPUTED] += computed
    rows[SKIPPED] += skipped
    for tell in tuple(_observers):
        try:
            tell(outcome, {COMPUTED: computed, SKIPPED: skipped})
        except Exception as broken:  # noqa: BLE001 - no forward may fail over its metrics
            _observers.remove(tell)
            failure("Gemma 4 fast prefill: its metrics are collected no longer", broken)


def active(
    model: object, describe: Callable[[], str], outcome: str, *, computed: int, skipped: int
) -> None:
    """Count a forward that took the fast path; say so the first time for this ``model``.

    ``describe()`` says what was cut, and how; it is not called again for the same model.
    """
    _count(outcome, computed, skipped)
    if model not in _told_active:
        _told_active.add(model)
        once(f"Gemma 4 fast prefill is active: {describe()}")


def stepped_aside(reason: str, rows_in_all: int, *, tell: bool = True) -> None:
    """Count a forward that ran as stock; ``tell`` why, if it was not told before."""
    _count(reason, rows_in_all)
    if tell and _first((_ASIDE, reason)):
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
    _said.clear()
    _told_active.clear()
