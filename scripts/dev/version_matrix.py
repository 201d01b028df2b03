#!/usr/bin/env python3
"""Run the tests with every supported release of SGLang.

For each release ``run_tests.py`` makes an environment and runs the tests of ``FILES`` there, and
``package_types.py`` checks the package's types against the release's; then the environment is
deleted. Needs what ``run_tests.py`` needs, and 25 GB of disk.
Media, several ranks, tracing and host reads use parts of SGLang that differ too much from release
to release for the CPU platform: their tests run with the newest one only, in every ordinary run.

    python3 scripts/dev/version_matrix.py             # all supported releases, some 20 minutes
    python3 scripts/dev/version_matrix.py 0.5.22      # one of them
    python3 scripts/dev/version_matrix.py newest      # the newest release on the package index
    python3 scripts/dev/version_matrix.py prerelease  # the newest one, pre-releases included
    python3 scripts/dev/version_matrix.py 0.5.23 --override transformers==5.24.0

The last one overrides a package that SGLang pins, as users who upgrade it do. ``newest`` and
``prerelease`` run with ``SGLANG_GEMMA4_YOCO_UNTESTED=1``: an untested release runs as stock
otherwise.

Output contract: the last line for each release is ``sglang VERSION: passed`` or ``failed``, with
counts and mypy's result. Supported releases that passed go to
``benchmark/results/version_matrix.json``, except with ``--override``; ``scripts/tables.py --write``
makes the table in docs/compatibility.md. Exit status: 0 if all passed, 1 if one did not.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import heading, new_parser
from scripts.environment import NEWEST, REPO, run
from scripts.result_files import RESULTS, checkout, write_whole
from sglang_gemma4_yoco.commands.console import say
from sglang_gemma4_yoco.settings import name_of

VERSIONS = ("0.5.22", "0.5.23")
FILE = RESULTS / "version_matrix.json"
FORWARD = (
    *("any_backend", "bfloat16", "captured_tail", "donor", "equivalence", "forward", "gemma3n"),
    *("other_models", "pr27183", "refused", "untested_release"),
)
#: Below ``test/srt``.
FILES = (
    *("unit", "models"),
    *(f"forward/test_{name}.py" for name in FORWARD),
    *("triton/test_any_backend_triton.py", "triton/test_hard_batches.py"),
    *("server/test_server.py", "server/test_oracle.py", "server/test_captured_tail_server.py"),
)
_ABOUT = """
import json, platform
from importlib.metadata import version
about = {name: version(name) for name in ("sglang", "torch")}
print(json.dumps(about | {"python": platform.python_version()}))
"""


def try_release(version: str, folder: Path, override: str | None = None) -> dict[str, Any]:
    """Run a release's tests and mypy, return the results.

    Args:
        override: a requirement in place of one of SGLang's pins.
    """
    venv, report = folder / version, folder / f"{version}.xml"
    report.unlink(missing_ok=True)
    tests = (f"test/srt/{name}" for name in FILES)
    options = ("-q", "-m", "not slow and not release", f"--junitxml={report}")
    script = REPO / "scripts" / "run_tests.py"
    which = ("--sglang-version", version, "--venv", venv)
    variables = []
    if version in NEWEST:
        variables = [f"{name_of('untested')}=1"]
    if override is not None:
        overrides = folder / "overrides.txt"
        overrides.write_text(override + "\n")
        variables.append(f"UV_OVERRIDE={overrides}")
    good = run("env", *variables, sys.executable, script, *which, "--", *tests, *options)
    found: dict[str, Any] = {
        "sglang": version,
        "passed": 0,
        "skipped": 0,
        "failed": int(not good),
        "types": "failed",
    }
    python = venv / "bin" / "python"
    if python.exists() and run(python, REPO / "scripts" / "dev" / "package_types.py"):
        found["types"] = "passed"
    if report.exists():
        about = subprocess.run([python, "-c", _ABOUT], capture_output=True, check=True)
        found |= json.loads(about.stdout)
        for suite in ElementTree.parse(report).iter("testsuite"):
            broken = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            found["skipped"] += skipped
            found["failed"] = max(found["failed"], broken)
            found["passed"] += int(suite.get("tests", 0)) - skipped - broken
    shutil.rmtree(venv, ignore_errors=True)
    return found | checkout()


def main() -> int:
    """Test the releases, and save the results of those that passed."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("versions", nargs="*", default=list(VERSIONS), help="releases, newest, or prerelease")
    add("--override", metavar="REQUIREMENT", help="install this in place of SGLang's pin")
    add("--work-dir", type=Path, default=REPO / ".venv-matrix", help="for environments")
    args = parser.parse_args()
    folder = args.work_dir.expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    bad = 0
    for name in args.versions:
        heading(f"SGLang {name}")
        found = try_release(name, folder, args.override)
        passed = found["passed"] > 0 and not found["failed"] and found["types"] == "passed"
        bad += not passed
        if passed and name in VERSIONS and args.override is None:
            entries = {entry["sglang"]: entry for entry in json.loads(FILE.read_text())}
            entries[name] = found
            lines = ",\n".join(json.dumps(entries[one]) for one in sorted(entries, reverse=True))
            write_whole(FILE, f"[\n{lines}\n]\n")
        outcome = "passed" if passed else "failed"
        counts = ", ".join(f"{found[name]} {name}" for name in ("passed", "skipped", "failed"))
        say(f"sglang {found['sglang']}: {outcome} ({counts}; types {found['types']})")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
