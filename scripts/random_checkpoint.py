"""Random checkpoints that are made once, and the directory where they are kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

from environment import REFERENCE, SetupError, run_logged, say


def make_checkpoint(preset: str, work_dir: Path, log: Path) -> Path:
    """Write a random checkpoint, or find the one that an earlier run wrote."""
    maker = REFERENCE / "sglang_gemma4_reference" / "checkpoint.py"
    digest = hashlib.sha256(maker.read_bytes()).hexdigest()[:8]
    path = work_dir / f"{preset}-{digest}"
    if path.exists():
        say(f"Random checkpoint of an earlier run: {path}")
        return path
    say(f"Making a random checkpoint, {preset}: {path}")
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    # By path: on a GPU machine the reference distribution is not installed, as it is a platform.
    env = os.environ | {"PYTHONPATH": str(REFERENCE)}
    command = [sys.executable, "-m", "sglang_gemma4_reference.checkpoint", preset]
    try:
        if not run_logged([*command, partial], log, env):
            raise SetupError("the checkpoint could not be made; its log says why.", log)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def make_work_dir(path: Path) -> None:
    """Make the directory for logs and checkpoint, and keep it out of version control."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".gitignore").write_text("*\n")
    except OSError as failure:
        raise SetupError(f"{path} cannot be written ({failure}): choose --work-dir.") from failure
