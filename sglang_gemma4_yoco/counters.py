"""Prefill forwards of this process, counted by outcome, and their rows; audits.

Decode steps are not counted. A process runs one forward at a time, so there is no lock.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sglang_gemma4_yoco import log

# Outcomes of a forward; the reason for which it runs as stock is another.
TAIL_EAGER = "active_eager"
TAIL_CAPTURED = "active_captured"
TAIL_SKIPPED = "active_intermediate_chunk"
# The same after an exit from a prefill graph of SGLang's.
EXIT_CAPTURED = "exit_captured"
EXIT_SKIPPED = "exit_intermediate_chunk"
FAILED = "failed"
UNSEEN = "unseen"  # planned to be cut, and its forward did not come by this package
AT_EXITS = {TAIL_CAPTURED: EXIT_CAPTURED, TAIL_SKIPPED: EXIT_SKIPPED}
CUT = frozenset({TAIL_EAGER, *AT_EXITS, *AT_EXITS.values()})

#: What holds where so many prefills were unseen, and none was cut.
NOT_CUT = "set up, but no prefill was cut"
_MANY_UNSEEN = 20

PARTS = COMPUTED, SKIPPED = "computed", "skipped"
AGREES, DIFFERS = "agrees", "differs"


@dataclass
class Audits:
    """Of the forwards that were run again as stock: how many agreed up to rounding, and how many
    did not; the largest error, in multiples of rounding.
    """

    agree: int = 0
    differ: int = 0
    worst: float = 0.0


#: Forwards of this process by outcome, their rows by whether the last layer computed them, audits.
forwards: Counter[str] = Counter()
rows: Counter[str] = Counter()
audits = Audits()
#: The reasons for which all batches of this server run as stock.
server_reasons: set[str] = set()

#: Called with what was counted: in which of the three, as what, and by how much.
observers: list[Callable[[str, str, int], None]] = []
# The outcomes of forwards that are counted apart.
_not_counted: Counter[str] | None = None


@contextmanager
def count_apart() -> Iterator[Counter[str]]:
    """Forwards here are not logged, and counted only in the Counter that this yields."""
    global _not_counted
    _not_counted = outcomes = Counter[str]()
    try:
        yield outcomes
    finally:
        _not_counted = None


def _count_forward(outcome: str, computed: int, skipped: int = 0) -> None:
    if _not_counted is not None:
        _not_counted[outcome] += 1
        return
    forwards[outcome] += 1
    rows[COMPUTED] += computed
    rows[SKIPPED] += skipped
    _notify_observers("forwards", outcome, 1)
    _notify_observers("rows", COMPUTED, computed)
    _notify_observers("rows", SKIPPED, skipped)


def _notify_observers(name: str, label: str, number: int) -> None:
    try:
        for call in observers:
            call(name, label, number)
    except Exception as broken:  # noqa: BLE001 - no forward may fail over its metrics
        observers.clear()
        log.log_failure("Gemma 4 fast prefill: its metrics are no longer collected", broken)


def count_cut(describe: Callable[[], str], outcome: str, *, computed: int, skipped: int) -> None:
    """Count a forward on the fast path; log ``describe()`` at the first one."""
    is_first = CUT.isdisjoint(forwards)
    _count_forward(outcome, computed, skipped)
    if is_first and _not_counted is None:
        log.log_once(f"Gemma 4 fast prefill is active: {describe()}")


def count_ineligible(reason: str, rows_in_all: int, *, logged: bool = True) -> None:
    """Count a forward that ran as stock; log the reason, unless it was logged before."""
    _count_forward(reason, rows_in_all)
    if logged and _not_counted is None and reason not in server_reasons:
        log.log_once(f"Gemma 4 fast prefill falls back to stock: {reason}")


def note_unsupported(reason: str, level: int = logging.INFO, *, logged: bool = True) -> None:
    """Log why all batches of this server run as stock; it is not logged again for a batch."""
    server_reasons.add(reason)
    if logged:
        log.log_once(f"Gemma 4 fast prefill falls back to stock for this server: {reason}", level)


def count_unseen(rows_in_all: int) -> None:
    """Count a prefill that was to be cut and that some other code has run; warn of many."""
    _count_forward(UNSEEN, rows_in_all)
    if is_unused():
        log.log_once(
            f"Gemma 4 fast prefill is set up, but no prefill was cut: {_MANY_UNSEEN} that could be "
            "were run by SGLang's CUDA graphs or another plugin",
            logging.WARNING,
        )


def is_unused() -> bool:
    """Whether many prefills were unseen, and none was cut."""
    return forwards[UNSEEN] >= _MANY_UNSEEN and CUT.isdisjoint(forwards)


def count_failure(error: Exception, rows_in_all: int) -> None:
    """Count a forward that failed on the fast path and is served by stock; log the error."""
    _count_forward(FAILED, rows_in_all)
    log_failed_forward(error)


def log_failed_forward(error: Exception) -> None:
    """Log the error of a forward that stock serves."""
    log.log_failure("Gemma 4 fast prefill failed, the stock forward serves the batch", error)


def count_audit(excess: float, *, agrees: bool) -> None:
    """Count a forward that was run again as stock."""
    audits.agree += agrees
    audits.differ += not agrees
    audits.worst = max(audits.worst, excess)
    _notify_observers("audits", AGREES, int(agrees))
    _notify_observers("audits", DIFFERS, int(not agrees))
