"""What ``doctor`` has found, and its report."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sglang_gemma4_yoco.commands.console import say

#: What --json always has, beside the verdict; null where it was not determined.
FACTS = (
    *("version", "sglang", "torch", "python", "settings", "plugins"),
    *("model", "layers", "first_shared", "quantisation", "attention"),
)


@dataclass
class Findings:
    """Facts, reasons why the path would not be active, what is undetermined, and the report."""

    facts: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(FACTS))
    refusals: list[str] = field(default_factory=list)
    unknowns: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def begin(self, part: str) -> None:
        """Begin a part of the report."""
        self.lines.append(f"\n== {part}")

    def add(self, label: str, text: str, **facts: Any) -> None:
        """Add a line to the report, and facts."""
        self.lines.append(f"  {label:<20}  {text}".rstrip())
        self.facts |= facts

    @property
    def exit_status(self) -> int:
        """0: the path would be active, 1: not, 2: that cannot be determined."""
        return 1 if self.refusals else 2 if self.unknowns else 0

    def show(self, as_json: bool) -> None:
        """Print all of it, for a program or for people."""
        status, reasons = self.exit_status, [*self.refusals, *self.unknowns]
        if as_json:
            judged = {"active": (True, False, None)[status], "reason": next(iter(reasons), None)}
            why = {"refusals": self.refusals, "unknowns": self.unknowns}
            say(json.dumps({**judged, **self.facts, **why}))
            return
        cannot = "Whether it would be active cannot be determined here:"
        verdict = ("It would be active.", "It would NOT be active:", cannot)[status]
        say("\n".join([*self.lines, f"\n{verdict}", *(f"  {reason}" for reason in reasons)]))
