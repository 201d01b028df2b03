"""The virtual environment of the demo and of the tests, also for a machine without uv.

``pyproject.toml`` has its packages. With uv, in your own environment,
``uv pip install -e . --group dev`` does the same. Standard library only.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang_gemma4_yoco.commands.console import CommandError, say

REPO = Path(__file__).resolve().parent.parent
#: For ``sys.path``: where the tests' harness is.
HARNESS = str(REPO / "test" / "srt")
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
    raise SetupError("uv could not be installed: check pip and the network, or install uv yourself")


def add_promtool(venv: Path) -> None:
    """Put Debian's or Ubuntu's promtool into an environment, unless there is one.

    Without apt-get, or without a network, nothing happens: the tests that need promtool then fail,
    and name the remedy. Installing the package would need root, and would start a daemon.
    """
    if shutil.which("promtool") or (venv / "bin" / "promtool").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        # The machine's lists of packages may be missing or old, and only root can update them.
        apt = f"apt-get -qq -o Dir::State::Lists={folder}"
        get = f"cd {folder} && {apt} update && {apt} download prometheus && dpkg -x *.deb ."
        run("sh", "-c", f"{get} && install usr/bin/promtool {shlex.quote(str(venv))}/bin")


def prepare(venv: Path, *, sglang: str, group: str = "cpu") -> Path:
    """Make or reuse the environment ``venv``, and install SGLang and this package in it.

    Args:
        sglang: a release, or a key of ``NEWEST``.

    Returns:
        The environment's interpreter.

    Raises:
        SetupError: it cannot be made, or something cannot be installed.
    """
    venv = venv.expanduser().absolute()
    python, create = venv / "bin" / "python", (sys.executable, "-m", "venv", venv)
    if not (venv / "pyvenv.cfg").exists():
        if venv.exists() and any(venv.iterdir()):
            raise SetupError(f"{venv} is not a virtual environment: choose another one with --venv")
        # Debian's python3 has no ensurepip without python3-venv; its own pip may be there.
        if not run(*create) and not run(*create, "--without-pip"):
            raise SetupError(f"{sys.executable} -m venv failed (Debian: apt install python3-venv)")
    free = shutil.disk_usage(venv).free
    if free < 12e9 and not any(venv.glob("lib/*/site-packages/sglang")):
        raise SetupError(f"{venv} has {free / 1e9:.1f} GB of free disk, and SGLang needs about 12")
    release = NEWEST.get(sglang, f"sglang=={sglang}")
    # Editable, so that an older environment follows the checkout.
    packages = (release, "-e", REPO, f"--group={group}")
    if run(find_uv(venv), "pip", "install", "--python", python, *packages):
        if group == "dev":
            add_promtool(venv)
        return python
    raise SetupError(
        f"{release} could not be installed; what was installed is kept. Check network and proxy; "
        "else try another --sglang-version or Python (3.11 or later)."
    )
