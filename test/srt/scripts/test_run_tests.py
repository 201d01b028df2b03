"""``scripts/run_tests.py``: what pytest is called with."""

from __future__ import annotations

from pathlib import Path

import pytest

import run_tests
from environment import REPO, SetupError

FOLDERS = [str(run_tests.TESTS / folder) for folder in run_tests.FOLDERS]
TWO = [*run_tests.IN_TWO_PROCESSES]
GATE = "test/srt/unit/test_gate.py"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ([], [*TWO, *FOLDERS]),
        (["-k", "test"], [*TWO, "-k", "test", *FOLDERS]),
        (["-n", "4"], ["-n", "4", *FOLDERS]),
        (["-p", "no:xdist"], ["-p", "no:xdist", *FOLDERS]),
        ([GATE, "-k", "LoRA"], [GATE, "-k", "LoRA"]),
        ([f"{GATE}::test_servers"], [f"{GATE}::test_servers"]),
    ],
)
def test_everything_in_two_processes_unless_told_otherwise(
    typed: list[str], expected: list[str]
) -> None:
    named = any(GATE in argument for argument in typed)
    default = [] if named else [*run_tests.DEFAULT]
    assert run_tests.pytest_arguments(typed, ()) == expected
    assert run_tests.pytest_arguments(typed, run_tests.DEFAULT) == [*default, *expected]
    assert run_tests.pytest_arguments(typed, run_tests.QUICK) == [*run_tests.QUICK, *expected]


def test_every_folder_is_run() -> None:
    tests = Path(__file__).parents[1]
    assert {*run_tests.FOLDERS, "gpu"} == {path.parent.name for path in tests.glob("*/test_*.py")}


def test_what_is_optional_need_not_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on another architecture, or without a network."""
    wanted: list[list[str]] = []

    def install(uv: Path, python: Path, packages: list[str], log: Path) -> None:
        wanted.append(packages)
        raise SetupError("no matching distribution")

    monkeypatch.setattr(run_tests, "find_uv", lambda *_: tmp_path / "uv")
    monkeypatch.setattr(run_tests, "install", install)
    run_tests.install_optional(tmp_path, tmp_path / "python", tmp_path / "log")
    assert wanted == [[f"--group={REPO}/pyproject.toml:{run_tests.OPTIONAL}"]]
    assert "cannot be installed here" in capsys.readouterr().out
