"""Processes that must end with the command that started them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

import psutil

Family = list[psutil.Process]


def assert_killed_alone(command: Sequence[str], find: Callable[[psutil.Process], Family]) -> None:
    """Kill a command by SIGKILL once ``find`` returns its processes, which must end as well."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            family = find(psutil.Process(process.pid))
        finally:
            process.kill()
    assert_ended(family)


def assert_ended(family: Family) -> None:
    """Assert that these processes end within five seconds; kill the others."""
    _, alive = psutil.wait_procs(family, timeout=5)
    for one in alive:
        one.kill()
    assert alive == []
