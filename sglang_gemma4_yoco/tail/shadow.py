"""Methods and numbers replaced on single objects, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Shadows:
    """Owns every replacement made through it, until ``close`` or the end of its span.

    The replacement goes into the instance's ``__dict__``, where ``nn.Module.__call__`` finds it
    before the class's method; other instances, and the class, are untouched.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, object]] = []

    def __enter__(self) -> Shadows:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
        """Replace ``owner.name`` by ``wrap(owner.name)``."""
        replacement = wrap(getattr(owner, name))
        self._saved.append((owner, name, owner.__dict__.get(name, _ABSENT)))
        owner.__dict__[name] = replacement

    def close(self) -> None:
        """Put everything back, the latest first."""
        while self._saved:
            owner, name, previous = self._saved.pop()
            if previous is _ABSENT:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = previous
