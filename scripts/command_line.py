"""Shared parts of the scripts' command lines: flags, messages, folders, random checkpoints."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.environment import REPO, SetupError
from sglang_gemma4_yoco.commands.console import say
from sglang_gemma4_yoco.commands.redact import learn_secrets, redact, show_flags

REFERENCE = REPO / "test" / "reference"


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Help that keeps the lines of the description, and shows defaults."""


def new_parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser whose ``--help`` shows ``about`` unchanged, and the defaults.

    Keys of the environment are redacted in all later output. The parser accepts no abbreviated
    flags, since the demo passes flags that it does not know on to ``verify``.
    """
    learn_secrets([])
    return argparse.ArgumentParser(description=about, formatter_class=_Help, allow_abbrev=False)


def command_without_secrets(words: Sequence[str]) -> str:
    """Return a script's command line for a shell, and redact its secrets in all later output.

    A script's own flags have none. A server's flags follow ``--``.
    """
    end = words.index("--") + 1 if "--" in words else len(words)
    of_server = words[end:]
    learn_secrets(of_server)
    command: str = redact(f"{shlex.join(words[:end])} {show_flags(of_server)}".rstrip())
    return command


def heading(text: str) -> None:
    """Begin a new part of the output."""
    say(f"\n== {text}")


def failed(failure: Exception) -> int:
    """Print why a command cannot continue; return its exit status, 2."""
    say(f"error: {failure}", sys.stderr)
    return 2


def make_work_dir(path: Path) -> Path:
    """Make the folder for logs and checkpoints, ignored by git; return its absolute path.

    Raise ``SetupError`` if it cannot be written.
    """
    path = path.expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".gitignore").write_text("*\n")
    except OSError as failure:
        raise SetupError(f"--work-dir cannot be written, choose another: {failure}") from failure
    return path


def make_log_dir(work_dir: Path) -> Path:
    """Make and return a new folder for the logs of this run."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    logs = make_work_dir(work_dir) / "logs" / name
    logs.mkdir(parents=True)
    return logs


def make_checkpoint(preset: str, work_dir: Path, *, weights: bool = True) -> Path:
    """Return the folder of a random checkpoint, written now or by an earlier run.

    Raise ``SetupError`` if it cannot be made.
    """
    maker = REFERENCE / "sglang_gemma4_reference" / "checkpoint.py"
    digest = hashlib.sha256(maker.read_bytes()).hexdigest()[:8]
    path = work_dir / f"{preset}-{digest}"
    command = [sys.executable, "-m", "sglang_gemma4_reference.checkpoint", preset]
    if not weights:
        path = path.with_name(f"{path.name}-no-weights")
        command.append("--no-weights")
    if path.exists():
        say(f"Random checkpoint of an earlier run: {path}")
        return path
    say(f"Making a random checkpoint, {preset}: {path}")
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        done = subprocess.run([*command, str(partial)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetupError(f"the random checkpoint {preset} could not be made:\n{done.stderr}")
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path
