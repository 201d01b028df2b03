"""Result files: their origin, and how they are written and read."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.command_line import command_without_secrets
from scripts.environment import REPO
from sglang_gemma4_yoco.commands.console import say

RESULTS = REPO / "benchmark" / "results"
PREDICTED = RESULTS.with_name("predicted.json")
#: Name of the simulated GPU (test/srt/rehearsal): nothing is measured there.
REHEARSAL = "rehearsal"


def device_name(device: str) -> str:
    """Return the GPU's name, or a CPU with its number of cores."""
    if device == "cpu":
        return f"cpu ({os.cpu_count()} cores)"
    import torch

    return torch.cuda.get_device_name()


def origin() -> dict[str, str]:
    """Return the origin of a result: command, commit, date, machine and release of SGLang."""
    command = command_without_secrets(["python", *sys.argv])
    about = {"machine": platform.machine(), "sglang": version("sglang")}
    return {"command": command, **checkout(), **about}


def begin_result(model: str, device: str, dtype: str) -> dict[str, Any]:
    """Return a result before any measurement: its origin, the model and the device."""
    about = {"model": model, "device": device_name(device), "dtype": dtype}
    return origin() | about


def checkout() -> dict[str, str]:
    """Return date and last commit, with ``-dirty`` if anything but measurements has changed."""

    def git(*command: str) -> str:
        words = ("git", *command, "--", ".", ":(exclude)benchmark")
        return subprocess.run(words, cwd=REPO, capture_output=True, text=True).stdout.strip()

    commit = git("log", "-1", "--format=%h", "--abbrev=12") or "unknown"
    if git("status", "--porcelain"):
        commit += "-dirty"
    return {"commit": commit, "date": time.strftime("%Y-%m-%d")}


def load_results(pattern: str) -> list[dict[str, Any]]:
    """Return the result files whose names match, each with its name as ``file``."""
    found = []
    for path in sorted(RESULTS.glob(pattern)):
        found.append(json.loads(path.read_text()) | {"file": path.name})
    return found


def load_predictions() -> Any:
    """Return the file that ``bench/predict.py`` writes."""
    return json.loads(PREDICTED.read_text())


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def write_result(path: Path | None, document: dict[str, Any]) -> str:
    """Write a result to a file, if one was given; return it as the line to print."""
    line = json.dumps(document)
    if document.get("device") == REHEARSAL:
        say(f"This is a rehearsal: nothing was measured, and {path} is not written.", sys.stderr)
    elif path is not None:
        write_whole(path, line + "\n")
    return line
