#!/usr/bin/env python3
"""Check the types of the package against SGLang's own.

SGLang is not marked as typed, so mypy would read all its names as ``Any``. On ``MYPYPATH`` it finds
a link to the installed SGLang, which this script makes in the environment, and reads SGLang's
annotations. Needs the environment that ``run_tests.py`` makes::

    .venv/bin/python scripts/dev/package_types.py

Arguments after ``--`` go to mypy. Exit status: mypy's, 0 if it found nothing; 2 if there is no
SGLang.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import failed, new_parser
from scripts.environment import REPO, SetupError


def find_sglang() -> Path:
    """Return the folder of the installed SGLang, without importing it."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        raise SetupError(f"no SGLang is installed for {sys.executable}")
    return Path(spec.origin).parent


def make_link() -> Path:
    """Return a folder of the environment that has a link to SGLang and nothing else.

    The link is made again in every run: the environment may have been moved, or have got another
    release.
    """
    target, folder = find_sglang(), Path(sys.prefix) / "share" / "sglang-types"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "sglang"
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    return folder


def main() -> int:
    """Replace this process with mypy's; return 2 if that fails."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--mypy-path", type=Path, help="a folder with another sglang than the installed one")
    add("mypy", nargs="*", help="arguments for mypy, after --")
    args = parser.parse_args()
    try:
        folder = args.mypy_path or make_link()
        os.environ["MYPYPATH"] = str(folder.absolute())
        os.chdir(REPO)
        settings = f"--config-file={REPO / 'mypy-package.ini'}"
        os.execv(sys.executable, [sys.executable, "-m", "mypy", settings, *args.mypy])
    except (SetupError, OSError) as failure:
        return failed(failure)


if __name__ == "__main__":
    raise SystemExit(main())
