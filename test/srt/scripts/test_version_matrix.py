"""The releases of SGLang: each place that names the newest one, and the try of one yet newer."""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import environment
import mode_table
import version_matrix
from sglang_gemma4_reference import cuda_branches, roles
from sglang_gemma4_yoco import compat, settings

NEWEST = str(compat.LAST_TESTED)
[OLDEST] = (
    specifier.version
    for requirement in map(Requirement, requires("sglang-gemma4-yoco") or ())
    if requirement.name == "sglang"
    for specifier in requirement.specifier
)
PAGES = [environment.REPO / "README.md", *(environment.REPO / "docs").rglob("*.md")]


def test_everything_names_the_same_newest_release() -> None:
    """CONTRIBUTING.md has the list of them; ``compat.LAST_TESTED`` is what decides."""
    assert environment.SGLANG_VERSION == NEWEST
    assert (version_matrix.VERSIONS[0], version_matrix.VERSIONS[-1]) == (OLDEST, NEWEST)
    assert mode_table.load()[2] == cuda_branches.SGLANG == roles.SGLANG == NEWEST
    assert f"ARG SGLANG=v{NEWEST}\n" in (environment.REPO / "Dockerfile").read_text()
    readme = (environment.REPO / "README.md").read_text()
    for words in (
        f"SGLang ({OLDEST} or later; tested with {OLDEST} to {NEWEST})",
        f"SGLang {NEWEST} accepts these attention backends",
        f"  sglang                {NEWEST}\n",
        f"`.venv` with SGLang {NEWEST}",
    ):
        assert words in readme


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_release_that_is_not_tested(page: Path) -> None:
    """Nor is a range of releases without the newest one left where it was."""
    text = page.read_text()
    named = set(re.findall(r"\b0\.5\.\d+\b", text))
    assert named <= {*version_matrix.VERSIONS}
    ends = re.findall(rf"SGLang {re.escape(OLDEST)} to (\S+\d)", text)
    assert {*ends} <= {NEWEST}


@pytest.mark.release
def test_a_served_prompt_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = Path(sys.executable)
    model = environment.make_checkpoint("E2B_TINY", tmp_path, tmp_path / "log")
    assert version_matrix.serve_a_prompt(python, model, tmp_path) == (None, None)
    off = settings.name_of("self_check")
    monkeypatch.setenv(off, "0")
    assert version_matrix.serve_a_prompt(python, model, tmp_path) == (f"{off}=0", None)
