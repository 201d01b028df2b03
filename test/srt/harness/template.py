"""Programs in another environment than this process's, in forks of one that has imported SGLang.

Triton decides when it is imported whether it interprets, and SGLang takes 16 s of a core to import.
So all programs with the same environment are forked from one process, one after another. Each
begins as a spawned one does that has imported SGLang, and no more.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

#: What takes longest to import of that which the tests of a model need. No plugin is loaded.
IMPORTED = (
    "transformers",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",  # and with it all models
)


class Template:
    """The process that is forked. It ends when this one does."""

    def __init__(self, environment: Mapping[str, str], cwd: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @property
    def is_alive(self) -> bool:
        """Whether it can be forked."""
        return self._process.poll() is None

    def run(self, program: Sequence[str], log: Path, seconds: float) -> int:
        """Run ``python -m *program``, which prints into ``log``; returns its exit status.

        Raises:
            subprocess.TimeoutExpired: it has not ended in so many seconds, and was killed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(program), str(log)]).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            root = psutil.Process(self._process.pid)
            for process in [*root.children(recursive=True), root]:
                process.kill()
            self._process.wait()
            raise subprocess.TimeoutExpired(list(program), seconds)
        status = self._process.stdout.readline()
        assert status, "the process that is forked has ended"
        return int(status)


def _serve() -> None:
    """Fork for each line of stdin; returns in the child, for its program, and at the end."""
    statuses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        program, log = json.loads(line)
        child = os.fork()
        if child == 0:
            with open(os.devnull, "rb") as nothing, open(log, "wb") as output:
                for stream, file in ((0, nothing), (1, output), (2, output)):
                    os.dup2(file.fileno(), stream)
            sys.argv = program
            sys.path[0] = os.getcwd()  # as ``python -m`` has it
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=statuses, flush=True)


if __name__ == "__main__":
    _serve()
