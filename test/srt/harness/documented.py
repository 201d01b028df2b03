"""What tests compare with the documents: samples of output, names of tests, the package's texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
OPERATING = TESTS.parents[1] / "docs" / "operating.md"


def sample(name: str) -> str:
    """Return the sample between the marker lines of this name."""
    part = rf"<!-- sample of {name}: begin -->\n```text\n(.*?)\n```\n<!-- sample"
    [found] = re.findall(part, OPERATING.read_text(), re.DOTALL)
    return str(found)


def missing_tests(names: Iterable[str]) -> list[str]:
    """Return the files and tests that do not exist below ``test/srt``; ``*`` ends a name."""
    missing = []
    for name in names:
        file, _, test = name.partition("::")
        path, pattern = TESTS / f"{file}.py", "^def test_"
        if test:
            pattern = rf"^ *def {re.escape(test)}\(".replace(r"\*", r"\w*")
        if not path.is_file() or not re.search(pattern, path.read_text(), re.MULTILINE):
            missing.append(name)
    return missing


def text_of(line: ast.expr) -> str:
    """Return a literal with ``...`` for its variable parts."""
    if isinstance(line, ast.Constant) and isinstance(line.value, str):
        return re.sub("%[sr]", "...", line.value)
    if isinstance(line, ast.JoinedStr):
        return "".join(map(text_of, line.values))
    return "..."


def constants_of(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the values of a file's own names."""
    assigned = [statement for statement in tree.body if isinstance(statement, ast.Assign)]
    return {ast.unparse(each.targets[0]): each.value for each in assigned}
