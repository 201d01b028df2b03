"""What the documents say is so: every mode has its tests, every table is up to date."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import pytest

from scripts import plot_prefill, result_files, tables
from scripts.dev import version_matrix
from sglang_gemma4_yoco import settings

REPO = Path(__file__).resolve().parents[3]
#: How far a proof goes, by the folders of its tests in ``test/srt``; the strongest one first.
LEVELS = {"server": "real server", "triton": "ModelRunner", "forward": "ModelRunner"}
LEVELS["unit"] = "gate alone"


def modes() -> list[list[str]]:
    """The rows of the first table of docs/modes.md: situation, what happens, shown on, by."""
    page = (REPO / "docs" / "modes.md").read_text()
    table = re.search(r"(?:^\|.*\n)+", page, re.MULTILINE)
    assert table is not None
    found = []
    for row in table[0].splitlines()[2:]:
        _, *cells, _ = re.split(r" *(?<!\\)\| *", row)
        found.append(cells)
    return found


def missing_tests(names: Iterable[str]) -> list[str]:
    """Of files and tests below ``test/srt``, those that are not there; ``*`` ends a name."""
    missing = []
    for name in names:
        file, _, test = name.partition("::")
        path, pattern = REPO / "test" / "srt" / f"{file}.py", "^def test_"
        if test:
            pattern = rf"^ *def {re.escape(test)}\(".replace(r"\*", r"\w*")
        if not path.is_file() or not re.search(pattern, path.read_text(), re.MULTILINE):
            missing.append(name)
    return missing


@pytest.mark.parametrize("mode", modes(), ids=lambda mode: mode[0][:40])
def test_every_mode_has_its_tests(mode: list[str]) -> None:
    *_, shown_on, by = mode
    levels = []
    for folder, level in LEVELS.items():
        if f"`{folder}/" in by and level not in levels:
            levels.append(level)
    assert shown_on.removesuffix("read, not run").rstrip(", ") == ", ".join(levels)
    assert levels or shown_on == "read, not run"


def test_every_promise_has_its_tests() -> None:
    page = (REPO / "docs" / "promises.md").read_text()
    rows = re.findall(r"^\| \*\*\d\. .*$", page, re.MULTILINE)
    assert len(rows) == page.count("\n| **")
    for row in rows:
        *_, by, _ = row.split("|")
        assert re.search(r"`\w+/test_\w+", by)


@pytest.mark.parametrize("page", (REPO / "docs").rglob("*.md"), ids=lambda page: page.name)
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    names = re.findall(r"`(?:test/srt/)?(\w+/test_\w+[\w:*]*)(?:\.py)?`", page.read_text())
    assert missing_tests(names) == []


def test_files_that_only_a_release_runs_are_listed() -> None:
    """Else a promise could rest on a test that no ordinary run has."""
    listed = (REPO / "test" / "README.md").read_text()
    files = []
    for path in (REPO / "test" / "srt").rglob("test_*.py"):
        if re.search(r"^pytestmark = pytest.mark.release$", path.read_text(), re.MULTILINE):
            files.append(path.stem)
    assert files
    assert [name for name in files if f"`{name}`" not in listed] == []


def test_a_missing_test_is_missed() -> None:
    there = ["scripts/test_readme", "scripts/test_readme::test_every_*"]
    absent = ["unit/test_nothing", "scripts/test_readme::test_nothing", "unit/test_readme"]
    assert missing_tests(there + absent) == absent


def test_the_tables_are_up_to_date() -> None:
    """If this fails: run ``scripts/tables.py --write``."""
    assert tables.main([]) == 0


def test_every_supported_release_has_passed() -> None:
    releases = json.loads(version_matrix.FILE.read_text())
    passed = {release["sglang"] for release in releases if not release["failed"]}
    assert passed == {*version_matrix.VERSIONS}


@pytest.mark.parametrize("source", ["a setting", "a result"])
def test_a_table_that_is_out_of_date_is_noticed(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if source == "a setting":
        changed = {**settings.VARIABLES}
        del changed[settings.name_of("audit")]
        monkeypatch.setattr(settings, "VARIABLES", changed)
    else:
        shutil.copytree(result_files.RESULTS, tmp_path / "results")
        monkeypatch.setattr(result_files, "RESULTS", tmp_path / "results")
        assert tables.main([]) == 0
        [path] = (tmp_path / "results").glob("latency_*.json")
        document = json.loads(path.read_text())
        document["points"][0]["on"]["ttft_ms"]["95"] += 1
        path.write_text(json.dumps(document))
    assert tables.main([]) == 1


def test_the_pictures_are_up_to_date() -> None:
    """Other releases of Matplotlib draw other files."""
    for picture, (contents, style) in plot_prefill.PICTURES.items():
        if f"Matplotlib v{version('matplotlib')}," not in picture.read_text():
            pytest.skip("another Matplotlib has drawn it")
        assert plot_prefill.draw(contents, style) == picture.read_text()
