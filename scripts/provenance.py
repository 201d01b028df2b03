"""Which state of the checkout a result is of."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from environment import REPO, SetupError


def commit() -> str:
    """The checkout's commit, with a mark if it has changes."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def commit_of(paths: Sequence[str]) -> str:
    """The last commit that changed one of these; ``-dirty`` if there are changes since."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=REPO, capture_output=True, text=True)
        if done.returncode:
            raise SetupError(f"git {command[0]} failed in {REPO}: {done.stderr.strip()}")
        return done.stdout.strip()

    commit = git("log", "-1", "--format=%h", "--abbrev=12", "--", *paths)
    changed = git("status", "--porcelain", "--", *paths)
    return f"{commit}-dirty" if changed else commit
