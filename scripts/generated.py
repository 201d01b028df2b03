"""The parts of a document that a script writes, each between two marker lines, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from environment import REPO, command_line


def begin(name: str) -> str:
    """The line before the part called ``name``."""
    return f"<!-- {name}: begin -->"


def end(name: str) -> str:
    """The line after it."""
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


def kept_up_to_date(
    pages: Mapping[Path, Callable[[str], str]],
    script: str,
    about: str | None,
    arguments: Sequence[str] | None,
) -> int:
    """The command of a script in ``docs/``: check its pages, or with ``--write`` write them.

    Args:
        pages: each page's path, and what makes the page as it should be from the page as it is.
        script: the script's file, for the line that says what to run.
        about: what its ``--help`` says.
        arguments: of its command line; None for this process's.

    Returns:
        The exit status: 1 if a page is out of date.
    """
    names = {page: page.relative_to(REPO) for page in pages}
    parser = command_line(about)
    written = ", ".join(map(str, names.values()))
    parser.add_argument("--write", action="store_true", help=f"write {written}")
    write = parser.parse_args(arguments).write
    outdated = False
    for page, wanted in pages.items():
        before = page.read_text()
        after = wanted(before)
        if write:
            page.write_text(after)
        elif after != before:
            command = Path(script).resolve().relative_to(REPO)
            print(f"{names[page]} is out of date: python3 {command} --write")
            outdated = True
    return int(outdated)


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
