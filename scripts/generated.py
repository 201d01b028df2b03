"""The parts of a document that a script writes, each between two marker lines, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from scripts.command_line import new_parser
from scripts.environment import REPO


def inserted(document: str, name: str, content: str) -> str:
    """``document`` with ``content`` as its part called ``name``.

    Raises:
        ValueError: the part's markers are not there.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, first, rest = document.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"there are no lines {begin} and {end}")
    return f"{before}{first}\n{content.rstrip()}\n{last}{after}"


#: A page: what makes each of its parts, by the part's name. The part "" is the whole file.
Parts = Mapping[str, Callable[[], str]]


def kept_up_to_date(
    pages: Mapping[Path, Parts], script: str, about: str | None, arguments: Sequence[str] | None
) -> int:
    """The command of a script in ``docs/``: check its pages, or with ``--write`` write them.

    Args:
        script: the script's file, for the line that says what to run.
        about: what its ``--help`` says.
        arguments: of its command line; None for this process's.

    Returns:
        The exit status: 1 if a page is out of date.
    """
    parser = new_parser(about)
    names = ", ".join(str(page.relative_to(REPO)) for page in pages)
    parser.add_argument("--write", action="store_true", help=f"write {names}")
    write = parser.parse_args(arguments).write
    outdated = False
    for page, parts in pages.items():
        before = after = page.read_text()
        for name, made in parts.items():
            after = inserted(after, name, made()) if name else made()
        if write:
            page.write_text(after)
        elif after != before:
            command = Path(script).resolve().relative_to(REPO)
            print(f"{page.relative_to(REPO)} is out of date: python3 {command} --write")
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
