#!/usr/bin/env python3
"""Which releases of SGLang does this package work with?

``python3 scripts/dev/version_matrix.py`` needs Python 3.11 or later (as SGLang does from 0.5.22 on)
and 25 GB of disk, no more. For each release it makes a virtual environment with that SGLang, this
package, the CPU platform and the test tools, sees whether the plugin accepts it, runs tests in four
parts, and deletes it again (``--keep`` keeps it). No GPU is needed. A release that cannot be
installed, or that fails, does not stop the others.

units    functions, the gate on SGLang's own batches, the switch, the published helpers
forward  SGLang's ModelRunner: on equals off, failures, refusals; fewer random models than usual
triton   the same on SGLang's Triton attention backend, in Triton's interpreter
server   two real servers, fast and stock, and Hugging Face's Gemma 4 beside them

Tests that are marked slow are left out. After each release the results go to
``benchmark/results/version_matrix.json``. The output ends with a Markdown table and the files that
ran; ``--write docs/compatibility.md`` puts both between the two marker lines of that file. What
passed, or was refused, is not tried again while package, tests and scripts are the same commit,
so a run that was cut short goes on where it was.

``--newest`` does something else: it installs SGLang's newest release, pre-releases among them, into
an environment of its own, and its last line is what works with it, or what does not and why. No
result is written. The prompt is audited: it counts if each layer gave what stock's layer gives. ::

    sglang 0.5.24rc1: load ok, check at start ok, served prompt ok

uv keeps what it has downloaded in its cache, about 10 GB for each PyTorch: ``uv cache clean``
removes it.

The exit status is 0 if every release passed or was refused by the plugin (with ``--newest``: if all
is ok), 1 if one did not, 2 if the command could not run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import (
    REPO,
    SetupError,
    command_line,
    commit_of,
    create_venv,
    failed,
    find_uv,
    heading,
    make_checkpoint,
    package_of,
    prepare_environment,
    say,
    tail,
    write_whole,
)
from generated import inserted, markdown

VERSIONS = tuple(f"0.5.{patch}" for patch in range(17, 24))
PART_OF_DOCUMENT = "compatibility"
SWITCH = "SGLANG_GEMMA4_YOCO"
RESULTS = REPO / "benchmark" / "results" / "version_matrix.json"
TESTED_PATHS = (
    "sglang_gemma4_yoco",
    "test",
    "pyproject.toml",
    "scripts/environment.py",
    "scripts/dev/version_matrix.py",
)
TESTS = "test/srt"
LIMIT = 1800.0  # seconds for each part


#: The files and folders of each part. Media, several ranks, tracing and host reads use parts of
#: SGLang that differ too much from release to release for the CPU platform: their tests run with
#: the newest one only.
FORWARD = (
    "any_backend",
    "bfloat16",
    "deciding",
    "donor",
    "engine",
    "equivalence",
    "forward",
    "other_models",
    "refused",
    "tails_batch",
)
TRITON = ("any_backend_triton", "hard_batches")
PARTS = {
    "units": ("unit", "models"),
    "forward": tuple(f"forward/test_{name}.py" for name in FORWARD),
    "triton": tuple(f"triton/test_{name}.py" for name in TRITON),
    "server": ("server/test_server.py", "server/test_oracle.py"),
}
#: What is added to the environment of a part's tests. With ``TRITON_INTERPRET`` each case of that
#: folder counts; without it each of its files is one test, which starts a process for them.
VARIABLES = {"forward": {"YOCO_TEST_MODELS": "2"}, "triton": {"TRITON_INTERPRET": "1"}}

# SGLang's own loader loads the plugin.
_PROBE = """
import json, platform
from importlib.metadata import version
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang_gemma4_yoco import plugin
if plugin.left_alone is None:
    from sglang.srt.models.gemma4_causal import Gemma4TextModel
    assert hasattr(Gemma4TextModel, "_yoco_eligibility"), "the plugin was not loaded"
packages = {name: version(name) for name in ("torch", "triton", "transformers")}
packages["python"] = platform.python_version()
print(json.dumps({"refusal": plugin.left_alone, "packages": packages}))
"""

# One server whose prefills are all audited; a prompt that is longer than a tiny model's window.
_SERVED = """
import json, os, sys
from pathlib import Path
from sglang_gemma4_yoco.commands import servers
from sglang_gemma4_yoco.settings import name_of
os.environ[name_of("audit")] = "1"
model, folder = sys.argv[1:]
_, fast = servers.pair(["--model-path", model], Path(folder), device="cpu")
with servers.running([fast], 900):
    fast.generate(input_ids=[*range(5, 105)], sampling_params={"max_new_tokens": 4})
    print(json.dumps([dict(fast.forwards()), fast.states()[0].get(servers.ENTRY)]))
"""

PASSED, FAILED, REFUSED, NOT_INSTALLED = "passed", "failed", "refused", "not installed"
INCOMPLETE = "incomplete"


@dataclass
class Part:
    """What became of one part of the tests; an error counts as failed.

    Attributes:
        seconds: wall time, pytest's start included.
        files: those of which a test ran, relative to ``test/srt``.
    """

    passed: int
    failed: int
    skipped: int
    seconds: float
    files: Sequence[str] = ()

    @property
    def good(self) -> bool:
        """Whether something ran and nothing failed."""
        return self.passed > 0 and self.failed == 0


@dataclass
class Release:
    """What became of one release.

    Attributes:
        sglang: its version.
        status: ``passed``, ``failed``, ``refused``, ``not installed``, or ``incomplete`` when
            nothing failed and not all parts were asked for.
        reason: why it did not pass.
        commit: the last commit of what was tested, with ``-dirty`` if there were changes.
        package: the digest of the package's sources that the other result files name too.
        packages: versions of what it brought along, and of Python.
        parts: by name.
    """

    sglang: str
    status: str
    reason: str | None
    commit: str
    package: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Release:
        """One entry of the results file."""
        parts = {name: Part(**part) for name, part in record["parts"].items()}
        return cls(**record | {"parts": parts})

    def still_valid(self, commit: str, wanted: Sequence[str]) -> dict[str, Part]:
        """The parts that need not run again at ``commit``: all but ``wanted`` ones that failed."""
        if self.commit != commit or commit.endswith("-dirty"):
            return {}
        return {name: part for name, part in self.parts.items() if part.good or name not in wanted}

    def refused_at(self, commit: str) -> bool:
        """Whether the plugin at ``commit`` refuses it."""
        return self.status == REFUSED and self.commit == commit and not commit.endswith("-dirty")


def parse_arguments() -> Namespace:
    """The command line; see ``--help``."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add(
        "--versions",
        nargs="+",
        metavar="VERSION",
        help=f"default: {' '.join(VERSIONS)}, and what the package index has that is newer",
    )
    add("--newest", action="store_true", help="does SGLang's newest release, or pre-release, work")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run")
    add("--work-dir", type=Path, default=REPO / ".venv-matrix", help="for environments and logs")
    add("--keep", action="store_true", help="keep the environments")
    add("--write", type=Path, metavar="FILE", help="put the table there as well")
    return parser.parse_args()


# ---------------------------------------------------------------- what to try


def newest_of(work_dir: Path, log: Path, wanted: str, *flags: str) -> str | None:
    """The newest SGLang on the package index that is as ``wanted``; None if there is none."""
    tools = work_dir / "tools"
    if not (tools / "pyvenv.cfg").exists():
        create_venv(tools, log)
    command: list[str | Path] = [
        find_uv(tools, log),
        "pip",
        "compile",
        "--quiet",
        "--no-deps",
        "--no-header",
    ]
    command += ["--no-annotate", *flags, "-"]
    done = subprocess.run(command, input=wanted, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.strip().removeprefix("sglang==")


def newer_versions(work_dir: Path, log: Path) -> list[str]:
    """Releases on the package index that are newer than the newest of ``VERSIONS``."""
    found: list[str] = []
    wanted = f"sglang>{VERSIONS[-1]}"
    while version := newest_of(work_dir, log, wanted + (f",<{found[0]}" if found else "")):
        found.insert(0, version)
    return found


# ---------------------------------------------------------------- one release


def run_tests(python: Path, name: str, log: Path) -> Part:
    """Run one part in the repository; what pytest prints goes to ``log``."""
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= VARIABLES.get(name, {})
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-m", "not slow", *(f"{TESTS}/{path}" for path in PARTS[name])]
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=REPO, env=env, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(LIMIT)
        except BaseException as stopped:
            # As Ctrl-C does, so that the tests take their servers down.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            finally:
                process.kill()
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
            output.write(f"\nstopped after {LIMIT:.0f} s\n")
    seconds = round(time.monotonic() - began, 1)
    if not report.exists():
        return Part(0, 1, 0, seconds)
    part = counted(report, seconds)
    if process.returncode and not part.failed:
        part.failed = 1  # pytest itself did not end well
    return part


def counted(report: Path, seconds: float) -> Part:
    """What became of the tests of one JUnit report."""
    part, files = Part(0, 0, 0, seconds), set()
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            part.failed += 1
        elif case.find("skipped") is not None:
            part.skipped += 1
        else:
            part.passed += 1
            # "test.srt.unit.test_gate.TestSomething"
            found = re.search(r"srt\.((\w+\.)+test_\w+)", case.get("classname", ""))
            files.add(found[1].replace(".", "/") + ".py" if found else "")
    part.files = sorted(files)
    return part


def refusal_of(python: Path) -> tuple[str | None, dict[str, str]]:
    """Why the plugin stays out of this SGLang, or None; and versions of what SGLang brought."""
    env = {name: value for name, value in os.environ.items() if name != SWITCH}
    env["SGLANG_PLATFORM"] = "gemma4_cpu"
    done = subprocess.run(
        [python, "-c", _PROBE], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise SetupError(f"the plugin could not be loaded: {lines[-1]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["refusal"], answer["packages"]


def serve_a_prompt(python: Path, model: Path, folder: Path) -> tuple[str | None, str | None]:
    """What is wrong with the check at start, and with a prompt that is served; None for nothing."""
    env = {name: value for name, value in os.environ.items() if name != SWITCH}
    env["SGLANG_PLATFORM"] = "gemma4_cpu"
    command: list[str | Path] = [python, "-c", _SERVED, model, folder]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"{last} ({folder})", None
    forwards, entry = json.loads(done.stdout.splitlines()[-1])
    if not (entry and entry["active"] and entry["check"] and not entry["check"]["unchecked"]):
        why = entry and (entry["reason"] or (entry["check"] or {}).get("unchecked"))
        return why or "it did not run", None
    audits = entry["audits"]
    if not audits["agree"] or audits["differ"] or "failed" in forwards:
        return None, f"prefills {forwards}, audits {audits} ({folder})"
    return None, None


def what_works(found: Mapping[str, str | None]) -> str:
    """The line of ``--newest``: each step, up to the first with something wrong."""
    words = []
    for step, wrong in found.items():
        words.append(f"{step} failed: {wrong}" if wrong else f"{step} ok")
        if wrong:
            break
    return ", ".join(words)


def try_newest(work_dir: Path, *, keep: bool) -> int:
    """Install SGLang's newest release and try it; the exit status.

    Raises:
        SetupError: the package index names no release.
    """
    log = work_dir / "newest-install.log"
    log.write_text("")
    version = newest_of(work_dir, log, "sglang", "--prerelease=allow")
    if version is None:
        raise SetupError("no SGLang was found on the package index", log)
    venv, found = work_dir / "newest", dict[str, str | None]()
    try:
        python, _ = prepare_environment(venv, log, sglang_version=version, device="cpu")
        found["load"], _ = refusal_of(python)
        if not found["load"]:
            model = make_checkpoint("E2B_TINY", work_dir, log, python)
            found["check at start"], found["served prompt"] = serve_a_prompt(
                python, model, work_dir
            )
    except (SetupError, OSError) as failure:
        found["load"] = str(failure)
    finally:
        if not keep:
            shutil.rmtree(venv, ignore_errors=True)
    say(f"sglang {version}: {what_works(found)}")
    return int(any(found.values()))


def try_release(release: Release, work_dir: Path, parts: Sequence[str]) -> None:
    """Install one release, test it, and note it all in ``release``.

    Never raises over what is wrong with the release. Parts that it has already are not run.
    """
    version = release.sglang
    venv, log = work_dir / version, work_dir / f"{version}-install.log"
    try:
        log.write_text("")
        python, _ = prepare_environment(
            venv, log, sglang_version=version, device="cpu", group="test"
        )
    except (SetupError, OSError) as failure:
        say(tail(log, 8))
        release.status, release.reason = NOT_INSTALLED, str(failure)
        return
    try:
        refusal, release.packages = refusal_of(python)
    except SetupError as failure:
        release.status, release.reason = FAILED, str(failure)
        return
    if refusal is not None:
        release.status, release.reason, release.parts = REFUSED, refusal, {}
        return
    for name in parts:
        if name in release.parts:
            continue
        log = work_dir / f"{version}-{name}.log"
        say(f"   {version} {name} (the log is {log})")
        part = release.parts[name] = run_tests(python, name, log)
        say(f"   {version} {name}: {_count(part)} in {part.seconds:.0f} s")
        if not part.good:
            say(tail(log))
    bad = [name for name, part in release.parts.items() if not part.good]
    left = [name for name in PARTS if name not in release.parts]
    release.status = FAILED if bad else INCOMPLETE if left else PASSED
    release.reason = f"tests fail: {', '.join(bad)}" if bad else None


# ---------------------------------------------------------------- the results


def load_results() -> dict[str, Release]:
    """What earlier runs found, by version."""
    return {r["sglang"]: Release.from_json(r) for r in json.loads(RESULTS.read_text("utf-8"))}


def store_results(results: dict[str, Release]) -> None:
    """Write the results, a line for each release."""
    lines = ",\n".join(json.dumps(asdict(release)) for release in in_order(results))
    write_whole(RESULTS, f"[\n{lines}\n]\n")


def in_order(results: dict[str, Release]) -> list[Release]:
    """The newest release first."""
    key = lambda release: [int(n) for n in re.findall(r"\d+", release.sglang)]  # noqa: E731
    return sorted(results.values(), key=key, reverse=True)


def _count(part: Part) -> str:
    count = f"{part.passed} passed"
    if part.failed:
        count += f", {part.failed} failed"
    return count + (f", {part.skipped} skipped" if part.skipped else "")


def table(releases: Sequence[Release]) -> str:
    """A Markdown table of the releases, and the files that ran."""
    rows = []
    for release in releases:
        cells = [release.sglang]
        cells += [release.packages.get(name, "") for name in ("torch", "transformers")]
        cells += [_count(release.parts[p]) if p in release.parts else "" for p in PARTS]
        cells.append(f"{sum(part.seconds for part in release.parts.values()) / 60:.0f}")
        cells.append(release.status + (f": {release.reason}" if release.reason else ""))
        rows.append(cells)
    drawn = markdown(("SGLang", "torch", "transformers", *PARTS, "minutes", "result"), rows)
    of = {  # the package that a result is of need not be the one that it is shown with
        commit: [release.sglang for release in releases if release.commit == commit]
        for commit in dict.fromkeys(release.commit for release in releases)
    }
    below = [f"- of commit `{commit}`: {', '.join(found)}" for commit, found in of.items()]
    tried = {release.sglang for release in releases if release.parts.keys() >= PARTS.keys()}
    missing = [version for version in VERSIONS if version not in tried]
    below += legend(releases)
    below += [f"- not tried in all of these parts: {', '.join(missing)}"] if missing else []
    return "\n".join([drawn, "", *below]) + "\n"


def legend(releases: Sequence[Release]) -> list[str]:
    """A line for each part: its files, and where they ran when that was not everywhere."""
    lines = []
    for name in PARTS:
        ran = {r.sglang: set(r.parts[name].files) for r in releases if name in r.parts}
        files = []
        for file in sorted(set().union(*ran.values())):
            where = [version for version, found in ran.items() if file in found]
            short = f"`{file.removesuffix('.py')}`"
            files.append(short if len(where) == len(ran) else f"{short} ({', '.join(where)} only)")
        if files:
            lines.append(f"- **{name}**: {', '.join(files)}")
    return lines


def tried(version: str, args: Namespace, commit: str, results: dict[str, Release]) -> Release:
    """Try one release, unless all is known of it; what is found goes to ``results``."""
    heading(f"SGLang {version}")
    release, earlier = Release(version, FAILED, None, commit, package_of()), results.get(version)
    if earlier is not None:
        if earlier.refused_at(commit):
            release = earlier
        release.parts = earlier.still_valid(commit, args.parts)
        if release.parts:
            release.status, release.packages = earlier.status, earlier.packages
    if release.status == REFUSED or set(args.parts) <= set(release.parts):
        say(f"   {version} {release.status} before, at this commit")
        return release
    try:
        try_release(release, args.work_dir, args.parts)
    finally:
        if not args.keep:
            shutil.rmtree(args.work_dir / version, ignore_errors=True)
    say(f"   {version} {release.status}" + (f": {release.reason}" if release.reason else ""))
    results[version] = release
    store_results(results)
    return release


def main() -> int:
    """Try every release, keep what was found, show it."""
    args = parse_arguments()
    args.work_dir = args.work_dir.expanduser().absolute()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    try:
        if args.newest:
            return try_newest(args.work_dir, keep=args.keep)
        commit = commit_of(TESTED_PATHS)
        versions = args.versions
        if versions is None:
            log = args.work_dir / "tools-install.log"
            log.write_text("")
            versions = [*VERSIONS, *newer_versions(args.work_dir, log)]
    except (SetupError, OSError) as failure:
        return failed(failure)
    results = load_results()
    found = [tried(version, args, commit, results) for version in versions]
    heading("Results")
    say(table(in_order({release.sglang: release for release in found})))
    if args.write is not None:
        content = table(in_order(results))
        args.write.write_text(inserted(args.write.read_text(), PART_OF_DOCUMENT, content))
    return 0 if all(release.status in (PASSED, INCOMPLETE, REFUSED) for release in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
