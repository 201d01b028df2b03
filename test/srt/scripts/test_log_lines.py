"""Every line that the package can log is explained in docs/log.md, and no other is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import sglang_gemma4_yoco

REPO = Path(__file__).resolve().parents[3]
PACKAGE = Path(sglang_gemma4_yoco.__file__).parent
# A call of one of these logs its first argument; ``Logger.log`` has the level before it.
LOGGING = {"log_once", "log_error", "log_failure", "info", "warning", "error", "log"}
FORMAT = re.compile(r"%[sr]")


def text_of(line: ast.expr) -> str:
    """A line with ``...`` for whatever is put into it."""
    if isinstance(line, ast.Constant) and isinstance(line.value, str):
        return FORMAT.sub("...", line.value)
    if isinstance(line, ast.JoinedStr):
        return "".join(map(text_of, line.values))
    return "..."


def lines_of(source: str) -> Iterator[str]:
    """The lines that a file logs."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else None
        if isinstance(function, ast.Name):
            name = function.id
        place = int(name == "log")  # ``math.log`` has one argument
        if name in LOGGING and len(call.args) > place:
            line = text_of(call.args[place])
            if line.strip(". :"):  # else the line comes from the caller
                yield line


def documented() -> list[str]:
    page = (REPO / "docs" / "log.md").read_text()
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


def test_every_line_is_documented() -> None:
    said: set[str] = set()
    for path in PACKAGE.glob("**/*.py"):
        if path.parent.name != "commands":  # they run in no server, and log nothing
            said.update(lines_of(path.read_text()))
    assert len(said) > 12
    listed = documented()
    assert len(listed) == len(set(listed))
    assert said == set(listed)
