"""What commands print. Standard library only."""

from __future__ import annotations

from pathlib import Path


class CommandError(Exception):
    """A command cannot go on, for this reason; the end of ``log`` is worth seeing."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


def say(text: str = "") -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


def heading(text: str) -> None:
    """Begin a new part of the output."""
    say(f"\n== {text}")


def tail(log: Path, lines: int = 25) -> str:
    """The end of a log file, for an error message."""
    content = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"The end of {log}:", *(f"  | {line}" for line in content[-lines:])])
