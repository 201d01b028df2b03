"""Python's audit events: opened files, listed folders and imports."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_EVENTS = frozenset({"open", "import", "os.listdir", "os.scandir"})

_recorded: list[Counter[tuple[str, str]]] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        for seen in _recorded:
            seen[event, str(args[0])] += 1


sys.addaudithook(_hook)  # permanently: Python removes none


@contextmanager
def audited() -> Iterator[Counter[tuple[str, str]]]:
    """Count each (event, file or module) in the ``with`` block."""
    seen: Counter[tuple[str, str]] = Counter()
    _recorded.append(seen)
    try:
        yield seen
    finally:
        _recorded.remove(seen)
