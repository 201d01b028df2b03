#!/usr/bin/env python3
"""Do all tests pass?

``python3 scripts/run_tests.py`` needs Python 3.11 or later (3.10 up to SGLang 0.5.21) and 12
GB of disk, nothing else. It makes the virtual environment that ``scripts/demo.py`` uses too, puts
SGLang, this package, the CPU platform and the test tools into it, and runs the tests in two
processes, which takes about 7 minutes on two cores. They need no GPU and no network. What follows
``--`` goes to pytest. If it names files, these run one after another, in one process::

    python3 scripts/run_tests.py --quick     # less than three minutes, and no server
    python3 scripts/run_tests.py --all       # also the tests that are marked ``release``
    python3 scripts/run_tests.py --gpu       # what needs a GPU, about five minutes
    python3 scripts/run_tests.py --lint      # style and types first
    python3 scripts/run_tests.py -- test/srt/unit/test_gate.py -k LoRA

``--gpu`` uses the environment that it is called in if SGLang is installed there.

The exit status is 0 when everything passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from environment import (
    REPO,
    SGLANG_VERSION,
    SetupError,
    find_uv,
    heading,
    install,
    of_group,
    prepare_environment,
    say,
    tail,
)

GROUP = "dev"  # of pyproject.toml
OPTIONAL = "pd"  # not to be had for every machine
TESTS = Path("test/srt")
# What takes longest comes first, so that at the end no process waits long for the other.
FOLDERS = ("server", "triton", "forward", "scripts", "rehearsal", "unit", "models")
GPU = ("-p", "no:xdist", str(TESTS / "gpu"))
QUICK = ("-m", "(unit or forward or models) and not slow and not release")
DEFAULT = ("-m", "not release")
QUICK_MODELS = "2"  # random ones that test_equivalence tries
# test/srt/conftest.py says which tests stay together.
IN_TWO_PROCESSES = ("-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")
_ONE_PROCESS = ("-n", "--numprocesses", "--dist", "--pdb", "no:xdist", "-pno:xdist")


def parse_arguments() -> argparse.Namespace:
    """The command line; see ``--help``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, default=REPO / ".venv", help="default: %(default)s")
    parser.add_argument("--sglang-version", default=SGLANG_VERSION, help="default: %(default)s")
    parser.add_argument("--lint", action="store_true", help="check style and types first")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--quick", action="store_true", help="less than three minutes, no server")
    chosen.add_argument("--all", action="store_true", help="also what only a release must pass")
    chosen.add_argument("--gpu", action="store_true", help="what needs a GPU, and nothing else")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    return parser.parse_args()


def pytest_arguments(typed: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """What pytest is called with: two processes, unless the caller says otherwise.

    Args:
        typed: the caller's own arguments; if they name tests, all of these run.
        chosen: ``QUICK``, ``DEFAULT``, or nothing for all tests.
    """
    names = any(_is_path(argument) for argument in typed)
    arguments = [] if names and chosen == DEFAULT else list(chosen)
    if not names and not any(argument.startswith(_ONE_PROCESS) for argument in typed):
        arguments += IN_TWO_PROCESSES
    arguments += typed
    return arguments if names else arguments + [str(TESTS / folder) for folder in FOLDERS]


def _is_path(argument: str) -> bool:
    """Whether it names tests, and is no option's word (``-k test``)."""
    path = argument.partition("::")[0]
    return ("/" in path or path.endswith(".py")) and (REPO / path).exists()


def run(python: Path, *module: str, **variables: str) -> bool:
    """Run ``python -m ...`` in the repository; tell whether it succeeded.

    ``variables`` are added to its environment.
    """
    env = dict(os.environ) | variables
    # Without stored bytecode every server that a test starts compiles all of SGLang again.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    say(f"$ python -m {' '.join(module)}")
    return subprocess.run([python, "-m", *module], cwd=REPO, env=env, check=False).returncode == 0


def run_on_gpu(python: Path) -> int:
    """Run the tests that need a GPU; elsewhere they are skipped."""
    heading("Tests on a GPU")
    return 0 if run(python, "pytest", "-s", *GPU, YOCO_TEST_GPU="1") else 1


def install_optional(venv: Path, python: Path, log: Path) -> None:
    """Install what one file of tests needs, which is skipped where that cannot be had."""
    try:
        install(find_uv(venv, log), python, of_group(OPTIONAL), log)
    except (SetupError, OSError):
        say(f"The group {OPTIONAL!r} cannot be installed here (the log is {log})")


def main() -> int:
    """Set up, check, test."""
    args = parse_arguments()
    if args.gpu and find_spec("sglang") is not None:
        return run_on_gpu(Path(sys.executable))
    venv = args.venv.expanduser().absolute()
    heading("Virtual environment")
    log = venv.with_name(venv.name + "-install.log")
    try:
        log.write_text("")
        python, _ = prepare_environment(
            venv,
            log,
            sglang_version=args.sglang_version,
            device="auto" if args.gpu else "cpu",
            group=GROUP,
        )
    except (SetupError, OSError) as failure:
        print(f"{tail(log)}\nerror: {failure}", file=sys.stderr)
        return 2
    if args.gpu:
        return run_on_gpu(python)
    if not args.quick:
        install_optional(venv, python, log)
    if args.lint:
        heading("Style and types")
        for check in (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)):
            if not run(python, *check):
                return 1
    heading("Tests")
    models = {"YOCO_TEST_MODELS": QUICK_MODELS} if args.quick else {}
    chosen = QUICK if args.quick else () if args.all else DEFAULT
    arguments = pytest_arguments(args.pytest, chosen)
    return 0 if run(python, "pytest", *arguments, **models) else 1


if __name__ == "__main__":
    raise SystemExit(main())
