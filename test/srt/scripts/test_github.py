"""Files of ``.github/``: pinned actions, the folders that CI runs, and what a report must have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from scripts import run_tests
from scripts.environment import REPO

WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
#: A tag can be moved to other code, a commit cannot. The comment names the tag of the commit.
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned(file: Path) -> None:
    """Those of this repository need not be."""
    for action in re.findall(r"\buses:\s*(.+)", file.read_text()):
        assert action.startswith("./") or PINNED.fullmatch(action)


def test_ci_runs_every_folder() -> None:
    """As ``.ci/run`` does, which runs ``FOLDERS``."""
    jobs = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert {*jobs["tests"]["strategy"]["matrix"]["folder"]} == {*run_tests.FOLDERS}


def test_the_template_asks_for_what_the_help_page_asks_for() -> None:
    page = (REPO / "docs" / "help.md").read_text()
    [section] = re.findall(r"^## What to attach to a report\n(.*)", page, re.MULTILINE | re.DOTALL)
    wanted = re.findall(r"^- (.+)[;.]$", section, re.MULTILINE)
    template = (REPO / ".github" / "ISSUE_TEMPLATE" / "report.md").read_text()
    asked = re.findall(r"^### (.+)$", template, re.MULTILINE)
    assert [words[0].lower() + words[1:] for words in asked] == wanted
