"""SGLang's programs (``python -m``), forked from a process that has imported SGLang.

A server has three processes, each of which imports SGLang: about 40 s of CPU time in all, for a
model that loads in 1 s. So a test process starts one process that imports SGLang once and no more
(``multiprocessing``'s fork server). A program's first process is forked from it. Before anything
else, that process forks a second fork server, from which its ``multiprocessing`` children are
forked. So each process starts like a spawned one: SGLang is imported, nothing of it is set up, no
plugin is loaded, and the environment is its parent's at the time.

There are two differences from spawned processes. Variables that SGLang reads on import are those of
the test process; ``as_this_process`` returns whether a program may be forked. And a program's first
process is not the parent of its children: the fork server is, and it forwards the signal that
SGLang's children send to their parent when they fail.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, spawn
from pathlib import Path
from typing import Any

#: The slowest imports. No plugin: each process loads those by itself.
IMPORTED = (
    "transformers",
    "uvicorn",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",  # and with it all models
)
#: The last Python release whose fork server can be started like this.
_LAST_PYTHON = (3, 13)
_READ_AT_IMPORT = (
    *("SGLANG_PLATFORM", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE"),
)
_PR_SET_PDEATHSIG = 1


def as_this_process(environment: Mapping[str, str]) -> bool:
    """Return True if SGLang's import is the same in this process as in that environment."""
    if sys.version_info[:2] > _LAST_PYTHON:
        return False
    return all(environment.get(name) == os.environ.get(name) for name in _READ_AT_IMPORT)


def preloaded() -> multiprocessing.context.ForkServerContext:
    """Return ``multiprocessing``'s context whose processes start with SGLang imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, __name__])
    return context


class Program:
    """Running program, with the part of ``subprocess.Popen`` that the tests use.

    Attributes:
        pid: the id of its first process, which leads a session.
    """

    def __init__(
        self,
        program: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start ``python *program``, which prints into ``log``.

        Args:
            program: ``-m``, a module's name and its arguments; or ``-c`` and code.
        """
        context = preloaded()
        began = (list(program), str(cwd), dict(env), str(log))
        self._process = context.Process(target=_run, args=began)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        with suppress(ProcessLookupError):  # it has ended
            while os.getpgid(self.pid) != self.pid:  # tests signal its process group
                time.sleep(0.001)

    def poll(self) -> int | None:
        """Return the exit status, or the negative signal that ended it; None while it runs."""
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        """Return the result of ``poll``."""
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once the program has ended.

        Raises:
            subprocess.TimeoutExpired: it has not ended within ``timeout`` seconds.
        """
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return status


def _run(program: list[str], cwd: str, env: dict[str, str], log: str) -> None:
    assert "sglang_gemma4_yoco" not in sys.modules, "imported too early: env may name another copy"
    os.setsid()  # Ctrl-C reaches pytest alone
    known: Any = multiprocessing.process
    known._parent_process = None  # a program that a user starts has none
    with open(os.devnull, "rb") as nothing, open(log, "wb") as output:
        for stream, file in ((0, nothing), (1, output), (2, output)):
            os.dup2(file.fileno(), stream)
    os.chdir(cwd)
    _fork_a_fork_server()
    enter_environment(env)
    sys.path[0:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    kind, name, *arguments = program
    if kind == "-c":
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _fork_a_fork_server() -> None:
    """Fork a copy of this process from which its ``multiprocessing`` children are forked."""
    alive, held = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        # In a temporary folder; a documented function that typeshed does not list.
        path = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(path)
        listener.listen()
        address = listener.getsockname()
        server = os.fork()
        if server == 0:
            end_with_parent()
            signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))
            os.close(held)
            forkserver.main(os.dup(listener.fileno()), alive, [])
            os._exit(0)
    os.close(alive)
    known: Any = forkserver._forkserver
    known._forkserver_address = address
    known._forkserver_alive_fd = held
    known._forkserver_pid = server

    stock = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: stock(
        "forkserver" if method == "spawn" else method, force=force
    )
    of_a_child = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: {
        **of_a_child(name),
        "environment": _Environment(os.environ),
    }


def end_with_parent() -> None:
    """End this process when the thread that started it ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Environment(dict[str, str]):
    """Variables that replace those of the process that unpickles them."""

    def __reduce__(self) -> Any:
        return enter_environment, (dict(self),)


def enter_environment(env: dict[str, str]) -> None:
    """Replace this process's environment variables."""
    os.environ.clear()
    os.environ.update(env)
    if env.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):  # read when this module is imported
        sys.modules.pop("sglang.srt.models.registry", None)
