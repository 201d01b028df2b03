"""``scripts/run_tests.py``: its folders, and the tests that it starts for a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import run_tests
from sglang_gemma4_reference import releases

PREFILL_REPLAYS = Path(__file__).parents[1] / "gpu" / "test_prefill_replays.py"


def test_every_folder_is_run() -> None:
    tests = Path(__file__).parents[1]
    assert {*run_tests.FOLDERS, "gpu"} == {path.parent.name for path in tests.glob("*/test_*.py")}


@pytest.mark.release
@pytest.mark.skipif(not releases.records_prefills(), reason="needs SGLang 0.5.23's prefill graphs")
def test_tests_that_wait_for_a_gpu_run_without_one() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(PREFILL_REPLAYS)]
    env = {**os.environ, "YOCO_TEST_GPU": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    output = done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert (done.returncode, passed is not None and int(passed[1]) >= 25) == (0, True), output
