#!/usr/bin/env python3
"""Do all tests pass?

``python3 scripts/run_tests.py`` needs Python 3.10 or later and 12 GB of disk, nothing else: it
makes the virtual environment that ``scripts/demo.py`` uses too, puts SGLang, this package, the CPU
platform and the test tools into it, and runs the tests, which need no GPU and no network.
``--lint`` checks style and types first. What follows ``--`` goes to pytest::

    python3 scripts/run_tests.py -- test/srt/unit/test_gate.py -k LoRA

The exit status is 0 when everything passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from environment import REPO, SGLANG_VERSION, SetupError, heading, prepare_environment, say, tail

EXTRAS = "test,lint,scripts,eval"  # the scripts are tested too


def parse_arguments() -> argparse.Namespace:
    """The command line; see ``--help``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, default=REPO / ".venv", help="default: %(default)s")
    parser.add_argument("--sglang-version", default=SGLANG_VERSION, help="default: %(default)s")
    parser.add_argument("--lint", action="store_true", help="check style and types first")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    return parser.parse_args()


def run(python: Path, *module: str) -> bool:
    """Run ``python -m ...`` in the repository; tell whether it succeeded."""
    env = dict(os.environ)
    # Without stored bytecode every server that a test starts compiles all of SGLang again.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    say(f"$ python -m {' '.join(module)}")
    return subprocess.run([python, "-m", *module], cwd=REPO, env=env, check=False).returncode == 0


def main() -> int:
    """Set up, check, test."""
    args = parse_arguments()
    venv = args.venv.expanduser().absolute()
    heading("Virtual environment")
    log = venv.with_name(venv.name + "-install.log")
    try:
        log.write_text("")
        python, _ = prepare_environment(
            venv,
            log,
            sglang_version=args.sglang_version,
            device="cpu",
            extras=EXTRAS,
        )
    except (SetupError, OSError) as failure:
        print(f"{tail(log)}\nerror: {failure}", file=sys.stderr)
        return 2
    if args.lint:
        heading("Style and types")
        for check in (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)):
            if not run(python, *check):
                return 1
    heading("Tests")
    return 0 if run(python, "pytest", *args.pytest) else 1


if __name__ == "__main__":
    raise SystemExit(main())
