"""Parts of the documents that tests compare: samples of output, and names of tests."""

from __future__ import annotations

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
