"""Log lines of the package and docs/log.md, which must agree.

Reasons and outcomes that other pages quote must be in the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_gemma4_yoco
from harness.documented import constants_of, text_of
from scripts.environment import REPO
from sglang_gemma4_yoco import counters, metrics
from sglang_gemma4_yoco.admission import arguments
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.prefill_exits import graph_exits
from sglang_gemma4_yoco.refusal import SERVER_UNSUPPORTED, Refusal

PACKAGE = Path(sglang_gemma4_yoco.__file__).parent
# A call of one of these logs its first argument; ``Logger.log`` has the level before it.
LOGGING = {"log_once", "log_warning", "log_error", "log_failure", "info", "warning", "error", "log"}
LOGGING |= {"guarded", "_call_after"}  # where something fails


TREES = [ast.parse(path.read_text()) for path in PACKAGE.glob("**/*.py")]


def lines_of(tree: ast.Module) -> Iterator[str]:
    """Yield the lines that a file logs, as literals or by a name of the file."""
    constants = constants_of(tree)
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
        place = int(name == "log")  # ``math.log`` has one argument
        if name in LOGGING and len(call.args) > place:
            line = text_of(constants.get(ast.unparse(call.args[place]), call.args[place]))
            if line.strip(". :"):  # else the line comes from the caller
                yield line


def documented() -> list[str]:
    page = (REPO / "docs" / "log.md").read_text()
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


def test_every_line_is_documented() -> None:
    said = {line for tree in TREES for line in lines_of(tree)}
    assert len(said) > 12
    listed = documented()
    assert len(listed) == len(set(listed))
    assert said == set(listed)


# ---------------------------------------------------------------- reasons and outcomes


def texts_in_the_package() -> str:
    """Return all string literals, one a line, with ``...`` for their variable parts."""
    found = []
    for tree in TREES:
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                found.append(text_of(node))
    return "\n".join(found)


def quotes_in(page: str, after: str) -> list[str]:
    """Return the quotes in the first column of the first table after some words of a page."""
    text = (REPO / "docs" / page).read_text()
    assert text.count(after) == 1, after
    table = re.search(r"(?:^\|.*\n)+", text.partition(after)[2], re.MULTILINE)
    assert table is not None
    quotes = []
    for row in table[0].splitlines()[2:]:
        cell, _, _ = row.partition(" | ")
        quotes += re.findall(r"`([^`]+)`", cell)
    assert quotes
    return quotes


@pytest.mark.parametrize("after", ['## `status` prints "NOT active"', "## `status` gets no answer"])
def test_reasons_that_are_explained_can_be_given(after: str) -> None:
    said = texts_in_the_package()
    for quote in quotes_in("not_active.md", after):
        for part in quote.split("..."):
            assert part.strip(" ,") in said, quote


@pytest.mark.parametrize(
    ("page", "after"),
    [
        ("operating.md", "Non-finite numbers are strings"),
        ("slower.md", "## Active, but not faster"),
    ],
)
def test_outcomes_that_are_explained_are_counted(page: str, after: str) -> None:
    counted = {SERVER_UNSUPPORTED, arguments.UNTESTED_RELEASE}
    counted |= {counters.FAILED, counters.UNSEEN, *counters.CUT}
    for value in (*vars(eligibility).values(), *vars(graph_exits).values()):
        if isinstance(value, Refusal):
            counted.add(metrics.make_label(value))
    assert {*quotes_in(page, after)} <= counted
