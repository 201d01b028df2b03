"""Test files that need their own process: Triton decides at import whether it interprets.

Collected in a process with another environment, such a file becomes one test, which runs the whole
file in a second pytest; collected in the right environment, it is an ordinary file.
So ``pytest`` alone runs everything, and a single test can still be run by name::

    TRITON_INTERPRET=1 python -m pytest test/srt/triton/test_hard_batches.py -k prefixes

A plugin of pytest, which ``test/srt/conftest.py`` names.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness import forked

SECONDS = 1200  # for one file; each of its tests has its own limit too
FOLDER = "triton"
VARIABLE, INTERPRETED = "TRITON_INTERPRET", "1"


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    """Run such a file in another process, unless this one is set up for it."""
    if module_path.parent.name != FOLDER or os.environ.get(VARIABLE) == INTERPRETED:
        return None
    return OwnProcessFile.from_parent(parent, path=module_path)


class OwnProcessFile(pytest.File):
    """Test file that another process runs, as one test."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the one test."""
        item = OwnProcess.from_parent(self, name="in_its_own_process")
        item.add_marker(pytest.mark.timeout(SECONDS + 60))
        yield item


class OwnProcess(pytest.Item):
    """Runs its file in a second pytest, and passes if that had tests and none of them failed."""

    def runtest(self) -> None:
        """Run the file; its counts become a section of this test's report."""
        log = self.config.rootpath / ".pytest_cache" / f"{self.path.stem}-{os.getpid()}.log"
        log.parent.mkdir(exist_ok=True)
        program = [
            *("pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"),
            *("-m", self.config.option.markexpr),  # the same tests are deselected there
            str(self.path),
        ]
        status = _helper().submit(run_forked, program, log, self.config.rootpath).result()
        output = log.read_text()
        log.unlink()
        if status:
            pytest.fail(output[-14000:], pytrace=False)
        counted = output.splitlines()[-1]
        self.add_report_section("call", "in its own process", counted)
        assert re.search(r"\d passed", counted), f"nothing ran: {output[-2000:]}"


@functools.cache
def _helper() -> ProcessPoolExecutor:
    """Return a process with the interpreter's environment; it ends with this one.

    Variables that pytest sets for its own children are left out.
    """
    kept = {name for name in os.environ if not name.startswith("PYTEST_")}
    environment = {name: os.environ[name] for name in kept} | {VARIABLE: INTERPRETED}
    spawning = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawning, forked.enter_environment, (environment,))


def run_forked(program: Sequence[str], log: Path, cwd: Path) -> int:
    """Return the exit status of ``python -m *program``, killed after ``SECONDS``.

    It is forked from a process that has imported SGLang, as servers are.
    """
    process = forked.Program(["-m", *program], cwd=cwd, env=dict(os.environ), log=log)
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
