#!/usr/bin/env python3
"""Were the files in benchmark/results made with the current code? Its README says so.

A result file has a digest of the package's sources that it was made with; older files have only a
commit. Checks benchmark/results/README.md, or with ``--write`` writes it; the exit status is 1 if
it is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import REPO, package_of
from generated import inserted, kept_up_to_date, markdown

RESULTS = REPO / "benchmark" / "results"
PAGE = RESULTS / "README.md"
PART = "of which package"


def ages(results: Mapping[str, Any], package: str) -> str:
    """A table: each file of results, by name, and whether ``package`` made it."""
    rows = []
    for name, document in sorted(results.items()):
        parts = document if isinstance(document, list) else [document]  # one for each release
        commits = sorted({part["commit"] for part in parts})
        same = all(part.get("package") == package for part in parts)
        commit = ", ".join(f"`{commit}`" for commit in commits)
        rows.append((f"`{name}`", commit, "yes" if same else "no, with earlier code"))
    return markdown(("results", "commit", "made with the current code"), rows)


def written(page: str) -> str:
    """``page`` with the table as the files have it."""
    results = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    return inserted(page, PART, ages(results, package_of()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the page, or write it; 1 if it is not as the files have it."""
    return kept_up_to_date({PAGE: written}, __file__, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
