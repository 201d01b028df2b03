"""Output of the commands, without secrets. Standard library only."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sglang_gemma4_yoco.commands.redact import redact

#: A JSON document.
Document = dict[str, Any]

#: The entries that --json always has, besides the verdict; null if unknown.
ENTRIES = (
    "version",
    "commit",
    "sglang",
    "torch",
    "python",
    "settings",
    "plugins",
    "model",
    "layers",
    "first_shared",
    "quantisation",
    "attention",
)

# By the exit status of ``doctor``: its verdict, in JSON and as text.
_VERDICTS = (
    (True, "It would be active."),
    (False, "It would NOT be active:"),
    (None, "Whether it would be active cannot be determined here:"),
)


class CommandError(Exception):
    """A command cannot continue; the message has the reason."""


def say(content: object, file: TextIO | None = None, indent: int | None = None) -> None:
    """Print a line or a JSON document without secrets, and flush it; to stdout, or into a file.

    Args:
        indent: the document's indentation; None for one line.
    """
    shown = redact(content)
    if not isinstance(shown, str):
        shown = json.dumps(shown, indent=indent)
    print(shown, file=file, flush=True)


def quote_end(log: Path) -> str:
    """Return the end of a log file, for an error message."""
    last = log.read_text(errors="replace").splitlines()[-25:]
    return "\n  | ".join([f"\nThe end of {log}:", *last])


@dataclass
class Report:
    """``doctor``'s JSON entries, reasons for not being active, unknowns, and lines of text."""

    entries: Document = field(default_factory=lambda: dict.fromkeys(ENTRIES))
    refusals: list[str] = field(default_factory=list)
    unknowns: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def begin(self, part: str) -> None:
        """Begin a part of the report."""
        self.lines.append(f"\n== {part}")

    def add(self, label: str, text: str, **entries: object) -> None:
        """Add a line of text, and JSON entries."""
        self.lines.append(f"  {label:<20}  {text}".rstrip())
        self.entries |= entries

    def refuse(self, refusal: object | None) -> None:
        """Add a reason why the path would not be active; ignore None and repetitions."""
        if refusal and str(refusal) not in self.refusals:
            self.refusals.append(str(refusal))

    @property
    def exit_status(self) -> int:
        """0 if the path would be active, 1 if not, 2 if that cannot be determined."""
        if self.refusals:
            return 1
        if self.unknowns:
            return 2
        return 0

    def show(self, as_json: bool) -> None:
        """Print the report, as JSON or as text."""
        active, verdict = _VERDICTS[self.exit_status]
        reasons = self.refusals + self.unknowns
        if as_json:
            say(
                {
                    "active": active,
                    "reason": next(iter(reasons), None),
                    **self.entries,
                    "refusals": self.refusals,
                    "unknowns": self.unknowns,
                }
            )
            return
        say("\n".join([*self.lines, "\n  ".join([f"\n{verdict}", *reasons])]))
