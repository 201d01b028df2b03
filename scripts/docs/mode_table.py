"""Make the tables of docs/modes.md from docs/modes.toml.

How far a proof goes is not written down but taken from the folders of the tests that are named.
Checks docs/modes.md, or with ``--write`` writes it; the exit status is 1 if it is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import REPO
from generated import inserted, kept_up_to_date, markdown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]  # pytest brings it along there

DATA = REPO / "docs" / "modes.toml"
PAGE = REPO / "docs" / "modes.md"

#: Folders of test/srt, by what they show; the strongest proof first.
LEVELS = {
    "real server": ("server",),
    "ModelRunner": ("triton", "forward"),
    "gate alone": ("unit",),
}
READ = "read, not run"


@dataclass(frozen=True)
class Mode:
    """A situation.

    Attributes:
        what: what becomes of a batch.
        shown_by: files and tests below test/srt.
        read: what nobody could run, and where it was read.
    """

    situation: str
    what: str
    shown_by: Sequence[str] = ()
    read: str = ""

    @property
    def levels(self) -> list[str]:
        """How far the proof goes.

        Raises:
            ValueError: a test lies in a folder of no level, or nothing shows it.
        """
        folders = {name.partition("/")[0] for name in self.shown_by}
        unknown = folders.difference(*LEVELS.values())
        if unknown or not (folders or self.read):
            raise ValueError(f"{self.situation!r}: shown by {sorted(unknown) or 'nothing'}")
        found = [level for level, of in LEVELS.items() if folders.intersection(of)]
        return found + [READ] * bool(self.read)


@dataclass(frozen=True)
class Unserved:
    """What SGLang does not serve.

    Attributes:
        file, line: where it stops, below sglang/srt.
        text: a piece of that line.
    """

    situation: str
    why: str
    file: str
    line: int
    text: str


def load(path: Path = DATA) -> tuple[list[Mode], list[Unserved], str]:
    """What is in the data file, and the release that its lines are of."""
    data = tomllib.loads(path.read_text())
    modes = [Mode(**entry) for entry in data["mode"]]
    return modes, [Unserved(**entry) for entry in data["unserved"]], data["release"]


def _names(tests: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in tests)


def modes_table(modes: Sequence[Mode]) -> str:
    """The table of all situations."""
    rows = (
        (
            mode.situation,
            mode.what,
            ", ".join(mode.levels),
            "; ".join(filter(None, (_names(mode.shown_by), mode.read))),
        )
        for mode in modes
    )
    return markdown(("situation", "what happens", "shown on", "by"), rows)


def unserved_table(unserved: Sequence[Unserved], release: str) -> str:
    """The table of what SGLang does not serve."""
    rows = ((u.situation, u.why, f"`{u.file}:{u.line}`") for u in unserved)
    return markdown(("what", "why", f"where, in {release}"), rows)


def written(page: str) -> str:
    """``page`` with both tables as the data has them."""
    modes, unserved, release = load()
    page = inserted(page, "modes", modes_table(modes))
    return inserted(page, "unserved", unserved_table(unserved, release))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the page, or write it; 1 if it is not as the data has it."""
    return kept_up_to_date({PAGE: written}, __file__, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
