"""Supported releases of SGLang: all places that name the newest one."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rehearsal import device
from scripts import environment
from scripts.dev import version_matrix
from scripts.result_files import load_results
from sglang_gemma4_reference import roles
from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.settings import name_of

UNTESTED = name_of("untested")
NEWEST = str(compat.release.LAST_TESTED)
[SGLANG] = (one for one in requires("sglang-gemma4-yoco") or () if one.startswith("sglang"))
[OLDEST] = (specifier.version for specifier in Requirement(SGLANG).specifier)
PAGES = [environment.REPO / "README.md", *(environment.REPO / "docs").rglob("*.md")]


def test_everything_names_the_same_newest_release() -> None:
    """``LAST_TESTED`` decides; for a new release change what fails here, one after another."""
    assert environment.SGLANG_VERSION == NEWEST
    assert (version_matrix.VERSIONS[0], version_matrix.VERSIONS[-1]) == (OLDEST, NEWEST)
    assert str(compat.release.FIRST_TESTED) == OLDEST
    assert device.SGLANG == roles.SGLANG == NEWEST
    assert f"ARG BASE=lmsysorg/sglang:v{NEWEST}\n" in (environment.REPO / "Dockerfile").read_text()
    model = environment.REPO / "deploy" / "kubernetes" / "model" / "kustomization.yaml"
    assert f"newTag: v{NEWEST}}}" in model.read_text()
    readme = (environment.REPO / "README.md").read_text()
    for words in (
        f"requires SGLang {OLDEST} or {NEWEST}.",
        f"SGLang {NEWEST} with Gemma 4:",
        f"`.venv`, with SGLang {NEWEST}",
        f"[Prefill CUDA graphs](docs/prefill_graphs.md) need {compat.release.FIRST_WITH_EXITS}",
    ):
        assert words in readme
    operating = (environment.REPO / "docs" / "operating.md").read_text()
    assert f"  sglang                {NEWEST}\n" in operating
    modes = (environment.REPO / "docs" / "modes.md").read_text()
    assert f"\nSGLang {NEWEST} fails in these cases" in modes


def test_supported_and_newer_releases_are_tried_each_week() -> None:
    workflow = (environment.REPO / ".github" / "workflows" / "releases.yml").read_text()
    [listed] = re.findall(r"sglang:\s+\[(.*)\]", workflow)
    names = [name.strip(' "') for name in listed.split(",")]
    assert names == [*version_matrix.VERSIONS, *environment.NEWEST]


@pytest.mark.parametrize("name", ["newest", "prerelease", NEWEST])
def test_an_untested_release_gets_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its tests would see stock without the setting."""
    command = list[object]()
    monkeypatch.setattr(version_matrix, "run", lambda *words: command.extend(words))
    version_matrix.try_release(name, tmp_path)
    assert command[0] == "env"
    assert (f"{UNTESTED}=1" in command) is (name != NEWEST)


@pytest.mark.parametrize("types", ["passed", "failed"])
def test_a_release_with_other_types_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: str
) -> None:
    """mypy runs in the release's environment, even if no test could run there."""
    python = tmp_path / OLDEST / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()

    def run(*command: object) -> bool:
        assert command[0] in ("env", python)
        return types == "passed" or command[0] == "env"

    monkeypatch.setattr(version_matrix, "run", run)
    found = version_matrix.try_release(OLDEST, tmp_path)
    assert (found["types"], found["failed"]) == (types, 0)
    saved = tmp_path / "saved.json"
    saved.write_text("[]")
    monkeypatch.setattr(version_matrix, "FILE", saved)
    monkeypatch.setattr(version_matrix, "try_release", lambda *_: {**found, "passed": 1})
    monkeypatch.setattr("sys.argv", ["version_matrix.py", OLDEST, f"--work-dir={tmp_path}"])
    assert version_matrix.main() == int(types == "failed")
    assert (saved.read_text() == "[]") is (types == "failed")


@pytest.mark.parametrize("name", version_matrix.FILES)
def test_the_matrix_runs_tests_that_exist(name: str) -> None:
    assert (environment.REPO / "test" / "srt" / name).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_release_that_is_not_tested(page: Path) -> None:
    """But that of a measurement. Nor does it name a range of releases without the newest one."""
    text = page.read_text()
    named = set(re.findall(r"\b0\.5\.\d+\b", text))
    measured = {document["sglang"] for document in load_results("gpu_*.json")}
    assert named <= {*version_matrix.VERSIONS} | measured
    ends = re.findall(rf"SGLang {re.escape(OLDEST)} to (\S+\d)", text)
    assert {*ends} <= {NEWEST}
