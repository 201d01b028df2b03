"""``scripts/dev/mutation_check.py`` and its list: every mutation fits the source of today."""

from __future__ import annotations

import ast
import dataclasses
import re
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


def verdict(mutation: Mutation, caught_by: str | None) -> Verdict:
    tests = ONE_FILE if caught_by else None
    sources = mutation_check.sources_of(tests)
    return Verdict(mutation.name, mutation.file, mutation.change, sources, caught_by, tests, 1.5)


def test_a_verdict_is_kept_as_long_as_its_tests_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A survivor is judged again after any change of a test."""
    sources: dict[Any, str | None] = {ONE_FILE: "one", None: "all"}  # what git would know
    monkeypatch.setattr(mutation_check, "sources_of", sources.get)
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
    rewritten = dataclasses.replace(caught, new="another")
    with monkeypatch.context() as patch:
        patch.setattr(mutation_check, "MUTATIONS", (rewritten, *MUTATIONS[1:]))
        assert Results(tmp_path, "ba9876543210").verdicts == {}
    for now in ("another", None):  # the file that caught it: changed, or changed and not committed
        sources[ONE_FILE] = now
        changed = Results(tmp_path, "ba9876543210")
        assert (changed.verdicts, changed.controls.all) == ({}, {})


def test_what_catches_a_mutation(tmp_path: Path) -> None:
    """A test that fails on the broken copy alone, in processes that import that copy."""
    place = mutation_check.Workplace.__new__(mutation_check.Workplace)
    place.whole, place.broken = tmp_path / "whole", tmp_path / "broken"
    for tree in (place.whole, place.broken):
        (tree / PACKAGE).mkdir(parents=True)
        (tree / PACKAGE / "__init__.py").touch()
        (tree / PACKAGE / "rows.py").write_text("a, b = 1, 1")
        (tree / mutation_check.TESTS / "unit").mkdir(parents=True)
        (tree / mutation_check.TESTS / "unit" / "test_a.py").write_text(
            f"from {PACKAGE} import rows\n"
            "def test_that_always_fails(): assert False\n"
            "def test_a(): assert rows.a == 1\n"
        )
    found = []
    controls = mutation_check.Controls()
    for new in ("a, b = 2, 1", "a, b = 1, 2"):
        mutation = Mutation("a name", "rows.py", "a, b = 1, 1", new, "unit/test_a.py")
        found.append(mutation_check.judge(mutation, place, controls, [("unit/test_a.py",)]))
    assert [verdict.caught_by for verdict in found] == ["unit/test_a.py::test_a", None]
