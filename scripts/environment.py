"""The virtual environment of the demo and of the tests, also for a machine without uv.

``pyproject.toml`` has its packages. With uv, in your own environment,
``uv pip install -e . --group dev`` does the same. Standard library only.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from sglang_gemma4_yoco.commands.console import CommandError, say

REPO = Path(__file__).resolve().parent.parent
SetupError = CommandError
SGLANG_VERSION = "0.5.23"
#: A range that names a pre-release admits pre-releases, of SGLang alone.
NEWEST = {"newest": f"sglang>={SGLANG_VERSION}", "prerelease": f"sglang>{SGLANG_VERSION}.dev0"}


def run(*command: str | Path) -> bool:
    """Run a command in the repository; return True if it succeeded."""
    say(f"$ {shlex.join(map(str, command))}")
    return subprocess.run(command, cwd=REPO, check=False).returncode == 0


def find_uv(venv: Path) -> Path:
    """Return the uv to install with: the environment's, the machine's, or one that pip installs."""
    own, python = venv / "bin" / "uv", venv / "bin" / "python"
    if own.exists():
        return own
    if on_path := shutil.which("uv"):
        return Path(on_path)
    for pip in ((python, "-m", "pip"), (sys.executable, "-m", "pip", "--python", python)):
        if run(*pip, "install", "-q", "uv"):
            return own
    raise SetupError("uv could not be installed: is there a pip, and a network?")


def prepare(venv: Path, *, sglang: str, group: str = "cpu") -> Path:
    """Install a release of SGLang, or one of ``NEWEST``; return the environment's interpreter."""
    venv = venv.expanduser().absolute()
    python, create = venv / "bin" / "python", (sys.executable, "-m", "venv", venv)
    if not (venv / "pyvenv.cfg").exists():
        if venv.exists() and any(venv.iterdir()):
            raise SetupError(f"{venv} is not a virtual environment: choose another, --venv")
        # Debian's python3 has no ensurepip without python3-venv; its own pip may be there.
        if not run(*create) and not run(*create, "--without-pip"):
            raise SetupError("this Python makes no environments (Debian: apt install python3-venv)")
    free = shutil.disk_usage(venv).free
    if free < 12e9 and not any(venv.glob("lib/*/site-packages/sglang")):
        raise SetupError(f"{venv} has {free / 1e9:.1f} GB of free disk, and SGLang needs about 12")
    release = NEWEST.get(sglang, f"sglang=={sglang}")
    # Editable, so that an older environment follows the checkout.
    packages = (release, "-e", REPO, f"--group={group}")
    if run(find_uv(venv), "pip", "install", "--python", python, *packages):
        return python
    advice = "network and proxy; another Python (3.11 or later), or another --sglang-version"
    raise SetupError(f"this could not be installed: try {advice}. What was installed is kept.")
