"""What the package tells: once-only log lines, and counters of forwards by outcome.

Counters count prefill forwards of patched models (a decode step is counted nowhere). One process
runs one forward at a time, so there is no lock.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger("sglang_gemma4_yoco")

ACTIVE = "active"
TAIL_SKIPPED = "active, tail skipped"

#: Forwards by outcome: ``ACTIVE``, ``TAIL_SKIPPED`` or the reason for stepping aside.
forwards: Counter[str] = Counter()

_said: set[str] = set()
_told_active: weakref.WeakSet[object] = weakref.WeakSet()


def once(line: str, level: int = logging.INFO) -> None:
    """Log ``line`` the first time it is said in this process."""
    if line not in _said:
        _said.add(line)
        logger.log(level, "%s", line)


def active(model: object, describe: Callable[[], str], *, tail_skipped: bool) -> None:
    """Count a forward that took the fast path; say so the first time for this ``model``.

    ``describe()`` says what was cut, and how; it is not called again for the same model.
    """
    forwards[TAIL_SKIPPED if tail_skipped else ACTIVE] += 1
    if model not in _told_active:
        _told_active.add(model)
        once(f"Gemma 4 fast prefill is active: {describe()}")


def stepped_aside(reason: str) -> None:
    """Count a forward that ran as stock; say why the first time for this ``reason``."""
    forwards[reason] += 1
    once(f"Gemma 4 fast prefill steps aside: {reason}")


def reset() -> None:
    """Forget counters and what was said (for tests and for a new measurement)."""
    forwards.clear()
    _said.clear()
    _told_active.clear()
