"""What the documents say is so: every mode has its tests, every written part is up to date."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from scripts.dev import version_matrix
from scripts.docs import document_tables, plot_prefill, results
from scripts.result_files import package_of
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
    """Nor is one without its exceptions."""
    page = (REPO / "docs" / "promises.md").read_text()
    rows = re.findall(r"^\| \*\*\d\. .*$", page, re.MULTILINE)
    assert len(rows) == page.count("\n| **")
    for row in rows:
        _, _, exceptions, by, _ = row.split("|")
        assert re.search(r"`\w+/test_\w+", by)
        assert len(exceptions) > 10


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


@pytest.mark.parametrize("script", [document_tables, results], ids=lambda script: script.__name__)
def test_documents_are_up_to_date(script: ModuleType) -> None:
    """If this fails: run the script with ``--write``."""
    assert script.main([]) == 0


def test_results_of_earlier_code_are_named() -> None:
    origin = {"commit": "c", "command": "python x.py"}
    files = {"a.json": origin | {"package": package_of()}, "b.json": origin}
    told = results.sources(files)
    assert "- `a.json`: the package as it is, commit `c`" in told
    assert "- `b.json`: **an earlier package**, commit `c`" in told


def test_a_changed_data_file_is_another_package(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("x = 1\n")
    (tmp_path / "names.txt").write_text("one\n")
    before = package_of(tmp_path)
    assert package_of(tmp_path) == before
    (tmp_path / "names.txt").write_text("two\n")
    assert package_of(tmp_path) != before


@pytest.mark.parametrize("page", (REPO / "benchmark").rglob("*.md"), ids=lambda page: page.name)
def test_no_table_of_results_is_wider_than_six_columns(page: Path) -> None:
    assert max(line.count(" | ") for line in page.read_text().splitlines()) < 6


def test_every_supported_release_has_passed() -> None:
    passed = re.findall(r"^\| (0\.5\.\d+) \|", results.releases(), re.MULTILINE)
    assert {*passed} == {*version_matrix.VERSIONS}


def test_figures_in_prose_are_those_of_the_results() -> None:
    """README and docs/promises.md: what is decided in a decode step and in a prefill that runs as
    stock, how near log-probabilities are; and that no answer differs.
    """
    readme, promises = ((REPO / name).read_text() for name in ("README.md", "docs/promises.md"))
    [(least, most)] = re.findall(r"(\d+) to (\d+) microseconds", readme)
    assert "less than a microsecond" in readme
    for document in document_tables.results("prefill_*.json"):
        assert document["gate"]["decode_us"] < 1
        assert int(least) <= document["gate"]["ineligible_prefill_us"] <= int(most)
    [nearest] = re.findall(r"log-probabilities are within (\d+e-\d+) of the stock", promises)
    for document in document_tables.results("random_workload_*.json"):
        for compared in document["comparisons"]:
            assert compared["largest_difference"] < float(nearest)
            assert compared["differences"] == []


def test_a_page_that_is_out_of_date_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**settings.VARIABLES}
    del changed[settings.name_of("audit")]
    monkeypatch.setattr(settings, "VARIABLES", changed)
    assert document_tables.main([]) == 1


def test_the_pictures_are_up_to_date() -> None:
    """Other releases of Matplotlib draw other files."""
    for picture in plot_prefill.PICTURES:
        if f"Matplotlib v{version('matplotlib')}," not in picture.read_text():
            pytest.skip("another Matplotlib has drawn it")
    assert plot_prefill.main([]) == 0
