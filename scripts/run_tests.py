#!/usr/bin/env python3
"""Run the tests.

It needs only Python 3.11 or later and 12 GB of disk. It makes the virtual environment that
``scripts/demo.py`` uses too, and runs the tests in two processes, without a GPU. ``--gpu`` uses the
current environment if SGLang is installed there. Arguments after ``--`` go to pytest; if they name
files, these run one after another, in one process::

    python3 scripts/run_tests.py -- test/srt/unit/test_gate.py -k LoRA

With ``--lint`` the style, and the package's types against SGLang's own, are checked before any test
runs. mypy checks all other code beside the tests, and its output comes last.

Exit status: 0 if everything passed, 1 if not, 2 if the environment could not be made.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import failed, new_parser
from scripts.environment import REPO, SGLANG_VERSION, SetupError, prepare, run
from sglang_gemma4_yoco.commands.console import say

# The longest come first, so that neither process waits long for the other at the end.
FOLDERS = ("rehearsal", "server", "triton", "forward", "scripts", "unit", "models")
DEFAULT = ("-m", "not release")
QUICK = ("-m", "(unit or forward or models) and not slow and not release")
# test/srt/conftest.py determines which tests stay together.
IN_TWO_PROCESSES = ("-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")
# test/reference is not installed where a GPU is.
GPU = ("-s", "-p", "no:xdist", "-o", "pythonpath=test/srt test/reference")


def pytest_arguments(args: argparse.Namespace) -> list[str]:
    """Return pytest's arguments; without --quick, named files run with their release tests."""
    chosen: tuple[str, ...] = ()
    if args.gpu:
        chosen = GPU
    elif args.quick:
        chosen = QUICK
    if any("/" in one and (REPO / one.partition("::")[0]).exists() for one in args.pytest):
        return [*chosen, *args.pytest]
    if args.gpu:
        return [*chosen, *args.pytest, "test/srt/gpu"]
    if not args.quick and not args.all:
        chosen = DEFAULT
    folders = (f"test/srt/{folder}" for folder in FOLDERS)
    return [*chosen, *IN_TWO_PROCESSES, *args.pytest, *folders]


def check_first(python: Path) -> bool:
    """Check the style, and the types of the package; return False at the first check that fails."""
    sources = (REPO / "test/srt/rehearsal").glob("*.cpp")
    ruff = python.with_name("ruff")
    return (
        run(ruff, "check", ".")
        and run(ruff, "format", "--check", ".")
        and run(python.with_name("clang-format"), "--dry-run", "--Werror", *sources)
        and run(python, "scripts/dev/package_types.py")
    )


def run_beside(silent: Sequence[str | Path], shown: Sequence[str | Path]) -> bool:
    """Run two commands at once; return True if both succeeded.

    The output of ``silent`` is printed after both have ended.
    """
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(silent, cwd=REPO, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        succeeded = run(*shown)
        status = process.wait()
        output.seek(0)
        say(f"$ {shlex.join(map(str, silent))}\n{output.read().rstrip()}")
    return succeeded and status == 0


def main() -> int:
    """Set up, check, test; return the exit status."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--venv", type=Path, default=REPO / ".venv", help="the environment to make or reuse")
    add("--sglang-version", default=SGLANG_VERSION, help="a release; newest; prerelease")
    add("--lint", action="store_true", help="check style and types too")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--quick", action="store_true", help="less than three minutes, no server")
    chosen.add_argument("--all", action="store_true", help="also what only a release must pass")
    chosen.add_argument("--gpu", action="store_true", help="what needs a GPU, and nothing else")
    add("pytest", nargs="*", help="arguments for pytest, after --")
    args = parser.parse_args()
    python = Path(sys.executable)
    try:
        if not args.gpu or find_spec("sglang") is None:
            python = prepare(args.venv, sglang=args.sglang_version, group="dev")
    except (SetupError, OSError) as failure:
        return failed(failure)
    # Without stored bytecode each server that a test starts would compile all of SGLang again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if args.gpu:
        os.environ["YOCO_TEST_GPU"] = "1"
    tests: list[str | Path] = [python, "-m", "pytest", *pytest_arguments(args)]
    if not args.lint:
        return int(not run(*tests))
    return int(not check_first(python) or not run_beside((python, "-m", "mypy"), tests))


if __name__ == "__main__":
    raise SystemExit(main())
