"""Files of results: where a measurement comes from, and what is written of it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.command_line import command_without_secrets
from scripts.environment import REPO
from sglang_gemma4_yoco.commands.console import say

RESULTS = REPO / "benchmark" / "results"
#: What a GPU without a GPU is called (test/srt/rehearsal): nothing is measured there.
REHEARSAL = "rehearsal"


def device_name(device: str) -> str:
    """What is measured on: the GPU's name, or a CPU with so many cores."""
    if device == "cpu":
        return f"cpu ({os.cpu_count()} cores)"
    import torch

    name: str = torch.cuda.get_device_name()
    return name


def origin() -> dict[str, str]:
    """Where a result comes from: command, commit, package and machine."""
    return {
        "command": command_without_secrets(["python", *sys.argv]),
        "commit": commit(),
        "package": package_of(),
        "machine": platform.machine(),
    }


def begin_result(model: str, device: str, dtype: str) -> dict[str, Any]:
    """A result before anything is measured: where it comes from, and what SGLang serves on what."""
    about = {"model": model, "device": device_name(device), "dtype": dtype}
    return {**origin(), **about, "sglang": version("sglang")}


def commit() -> str:
    """The checkout's last commit, with ``-dirty`` if more than measurements has changed since."""

    def git(*command: str) -> str:
        words = ("git", *command, "--", ".", ":(exclude)benchmark")
        return subprocess.run(words, cwd=REPO, capture_output=True, text=True).stdout.strip()

    found = git("log", "-1", "--format=%h", "--abbrev=12") or "unknown"
    if git("status", "--porcelain"):
        found += "-dirty"
    return found


def package_of(folder: Path = REPO / "sglang_gemma4_yoco") -> str:
    """What the package in ``folder`` is, in twelve digits, committed or not; data files count."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        content = path.read_bytes()
        found.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:12]


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step: who reads it meanwhile finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def write_result(path: Path | None, document: dict[str, Any]) -> str:
    """Write a result to a file, if one is asked for; return it as the line that is printed."""
    line = json.dumps(document)
    if document.get("device") == REHEARSAL:
        say(f"This is a rehearsal: nothing was measured, and {path} is not written.", sys.stderr)
    elif path is not None:
        write_whole(path, line + "\n")
    return line
