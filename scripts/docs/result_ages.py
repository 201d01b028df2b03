#!/usr/bin/env python3
"""Are the results in benchmark/results of the package as it is? benchmark/README.md says so.

A result file names the package that it was made with, by a digest of its sources; older files name
a commit alone. Checks benchmark/README.md, or writes it; the exit status is 1 if it is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import REPO, package_of
from generated import inserted, markdown

PAGE = REPO / "benchmark" / "README.md"
RESULTS = REPO / "benchmark" / "results"
PART = "of which package"


def ages(results: Mapping[str, Any], package: str) -> str:
    """A table: each file of results, by name, and whether it is of ``package``."""
    rows = []
    for name, document in sorted(results.items()):
        parts = document if isinstance(document, list) else [document]  # one for each release
        commits = sorted({part["commit"] for part in parts})
        same = all(part.get("package") == package for part in parts)
        commit = ", ".join(f"`{commit}`" for commit in commits)
        rows.append((f"`{name}`", commit, "yes" if same else "no, an earlier one"))
    return markdown(("results", "commit", "of the package as it is"), rows)


def written(page: str) -> str:
    """``page`` with the table as the files have it."""
    results = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    return inserted(page, PART, ages(results, package_of()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the page, or write it; 1 if it is not as the files have it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write benchmark/README.md")
    args = parser.parse_args(arguments)
    page = PAGE.read_text()
    wanted = written(page)
    if args.write:
        PAGE.write_text(wanted)
        return 0
    if page != wanted:
        print("benchmark/README.md is out of date: python3 scripts/docs/result_ages.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
