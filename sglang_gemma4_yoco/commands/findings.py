"""What ``doctor`` has found out: lines to read, facts for a program, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_gemma4_yoco.commands.console import heading, say

_INDENT = "  "


class Findings:
    """What was found so far.

    Attributes:
        facts: by name, in plain types.
        refusals: why the path would not be active, each of them certain; the first one counts.
        unknowns: what cannot be told here, and would have to be known for a yes.
    """

    def __init__(self, facts: Iterable[str] = ()) -> None:
        """Nothing is known yet, of these facts either."""
        self.facts: dict[str, Any] = dict.fromkeys(facts)
        self.refusals: list[str] = []
        self.unknowns: list[str] = []
        self._sections: list[tuple[str, list[tuple[str, str]]]] = []

    def section(self, title: str) -> None:
        """Begin a new part of the report."""
        self._sections.append((title, []))

    def tell(self, label: str, text: str) -> None:
        """Add a line to the part that was begun last."""
        self._sections[-1][1].append((label, text))

    @property
    def active(self) -> bool | None:
        """Whether the path would be active; None where that cannot be told."""
        if self.refusals:
            return False
        return None if self.unknowns else True

    @property
    def reason(self) -> str | None:
        """Why it would not be, or why that cannot be told."""
        return next(iter([*self.refusals, *self.unknowns]), None)

    @property
    def exit_status(self) -> int:
        """0: it would be active, 1: not, 2: that cannot be told."""
        return {True: 0, False: 1, None: 2}[self.active]

    def document(self) -> dict[str, Any]:
        """All of it, for a program."""
        verdict = {"active": self.active, "reason": self.reason}
        return {**verdict, **self.facts, "refusals": self.refusals, "unknowns": self.unknowns}

    def show(self) -> None:
        """Print all of it, for a reader."""
        for title, lines in self._sections:
            heading(title)
            width = max((len(label) for label, _ in lines), default=0)
            for label, text in lines:
                say(f"{_INDENT}{label:<{width}}{_INDENT}{text}".rstrip())
        say()
        say(self._verdict())
        for also in [*self.refusals, *self.unknowns][1:]:
            say(f"{_INDENT}and: {also}")

    def _verdict(self) -> str:
        if self.active is None:
            return f"Whether it would be active cannot be told here: {self.reason}"
        return "It would be active." if self.active else f"It would NOT be active: {self.reason}"
