"""Tests that wait for a GPU, where they can run without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_gemma4_reference import releases

REPO = Path(__file__).resolve().parents[3]
FOLDER = REPO / "test" / "srt" / "gpu"


def run(path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(path)]
    env = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=env, cwd=REPO, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.release
@pytest.mark.skipif(
    not releases.records_prefills(), reason="tried with the prefill graphs of SGLang 0.5.23"
)
def test_prefill_replays() -> None:
    done = run(FOLDER / "test_prefill_replays.py", YOCO_TEST_GPU="cpu")
    output = done.stdout[-6000:] + done.stderr[-2000:]
    assert done.returncode == 0, output
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, output
    assert int(passed[1]) > 25, output
