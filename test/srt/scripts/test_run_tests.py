"""``scripts/run_tests.py``: what pytest is called with."""

from __future__ import annotations

from pathlib import Path

import pytest

import run_tests

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
