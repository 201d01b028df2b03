"""A test file that needs a process of its own: Triton decides at import whether it interprets.

Collected in a process that is set up otherwise, such a file becomes one test, which runs the whole
file in a second pytest; collected where the environment is as it must be, it is an ordinary file.
So ``pytest`` alone runs everything, and a single test can still be run by name::

    TRITON_INTERPRET=1 python -m pytest test/srt/triton/test_hard_batches.py -k prefixes

A plugin of pytest, which ``test/srt/conftest.py`` names.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness import forked

SECONDS = 1200  # for one file; each of its tests has a limit of its own as well
FOLDER = "triton"
INTERPRETER = {"TRITON_INTERPRET": "1"}


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    """Have another process run such a file, unless this one is set up for it."""
    if module_path.parent.name != FOLDER or is_set_up(INTERPRETER):
        return None
    file = OwnProcessFile.from_parent(parent, path=module_path)
    file.environment = INTERPRETER
    return file


def is_set_up(environment: Mapping[str, str]) -> bool:
    """Whether this process has these variables already."""
    return environment.items() <= os.environ.items()


class OwnProcessFile(pytest.File):
    """A test file that another process runs, as one test."""

    environment: Mapping[str, str]

    def collect(self) -> Iterator[pytest.Item]:
        """The one test."""
        item = OwnProcess.from_parent(self, name="in_its_own_process")
        item.add_marker(pytest.mark.timeout(SECONDS + 60))
        yield item


class FailedInOwnProcessError(Exception):
    """The file's tests did not all pass; the message is the end of their pytest's output."""


class OwnProcess(pytest.Item):
    """Runs its file in a second pytest, and passes if that had tests and none of them failed."""

    def runtest(self) -> None:
        """Run it; what it counted becomes a section of this test's report."""
        file = self.getparent(OwnProcessFile)
        assert file is not None
        report = self.config.rootpath / ".pytest_cache" / f"{self.path.stem}-{os.getpid()}.xml"
        report.parent.mkdir(exist_ok=True)
        log = report.with_suffix(".log")
        program = [
            *("pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"),
            *("-m", self.config.option.markexpr),  # the same tests are deselected there
            *(f"--junitxml={report}", str(self.path)),
        ]
        status = run_elsewhere(program, log, file.environment, self.config.rootpath)
        output = log.read_text()
        log.unlink()
        if status:
            raise FailedInOwnProcessError(output[-14000:])
        counts = _counted(report)
        self.add_report_section("call", "in its own process", str(counts))
        assert counts["tests"] > counts["skipped"], f"nothing ran: {output[-2000:]}"

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """The other pytest's output, without this one's frames."""
        if isinstance(excinfo.value, FailedInOwnProcessError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where it is, for the report."""
        return self.path, 0, f"{self.path.stem}: {self.name}"


def run_elsewhere(
    program: Sequence[str], log: Path, environment: Mapping[str, str], cwd: Path
) -> int:
    """The exit status of ``python -m *program`` in an environment that differs so from this one.

    It is forked from a process that has imported SGLang, as servers are. Where SGLang must be
    imported in that environment, another process has that process forked.
    """
    whole = {**_without_pytest(os.environ), **environment}
    if forked.as_this_process(whole):
        return run_forked(program, log, whole, cwd)
    helper = _helper(frozenset(whole.items()))
    return helper.submit(run_forked, program, log, whole, cwd).result()


@functools.cache
def _helper(environment: frozenset[tuple[str, str]]) -> ProcessPoolExecutor:
    """A process with this environment; it ends with this one."""
    spawning = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawning, forked.enter_environment, (dict(environment),))


def run_forked(program: Sequence[str], log: Path, environment: dict[str, str], cwd: Path) -> int:
    """The exit status of ``python -m *program``, killed after ``SECONDS``."""
    process = forked.Program(["-m", *program], cwd=cwd, env=environment, log=log)
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def _without_pytest(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what pytest hands to its own children of this run."""
    found: dict[str, str] = {}
    for k, v in environment.items():
        if not k.startswith("PYTEST_"):
            found[k] = v
    return found


def _counted(report: Path) -> dict[str, int]:
    """How many tests ran, failed and were skipped, as the other pytest wrote it down."""
    suite = ElementTree.parse(report).getroot()
    if suite.tag != "testsuite":
        suite = suite[0]
    report.unlink()
    found: dict[str, int] = {}
    for name in ("tests", "failures", "errors", "skipped"):
        found[name] = int(suite.attrib[name])
    return found
