"""``scripts/dev/mutation_check.py`` and its list: every mutation fits the source of today."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from configparser import ConfigParser
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import mutation_check
from mutation_check import Control, Results, Verdict
from mutations import (
    LISTED,
    MUTATIONS,
    PACKAGE,
    Mutation,
    StaleMutationError,
    broken,
    table_entries,
)
from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.captured import graphs
from sglang_gemma4_yoco.core import gate
from sglang_gemma4_yoco.loading import limits

REPO = Path(__file__).resolve().parents[3]
TESTS = REPO / "test" / "srt"
ONE_FILE = ("forward/test_forward.py",)


def test_every_mutation_changes_the_package() -> None:
    """And there are some of each file."""
    package = REPO / PACKAGE
    for path in package.rglob("*.py"):
        source = path.read_text()
        mutations = [m for m in MUTATIONS if m.file == str(path.relative_to(package))]
        assert mutations or (path.name == "__init__.py" and "\ndef " not in source), path
        for mutation in mutations:
            ast.parse(broken(mutation, source))
            old, new = (re.sub(r"#.*|\s", "", text) for text in (mutation.old, mutation.new))
            assert old != new, mutation.name


def test_names_tell_mutations_apart() -> None:
    assert [name for name, n in Counter(m.name for m in MUTATIONS).items() if n > 1] == []
    changes = Counter((m.file, m.old, m.new) for m in MUTATIONS)
    assert [change for change, n in changes.items() if n > 1] == []


def test_the_first_tests_exist_and_show_behaviour() -> None:
    for first in {mutation.first for mutation in MUTATIONS}:
        file, _, test = first.partition("::")
        assert file.partition("/")[0] in mutation_check.BEHAVIOUR, first
        assert not test or test.partition("[")[0] in names_in(file), first


@cache
def names_in(file: str) -> set[str]:
    """What a file of tests defines."""
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def entries(table: Any) -> int:
    """How many there are, those of tables in it among them."""
    if not isinstance(table, dict):
        return len(table)
    return sum(entries(v) if isinstance(v, dict | set) else 1 for v in table.values())


def with_a_value(lists: ConfigParser) -> list[str]:
    """The names to which the package's lists give a value."""
    return [name for section in lists.sections() for name, value in lists.items(section) if value]


def test_every_entry_of_the_tables_is_a_mutation() -> None:
    counts = Counter(mutation.name.partition(" ")[0] for mutation in table_entries(LISTED))
    tables = {
        name: getattr(module, name)
        for module in (gate, limits, graphs, compat)
        for name in counts
        if hasattr(module, name)
    }
    tables["loading/limits.ini"] = [
        *limits._INDEPENDENT_ROWS,
        *limits.judged_arguments(),
        *with_a_value(limits._SECTIONS),
    ]
    names = [name for section in compat._NAMES.sections() for name in compat._NAMES[section]]
    tables["compat.ini"] = [*names, *with_a_value(compat._NAMES)]
    for name in ("MAIN_BACKENDS", "TAIL_BACKENDS", "CAPTURABLE_BACKENDS"):  # tests enter theirs
        tables[name] = {kind for kind in tables[name] if "." not in kind}
    assert counts == {name: entries(table) for name, table in tables.items()}
    assert {"REFUSING_FIELDS", "_REFUSED", "MAIN_BACKENDS"} <= counts.keys()


def test_a_stale_mutation_is_reported() -> None:
    mutation = Mutation("a name", "gate.py", "return 1", "return 2", "forward/test_forward.py")
    assert broken(mutation, "def f(): return 1") == "def f(): return 2"
    for source in ("def f(): return 3", "def f(): return 1\ndef g(): return 1"):
        with pytest.raises(StaleMutationError, match=r"'a name'.* times in gate\.py; bring"):
            broken(mutation, source)


def test_a_copys_tests_import_the_copys_package(tmp_path: Path) -> None:
    """And not this checkout's, of which the script itself has imported a part."""
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").touch()
    test = tmp_path / "test_it.py"
    test.write_text(
        f"import {PACKAGE}, pathlib\n"
        "def test_own():\n"
        f"    path = pathlib.Path({PACKAGE}.__file__)\n"
        "    assert path.parents[1] == pathlib.Path(__file__).parent\n"
    )
    code = "import sys, mutation_check as m; from pathlib import Path as P; "
    code += "m.run_pytest(P(sys.argv[1]), sys.argv[3:], P(sys.argv[2]))"
    notes = tmp_path / "notes.json"
    script = Path(mutation_check.__file__)
    command = [sys.executable, "-c", code, str(tmp_path), str(notes), str(test)]
    subprocess.run(command, cwd=script.parent, check=True)
    assert json.loads(notes.read_text()) == [0, 1, []]


def verdict(mutation: Mutation, caught_by: str | None) -> Verdict:
    tests = ONE_FILE if caught_by else None
    sources = mutation_check.sources_of(tests)
    return Verdict(mutation.name, mutation.file, mutation.change, sources, caught_by, tests, 1.5)


Sources = dict[tuple[str, ...] | None, str | None]


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    """What git would know of one file of tests, and of all tests."""
    found: Sources = {ONE_FILE: "one", None: "all"}
    monkeypatch.setattr(mutation_check, "sources_of", found.get)
    return found


def test_a_verdict_is_kept_as_long_as_its_tests_are(tmp_path: Path, sources: Sources) -> None:
    """A survivor is judged again after any change of a test."""
    caught, survivor, other = MUTATIONS[:3]
    results = Results(tmp_path, "0123456789ab")
    results.controls.all[ONE_FILE] = Control(ONE_FILE, "one", 3, ("x::a flaky test",), 2.0)
    results.add(verdict(caught, "forward/test_a.py::test_b[c | d]"))
    results.add(verdict(survivor, None))
    again = Results(tmp_path, "ba9876543210-dirty")
    assert again.verdicts == results.verdicts
    assert again.controls.all == results.controls.all
    document = again.document()
    assert document["survivors"] == [survivor.name]
    assert document["not judged"][0] == other.name
    assert len(document["not judged"]) == len(MUTATIONS) - 2
    sources[None] = "all but different"
    assert Results(tmp_path, "ba9876543210").verdicts.keys() == {caught.name}
    for now in ("another", None):  # the file that caught it: changed, or changed and not committed
        sources[ONE_FILE] = now
        changed = Results(tmp_path, "ba9876543210")
        assert (changed.verdicts, changed.controls.all) == ({}, {})


def test_sources_are_what_git_knows() -> None:
    first, other = (("forward/test_forward.py",), ("forward/test_donor.py::test_a[b c]",))
    found = [mutation_check.sources_of(tests) for tests in (first, other, None)]
    known = {sources for sources in found if sources is not None}
    assert len(known) == len([sources for sources in found if sources is not None])
    assert all(len(sources) == 12 for sources in known)


def test_a_mutation_that_was_written_anew_has_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: Sources
) -> None:
    first, *others = MUTATIONS
    Results(tmp_path, "0123456789ab").add(verdict(first, "a"))
    for changes, kept in (({"first": "elsewhere"}, True), ({"new": "another"}, False)):
        changed = dataclasses.replace(first, **changes)
        monkeypatch.setattr(mutation_check, "MUTATIONS", (changed, *others))
        assert (first.name in Results(tmp_path, "0123456789ab").verdicts) == kept


def test_the_table_counts_what_each_folder_has_caught() -> None:
    results = Results(None, "0123456789ab")
    first, second = MUTATIONS[:2]
    assert first.file == second.file
    results.add(verdict(first, None))
    results.add(verdict(second, "server/a.py::b"))
    written = mutation_check.table(results.document())
    assert f"survivors: {first.name}; not judged: {len(MUTATIONS) - 2}, which" in written
    assert "| file | mutations | caught by `forward/` | `triton/` | `server/` |" in written
    assert f"| `{first.file}` | 2 | - | - | 1 |" in written


BROKEN = {
    "a test that fails": (
        "import pytest\n@pytest.mark.parametrize('x', ['one, two'])\ndef test_a(x): assert not x",
        ["unit/test_a.py::test_a[one, two]"],
        None,
    ),
    "a file that cannot be read": ("import nothing_of_that_name", ["unit/test_a.py"], None),
    "a test that hangs": ("import time\ndef test_a(): time.sleep(99)", [], "not done after 5 s"),
    "a process that dies": ("import os\ndef test_a(): os._exit(7)", [], "ended with 7"),
    "a test that passes": ("def test_a(): pass", [], None),
}


@pytest.fixture
def place(tmp_path: Path) -> mutation_check.Workplace:
    """Copies without any of this checkout's files."""
    place = mutation_check.Workplace.__new__(mutation_check.Workplace)
    place.whole, place.broken = tmp_path / "whole", tmp_path / "broken"
    (place.broken / mutation_check.TESTS / "unit").mkdir(parents=True)
    return place


def test_tests_on_triton_are_interpreted(place: mutation_check.Workplace) -> None:
    folder = place.broken / mutation_check.TESTS / "triton"
    folder.mkdir()
    source = "import triton\ndef test_a(): assert triton.knobs.runtime.interpret"
    (folder / "test_a.py").write_text(source)
    assert place.run(place.broken, ["triton/test_a.py"], 300.0, left_out=()).good


@pytest.mark.parametrize("what", BROKEN)
def test_what_a_run_finds(place: mutation_check.Workplace, what: str) -> None:
    """In real processes; none of them is left."""
    source, failed, died = BROKEN[what]
    (place.broken / mutation_check.TESTS / "unit" / "test_a.py").write_text(source)
    limit = 5.0 if "hangs" in what else 300.0
    done = place.run(place.broken, ["unit/test_a.py"], limit, "-x", left_out=())
    assert list(done.failed) == failed
    assert (done.died or "").endswith(died or "")
    assert done.good == (what == "a test that passes")
    assert not mutation_check.started_by(place.broken)


def test_what_fails_on_the_unbroken_package_catches_nothing(
    place: mutation_check.Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, float, tuple[str, ...]]] = []

    def run(
        tree: Path, tests: list[str], limit: float, *_: str, left_out: tuple[str, ...]
    ) -> object:
        runs.append((tree.name, limit, left_out))
        return mutation_check.Outcome(5, () if left_out else ("a flaky one",), None, 10.0)

    monkeypatch.setattr(place, "run", run)
    for tree in (place.whole, place.broken):
        (tree / PACKAGE).mkdir(parents=True)
        (tree / PACKAGE / "rows.py").write_text("a = 1")
    mutation = dataclasses.replace(MUTATIONS[0], file="rows.py", old="a = 1", new="a = 2")
    controls = mutation_check.Controls()
    found = mutation_check.judge(mutation, place, controls, [ONE_FILE])
    assert found.caught_by is None
    assert (place.broken / PACKAGE / "rows.py").read_text() == "a = 2"
    limit = controls.of(ONE_FILE, place).limit
    assert limit >= 5 * 10.0
    assert runs == [
        ("whole", mutation_check.CONTROL_LIMIT, ()),
        ("broken", limit, ("a flaky one",)),
    ]
