"""``scripts/run_tests.py``: pytest's arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import run_tests
from sglang_gemma4_reference import releases

FOLDERS = [f"test/srt/{folder}" for folder in run_tests.FOLDERS]
TWO = [*run_tests.IN_TWO_PROCESSES]
DEFAULT, QUICK = [*run_tests.DEFAULT], [*run_tests.QUICK]
GATE = "test/srt/unit/test_gate.py"
PREFILL_REPLAYS = Path(__file__).parents[1] / "gpu" / "test_prefill_replays.py"
REPO = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ([], [*DEFAULT, *TWO, *FOLDERS]),
        (["--all"], [*TWO, *FOLDERS]),
        (["--quick"], [*QUICK, *TWO, *FOLDERS]),
        (["--gpu"], [*run_tests.GPU]),
        (["--", "-k", "test"], [*DEFAULT, *TWO, "-k", "test", *FOLDERS]),
        (["--quick", "--", f"{GATE}::test_servers"], [*QUICK, f"{GATE}::test_servers"]),
    ],
)
def test_everything_in_two_processes_unless_told_otherwise(
    typed: list[str], expected: list[str]
) -> None:
    assert run_tests.pytest_arguments(run_tests.parse_arguments(typed)) == expected


def test_every_folder_is_run() -> None:
    tests = Path(__file__).parents[1]
    assert {*run_tests.FOLDERS, "gpu"} == {path.parent.name for path in tests.glob("*/test_*.py")}


# The platform's distribution is not installed where there is a GPU.
WITHOUT_REFERENCE = """
import sys, pytest
sys.meta_path[:] = [each for each in sys.meta_path if "reference" not in each.__module__]
sys.exit(pytest.main(["-q", "-c", "pyproject.toml", "--noconftest", *sys.argv[1:]]))
"""


def test_a_gpus_tests_find_the_reference_that_is_not_installed_there(tmp_path: Path) -> None:
    file = tmp_path / "test_import.py"
    file.write_text("def test_it():\n    import sglang_gemma4_reference\n")
    for options, status in (((), 1), (run_tests.GPU[:-1], 0)):
        command = [sys.executable, "-c", WITHOUT_REFERENCE, *options, str(file)]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr


@pytest.mark.release
@pytest.mark.skipif(not releases.records_prefills(), reason="with prefill graphs of SGLang 0.5.23")
def test_tests_that_wait_for_a_gpu_run_without_one() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(PREFILL_REPLAYS)]
    env = {**os.environ, "YOCO_TEST_GPU": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    output = done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert (done.returncode, passed is not None and int(passed[1]) >= 25) == (0, True), output
