"""The parts of a document that a script writes, each between two marker lines, and their tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def begin(name: str) -> str:
    """The line before the part called ``name``."""
    return f"<!-- {name}: begin -->"


def end(name: str) -> str:
    """The line behind it."""
    return f"<!-- {name}: end -->"


def inserted(document: str, name: str, content: str) -> str:
    """``document`` with ``content`` as its part called ``name``.

    Raises:
        ValueError: the part's markers are not there.
    """
    before, first, rest = document.partition(begin(name))
    _, last, after = rest.partition(end(name))
    if not first or not last:
        raise ValueError(f"there are no lines {begin(name)} and {end(name)}")
    return f"{before}{first}\n{content.rstrip()}\n{last}{after}"


def table(head: Sequence[str], rows: Iterable[Iterable[object]], *, numbers: int = 0) -> str:
    """A table in Markdown, without a line's end behind it.

    Args:
        numbers: how many of the last columns hold numbers.
    """
    words = len(head) - numbers
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * words}{'---:|' * numbers}"]
    for row in rows:
        lines.append(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |")
    return "\n".join(lines)
