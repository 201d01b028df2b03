"""Files of ``.github/``: pinned actions, the folders that CI runs, and what a report must have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import run_tests
from scripts.environment import REPO

WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
#: A tag can be moved to other code, a commit cannot. The comment names the tag of the commit.
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def find_unpinned(workflow: str) -> list[str]:
    """Return the actions that are not pinned to a commit; those of this repository need not be."""
    actions = re.findall(r"\buses:\s*(.+)", workflow)
    return [one for one in actions if not (one.startswith("./") or PINNED.fullmatch(one))]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned(file: Path) -> None:
    assert find_unpinned(file.read_text()) == []


def test_an_unpinned_action_is_seen() -> None:
    commit = "0123456789" * 4
    for action in ("a/b@v4", f"a/b@{commit}", f"a/b@{commit[:7]} # v4.4.0", f"a/b@{commit} # v4"):
        assert find_unpinned(f"- uses: {action}\n") == [action]
    assert not find_unpinned(f"- uses: a/b@{commit} # v4.4.0\n- uses: ./here\n")


def test_ci_runs_every_folder() -> None:
    """As ``.ci/run`` does, which runs ``FOLDERS``."""
    jobs: Any = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert {*jobs["tests"]["strategy"]["matrix"]["folder"]} == {*run_tests.FOLDERS}


def test_the_template_asks_for_what_the_help_page_asks_for() -> None:
    page = (REPO / "docs" / "help.md").read_text()
    [section] = re.findall(r"^## What to attach to a report\n(.*)", page, re.MULTILINE | re.DOTALL)
    wanted = re.findall(r"^- (.+)[;.]$", section, re.MULTILINE)
    template = (REPO / ".github" / "ISSUE_TEMPLATE" / "report.md").read_text()
    asked = re.findall(r"^### (.+)$", template, re.MULTILINE)
    assert [words[0].lower() + words[1:] for words in asked] == wanted
