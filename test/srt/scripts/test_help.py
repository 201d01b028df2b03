"""``--help`` of every script, where nothing is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
#: Besides them there are modules that are imported.
RUN = [path for path in sorted(SCRIPTS.rglob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("script", RUN, ids=lambda path: path.name)
def test_help(script: Path, tmp_path: Path) -> None:
    """It states the script's purpose, needs nothing, and writes nothing."""
    command = [sys.executable, "-ISB", str(script), "--help"]
    env = os.environ | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first = done.stdout.partition("\n\n")[2].strip().splitlines()[0]
    assert first in script.read_text()
    assert list(tmp_path.iterdir()) == []
