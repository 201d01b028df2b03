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


def markdown(head: Sequence[str], rows: Iterable[Iterable[object]], *, numbers: int = 0) -> str:
    """A table.

    Args:
        numbers: how many of the last columns hold numbers.
    """
    rule = f"|{'---|' * (len(head) - numbers)}{'---:|' * numbers}"
    return "\n".join([_line(head), rule, *map(_line, rows)])


def _line(cells: Iterable[object]) -> str:
    escaped = (str(cell).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
