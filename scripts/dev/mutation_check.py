#!/usr/bin/env python3
"""Do the tests notice when the package is broken?

``mutations.toml`` breaks the package in named ways. For each of them the checkout is copied, the
copy broken, and the tests of ``forward/``, ``triton/`` and ``server/`` run until the first
failure: those of what the model computes and of what clients see. A mutation is *caught* when a
test fails that passes on the unbroken copy, and *survives* when all pass.

    python scripts/dev/mutation_check.py --results benchmark/results \\
        --write benchmark/results/mutations.md
    python scripts/dev/mutation_check.py --only gate.py    # those of one file; or part of a name
    python scripts/dev/mutation_check.py --first           # with the tests named in the list alone

With ``--first`` a mutation that those do not notice stays without a verdict.

The list names the tests that should notice each mutation (``first``). They run first, so that all
mutations take less than an hour on two cores (``--jobs``). Before any test counts, the same tests
run on the unbroken copy: a test that fails there is left out, and the time that they take there
sets the limit after which a broken copy counts as hanging and all its processes are killed.

After each mutation ``mutations.json`` is rewritten. A run that was cut short, or whose list or
tests have changed, goes on where it was: a mutation stays caught while the package, what tests
share, and the file that caught it are as they were; one that survived is judged again whenever any
test has changed.

Output contract: a line for each verdict and a table for people on stdout; the last line is one JSON
document. The exit status is 1 when a mutation survives or has no verdict yet, and 2 when one no
longer fits the source.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import (
    REPO,
    SetupError,
    command_line,
    commit_of,
    failed,
    package_of,
    say,
    write_whole,
)
from generated import inserted, markdown
from mutations import MUTATIONS, PACKAGE, Mutation, StaleMutationError, broken

TESTS = Path("test") / "srt"
TESTED_PATHS = (PACKAGE, "test", ":(exclude)test/srt/scripts", "pyproject.toml")
# What every test of the package depends on, besides its own file.
SHARED_PATHS = (
    PACKAGE,
    "test/reference",
    "test/srt/harness",
    "test/srt/conftest.py",
    "pyproject.toml",
)
PART_OF_DOCUMENT = "mutations"
BEHAVIOUR = ("forward", "triton", "server")
CONTROL_LIMIT = 2400.0  # seconds
RESULTS = "mutations.json"
# What takes longest to import, and nothing of the package: imported once, then forked.
PRELOADED = (
    "pytest",
    "hypothesis",
    "transformers",
    "sglang.srt.models.gemma4_causal",
    "sglang.srt.models.gemma4_mm",
    "sglang.srt.models.registry",  # and with it all models of SGLang's
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.managers.scheduler",
    "sglang.benchmark.one_batch",
    "sglang_gemma4_reference.engine",
)
_TREE = "YOCO_MUTATION_TREE"  # in the environment of every process that a copy's tests start


# ---------------------------------------------------------------- one run of some tests


@dataclass(frozen=True)
class Outcome:
    """What became of one run.

    Attributes:
        passed: how many tests passed.
        failed: full names of those that failed, in their order.
        died: how the process ended, when it did not end well; None otherwise.
        seconds: wall time.
    """

    passed: int
    failed: tuple[str, ...]
    died: str | None
    seconds: float


class Recorder:
    """A pytest plugin that notes what passes and what fails."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test that passed; name one that failed, in whichever phase."""
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        self.passed += report.when == "call" and report.passed

    def pytest_collectreport(self, report: Any) -> None:
        """Name a file that cannot be collected."""
        if report.failed:
            self.failed.append(report.nodeid)


def run_pytest(tree: Path, arguments: Sequence[str], notes: Path) -> None:
    """In a process of its own: run tests of ``tree``; what became of them goes to ``notes``."""
    with notes.with_suffix(".log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "test" / "reference")]),
        "OMP_NUM_THREADS": "1",
        "SGLANG_PLATFORM": "gemma4_cpu",
        "YOCO_TEST_MODELS": "2",
        _TREE: str(tree),
    }
    if _on_triton(arguments):
        os.environ["TRITON_INTERPRET"] = "1"
    os.chdir(tree)
    sys.path[:0] = [str(tree), str(tree / "test" / "reference")]
    # environment.py has imported this checkout's package; the tests are to find that of their tree.
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    # Processes that the tests fork would import this script first, and with it the package again.
    sys.modules["__main__"] = ModuleType("__main__")
    import pytest

    recorder = Recorder()
    # Its garbage collections at the end take as long as a test.
    without = ("cacheprovider", "xdist", "unraisableexception")
    options = [option for name in without for option in ("-p", f"no:{name}")]
    status = int(pytest.main([*options, *arguments], [recorder]))
    notes.write_text(json.dumps([status, recorder.passed, recorder.failed]))
    sys.stdout.flush()
    os._exit(0)  # a broken package may have left threads behind


def _on_triton(arguments: Sequence[str]) -> bool:
    return any(f"{TESTS}/triton" in argument for argument in arguments)


def started_by(tree: Path) -> list[psutil.Process]:
    """The processes that a tree's tests have started; servers are in sessions of their own."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_TREE) == str(tree):
                found.append(process)
    return found


def kill_all(tree: Path, pid: int) -> None:
    """Kill a test process with all its children, and whatever else the tree's tests started."""
    doomed = started_by(tree)
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        doomed += [*root.children(recursive=True), root]
    for process in doomed:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(doomed, timeout=30)


class Workplace:
    """Two copies of the checkout, one of them to be broken; used by one thread."""

    def __init__(self, directory: Path) -> None:
        self.whole = directory / "whole"
        self.broken = directory / "broken"
        for tree in (self.whole, self.broken):
            copy_checkout(tree)

    def run(
        self, tree: Path, tests: Sequence[str], limit: float, *options: str, left_out: Sequence[str]
    ) -> Outcome:
        """Run tests, named relative to ``test/srt``, in one of the copies."""
        arguments = [*options, *(f"--deselect={TESTS / name}" for name in left_out)]
        arguments += [str(TESTS / name) for name in tests]
        notes = tree.with_suffix(".json")
        notes.unlink(missing_ok=True)
        began = time.monotonic()
        died = self._run_process(tree, arguments, notes, limit)
        seconds = round(time.monotonic() - began, 1)
        if not notes.exists():
            return Outcome(0, (), died or "the test process died", seconds)
        status, passed, failed = json.loads(notes.read_text())
        if status > 1 and not failed:
            log = notes.with_suffix(".log").read_text(errors="replace")
            raise SetupError(f"pytest {' '.join(arguments)} ended with {status}:\n{log[-3000:]}")
        return Outcome(
            passed, tuple(name.partition("test/srt/")[2] for name in failed), died, seconds
        )

    def _run_process(
        self, tree: Path, arguments: list[str], notes: Path, limit: float
    ) -> str | None:
        """How the process that runs the tests ended, unless it ended well."""
        # Triton decides at import whether it interprets, so there nothing can be preloaded.
        context: Any = multiprocessing.get_context(
            "spawn" if _on_triton(arguments) else "forkserver"
        )
        process = context.Process(target=run_pytest, args=(tree, arguments, notes))
        process.start()
        try:
            process.join(limit)
            code = process.exitcode
        finally:
            kill_all(tree, process.pid or 0)
        if code is None:
            return f"not done after {limit:.0f} s"
        return None if code == 0 else f"the test process ended with {code}"


def copy_checkout(target: Path) -> None:
    """Copy what the tests need of this checkout, uncommitted changes included."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPO, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (REPO / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, target / name)


# ---------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Verdict:
    """What became of one mutation.

    Attributes:
        change: ``Mutation.change``.
        sources: ``sources_of`` the tests that caught it, or of all.
        caught_by: the first test that failed, or how the process that ran the tests ended; None
            for a survivor.
        tests: what was run when it was caught.
        seconds: how long its tests ran.
    """

    name: str
    file: str
    change: str
    sources: str | None
    caught_by: str | None
    tests: tuple[str, ...] | None
    seconds: float


@dataclass(frozen=True)
class Control:
    """The same tests on the unbroken copy.

    Attributes:
        tests: what was run, relative to ``test/srt``.
        sources: ``sources_of`` them.
        failed: tests that fail there, so that they catch nothing.
    """

    tests: tuple[str, ...]
    sources: str | None
    passed: int
    failed: tuple[str, ...]
    seconds: float

    @property
    def limit(self) -> float:
        """Seconds after which a broken copy counts as hanging; well beyond what was needed."""
        return 120 + 5 * self.seconds


class Controls:
    """Every selection of tests that was needed, run once on the unbroken copy."""

    def __init__(self, known: Iterable[Control] = ()) -> None:
        self.all = {control.tests: control for control in known}
        self._lock = threading.Lock()

    def of(self, chosen: tuple[str, ...], place: Workplace) -> Control:
        """The control of these tests."""
        if chosen not in self.all:
            with self._lock:
                if chosen not in self.all:
                    self.all[chosen] = self._run(chosen, place)
        return self.all[chosen]

    @staticmethod
    def _run(chosen: tuple[str, ...], place: Workplace) -> Control:
        done = place.run(place.whole, chosen, CONTROL_LIMIT, left_out=())
        if not done.passed or done.died is not None:
            raise SetupError(f"{' '.join(chosen)} on the unbroken package: {done}")
        for test in done.failed:
            say(f"   fails on the unbroken package, and is left out: {test}")
        return Control(chosen, sources_of(chosen), done.passed, done.failed, done.seconds)


def selections(mutation: Mutation, *, only_first: bool) -> Iterator[tuple[str, ...]]:
    """What is run, one after the other."""
    if mutation.first:
        yield (mutation.first,)
    if not only_first:
        for folder in BEHAVIOUR:
            for path in sorted((REPO / TESTS / folder).glob("test_*.py")):
                yield (f"{folder}/{path.name}",)


def judge(
    mutation: Mutation,
    place: Workplace,
    controls: Controls,
    wanted: Iterable[tuple[str, ...]],
) -> Verdict:
    """Break the copy, and run tests on it until one notices."""
    package = place.broken / PACKAGE
    shutil.rmtree(package)
    shutil.copytree(place.whole / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / mutation.file
    path.write_text(broken(mutation, path.read_text()))
    seconds, caught_by, tests = 0.0, None, None
    for chosen in wanted:
        control = controls.of(chosen, place)
        done = place.run(place.broken, chosen, control.limit, "-x", left_out=control.failed)
        seconds += done.seconds
        caught_by = done.failed[0] if done.failed else done.died
        if caught_by is not None:
            tests = chosen
            break
    about = (mutation.name, mutation.file, mutation.change, sources_of(tests))
    return Verdict(*about, caught_by, tests, round(seconds, 1))


@cache  # many verdicts have the same tests, and what runs is a copy made once as well
def sources_of(tests: tuple[str, ...] | None) -> str | None:
    """What a verdict depends on, in twelve digits; None if some of it is not committed, or gone.

    Args:
        tests: files, folders or single tests, relative to ``test/srt``; None for all.
    """
    files = [name.partition("::")[0] for name in tests or BEHAVIOUR]
    paths = [*SHARED_PATHS, *(str(TESTS / file) for file in files)]
    changed = ["git", "status", "--porcelain", "--", *paths]
    if subprocess.run(changed, cwd=REPO, check=True, capture_output=True).stdout:
        return None
    objects = ["git", "rev-parse", *(f"HEAD:{path}" for path in paths)]
    found = subprocess.run(objects, cwd=REPO, capture_output=True)
    return None if found.returncode else sha256(found.stdout).hexdigest()[:12]


# ---------------------------------------------------------------- the results


class Results:
    """The document of all verdicts, rewritten after every mutation."""

    def __init__(self, directory: Path | None, commit: str) -> None:
        self._path = directory and directory / RESULTS
        self._commit = commit
        self._lock = threading.Lock()
        self.verdicts: dict[str, Verdict] = {}
        self.controls = Controls()
        if self._path is not None and self._path.exists():
            self._read(json.loads(self._path.read_text()))

    def _read(self, before: dict[str, Any]) -> None:
        listed = {(mutation.name, mutation.change) for mutation in MUTATIONS}
        for record in before["verdicts"]:
            verdict = Verdict(**record | {"tests": record["tests"] and tuple(record["tests"])})
            if (verdict.name, verdict.change) in listed and _holds(verdict):
                self.verdicts[verdict.name] = verdict
        found = [
            Control(**record | {key: tuple(record[key]) for key in ("tests", "failed")})
            for record in before["controls"]
        ]
        self.controls = Controls(filter(_holds, found))

    def add(self, verdict: Verdict) -> None:
        """Keep the verdict on one mutation."""
        with self._lock:
            self.verdicts[verdict.name] = verdict
            if self._path is not None:
                write_whole(self._path, written(self.document()))

    def document(self) -> dict[str, Any]:
        """All that is known."""
        ordered = [self.verdicts[m.name] for m in MUTATIONS if m.name in self.verdicts]
        return {
            "commit": self._commit,
            "package": package_of(),
            "sglang": version("sglang"),
            "torch": version("torch"),
            "mutations": len(MUTATIONS),
            "not judged": [m.name for m in MUTATIONS if m.name not in self.verdicts],
            "survivors": [verdict.name for verdict in ordered if verdict.caught_by is None],
            "verdicts": [asdict(verdict) for verdict in ordered],
            "controls": [asdict(control) for _, control in sorted(self.controls.all.items())],
        }


def _holds(found: Verdict | Control) -> bool:
    """Whether what it depends on is as it was."""
    return found.sources is not None and found.sources == sources_of(found.tests)


def written(document: dict[str, Any]) -> str:
    """JSON with a line for each entry, and for each verdict and control in it."""
    entries = []
    for name, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and any(isinstance(record, dict) for record in value):
            text = "[\n" + ",\n".join(f"  {json.dumps(record)}" for record in value) + "\n ]"
        entries.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def table(document: dict[str, Any]) -> str:
    """The document in Markdown: for each file, how many the tests of each folder have caught."""
    caught: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in document["verdicts"]:
        caught[verdict["file"]][(verdict["caught_by"] or "").partition("/")[0]] += 1
    rows = [
        (f"`{file}`", by.total(), *(by[folder] or "-" for folder in BEHAVIOUR))
        for file, by in caught.items()
    ]
    first, *others = (f"`{folder}/`" for folder in BEHAVIOUR)
    return (
        f"SGLang {document['sglang']}, torch {document['torch']}, commit `{document['commit']}`. "
        f"{document['mutations']} mutations; survivors: {_names(document['survivors'])}; not "
        f"judged: {_names(document['not judged'])}.\n\n"
        + markdown(("file", "mutations", f"caught by {first}", *others), rows)
    )


def _names(names: Sequence[str]) -> str:
    if len(names) > 10:
        return f"{len(names)}, which the document names"
    return ", ".join(names) or "none"


# ---------------------------------------------------------------- the command


def parse_arguments() -> Namespace:
    """The command line; see ``--help``."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--only", default="", help="part of file, name or first tests of the wanted mutations"
    )
    parser.add_argument("--first", action="store_true", help="nothing but the tests in the list")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="keep the verdicts there")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table there")
    return parser.parse_args()


def preload() -> None:
    """Import once, in the process that all others are forked from."""
    os.environ |= {"OMP_NUM_THREADS": "1", "SGLANG_PLATFORM": "gemma4_cpu"}
    for name in [name for name in os.environ if name.startswith("SGLANG_GEMMA4_YOCO")]:
        del os.environ[name]  # a setting of the caller's own
    # In the environment: the process to fork from reads nothing else.
    os.environ["PYTHONPATH"] = str(REPO / "test" / "reference")
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))


def judge_all(wanted: Sequence[Mutation], results: Results, jobs: int, *, only_first: bool) -> None:
    """Judge the mutations side by side; print and keep each verdict at once."""
    places = threading.local()
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(jobs) as pool:

        def work(mutation: Mutation) -> None:
            if not hasattr(places, "mine"):
                places.mine = Workplace(Path(tempfile.mkdtemp(dir=directory)))
            name = f"{mutation.file}: {mutation.name}"
            chosen = selections(mutation, only_first=only_first)
            try:
                verdict = judge(mutation, places.mine, results.controls, chosen)
            except SetupError as failure:  # it stays without a verdict, and the others go on
                say(f"{name}: {failure}")
                return
            if verdict.caught_by is None and only_first:  # others may notice it
                say(f"{name}: not noticed by its first tests")
                return
            results.add(verdict)
            say(f"{name} ({verdict.seconds:.0f} s): {verdict.caught_by or 'SURVIVED'}")

        for done in [pool.submit(work, mutation) for mutation in wanted]:
            done.result()


def main() -> int:
    """Judge every mutation, and show the verdicts."""
    args = parse_arguments()
    try:
        for mutation in MUTATIONS:  # all of them before the first test runs
            broken(mutation, (REPO / PACKAGE / mutation.file).read_text())
        commit = commit_of(TESTED_PATHS)
    except (StaleMutationError, SetupError) as failure:
        return failed(failure)
    results = Results(args.results, commit)
    named = [m for m in MUTATIONS if args.only in f"{m.file} {m.name} {m.first}"]
    preload()
    wanted = [mutation for mutation in named if mutation.name not in results.verdicts]
    judge_all(wanted, results, args.jobs, only_first=args.first)
    document = results.document()
    say(table(document))
    if args.write is not None:
        content = inserted(args.write.read_text(), PART_OF_DOCUMENT, table(document))
        args.write.write_text(content)
    short = {key: document[key] for key in ("commit", "mutations", "survivors", "not judged")}
    print(json.dumps(short))
    known = all(mutation.name in results.verdicts for mutation in named)
    return 0 if known and not document["survivors"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
