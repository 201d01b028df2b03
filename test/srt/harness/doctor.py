"""Calls of ``doctor`` in a process that has SGLang imported already."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import forked

# ``calls`` and ``found``, the file for the answers, are defined before it.
_CALLS = """
import contextlib, io, json, sys
from sglang_gemma4_yoco.commands.main import main
touched, answers = [], []
def hook(event, args):
    if event in ("socket.bind", "os.mkdir"):
        touched.append([event, str(args)])
for argv in calls:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    answers.append({"status": status, "out": out.getvalue(), "err": err.getvalue()})
    if not touched:
        sys.addaudithook(hook)  # from the second on: SGLang's caches are there
        touched.append("watched")
import torch
cuda = torch.cuda.is_initialized()
with open(found, "w") as file:
    json.dump({"answers": answers, "touched": touched[1:], "cuda": cuda}, file)
"""


@dataclass(frozen=True)
class Answer:
    """Output of one call of the command line."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Return the document of --json: the last line."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


def environment(**changed: str) -> dict[str, str]:
    """Return this process's environment; of the package's variables, only those in ``changed``."""
    others = {name for name in os.environ if not name.startswith("SGLANG_GEMMA4_YOCO")}
    return {name: os.environ[name] for name in others} | changed


def doctor(
    directory: Path, *calls: Sequence[str], **variables: str
) -> tuple[list[Answer], dict[str, Any]]:
    """Call the command several times, in one process that has SGLang imported already.

    Returns:
        Their answers, and the document that ``_CALLS`` has written.
    """
    found, log = directory / "answers.json", directory / "output"
    begin = f"calls, found = {[['doctor', *call] for call in calls]!r}, {str(found)!r}\n"
    where: Any = {"cwd": directory, "env": environment(**variables), "log": log}
    assert forked.as_this_process(where["env"])
    assert forked.Program(["-c", begin + _CALLS], **where).wait(300) == 0, log.read_text()
    document = json.loads(found.read_text())
    return [Answer(**answer) for answer in document["answers"]], document
