"""``scripts/run_tests.py``: its folders, its checks, and the tests that it starts for a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts import run_tests

PREFILL_REPLAYS = Path(__file__).parents[1] / "gpu" / "test_prefill_replays.py"


def test_every_folder_is_run() -> None:
    tests = Path(__file__).parents[1]
    assert {*run_tests.FOLDERS, "gpu"} == {path.parent.name for path in tests.glob("*/test_*.py")}


@pytest.mark.parametrize("failing", ["ruff", "clang-format", "scripts/dev/package_types.py", ""])
def test_nothing_else_runs_after_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The package's types are checked before any test, and mypy's other run is beside the tests."""
    checks, beside = list[str](), list[Sequence[object]]()

    def check(*command: object) -> bool:
        checks.append(" ".join(map(str, command)))
        return not failing or failing not in checks[-1]

    def count(*commands: Sequence[object]) -> bool:
        beside.extend(commands)
        return True

    monkeypatch.setattr(sys, "argv", ["run_tests.py", "--lint", "--quick"])
    monkeypatch.setattr(run_tests, "prepare", lambda *_, **__: Path("bin/python"))
    monkeypatch.setattr(run_tests, "run", check)
    monkeypatch.setattr(run_tests, "run_beside", count)
    assert run_tests.main() == int(bool(failing))
    assert failing in checks[-1]
    if failing:
        assert not beside
        return
    assert checks[-1].endswith("scripts/dev/package_types.py")
    assert [command[2] for command in beside] == ["mypy", "pytest"]


def _exit_with(status: int, words: str) -> list[str]:
    return [sys.executable, "-c", f"print({words!r}); raise SystemExit({status})"]


@pytest.mark.parametrize(("mypy", "tests"), [(0, 0), (1, 0), (0, 1)])
def test_either_command_may_fail(mypy: int, tests: int, capfd: pytest.CaptureFixture[str]) -> None:
    passed = run_tests.run_beside(_exit_with(mypy, "silent one"), _exit_with(tests, "shown one"))
    assert passed is (mypy == tests == 0)
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("$ ")] == ["shown one", "silent one"]


@pytest.mark.release
def test_tests_that_wait_for_a_gpu_run_without_one() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(PREFILL_REPLAYS)]
    env = {**os.environ, "YOCO_TEST_GPU": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    output = done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert (done.returncode, passed is not None and int(passed[1]) >= 25) == (0, True), output
