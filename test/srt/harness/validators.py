"""Programs that build the package, or check files of ``deploy/`` and ``docs/monitoring/``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def find(program: str) -> Path:
    """Return the path of a program: beside this interpreter, or else on the PATH.

    A test that needs a missing one fails, because a skipped check looks like a passed one.
    """
    beside = Path(sys.executable).parent
    found = shutil.which(program, path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        remedy = "without apt-get put it on the PATH"
        pytest.fail(f"{program} is not installed: run scripts/run_tests.py once; {remedy}")
    return Path(found)


def run(*command: str | Path) -> str:
    """Run a program, which must succeed without a warning, and return what it printed."""
    done = subprocess.run([find(str(command[0])), *command[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr
    return done.stdout
