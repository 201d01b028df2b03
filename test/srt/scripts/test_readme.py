"""What the README says is so: every mode has its tests, every generated part is up to date."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import gpu_report
import mutation_check
import plot_prefill
import version_matrix
from generated import inserted

REPO = Path(__file__).resolve().parents[3]
README = (REPO / "README.md").read_text()
MODES = README.partition("| situation | what happens | shown by |")[2].partition("\n\n")[0]
ROWS = [row for row in MODES.splitlines() if row.startswith("| ")]


def missing_tests(cell: str) -> list[str]:
    """What a cell names and ``test/srt`` lacks.

    A name is a file's, ``file::test``, or a test's in the file named last; ``*`` stands for the
    rest of a name.
    """
    missing, source = [], ""
    for name in re.findall(r"`((?:models/)?test_[\w:*]+)`", cell):
        file, _, test = name.rpartition("::") if "::" in name else (name, "", "")
        found = [*(REPO / "test" / "srt").glob(f"*/{file.rpartition('/')[2]}.py")]
        if found:
            [path] = found
            source = path.read_text()
        elif not test:
            test = name
        pattern = rf"^ *def {re.escape(test)}\(".replace(r"\*", r"\w*")
        if not source or (test and not re.search(pattern, source, re.MULTILINE)):
            missing.append(name)
    return missing


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_every_mode_has_its_tests(row: str) -> None:
    cell = row.split("|")[3]
    assert "`test_" in cell or "`models/test_" in cell
    assert missing_tests(cell) == []


def test_a_missing_test_is_missed() -> None:
    assert missing_tests("`test_readme::test_every_*`, `test_a_missing_test_is_missed`") == []
    assert missing_tests("`test_nothing`, `test_readme::test_nothing`, `test_nor_this`") == [
        "test_nothing",
        "test_readme::test_nothing",
        "test_nor_this",
    ]


def test_the_modes_are_a_table() -> None:
    assert len(ROWS) > 30


def test_gpu_figures_are_up_to_date() -> None:
    assert gpu_report.main(["--check", str(REPO / "README.md")]) == 0


def test_compatibility_table_is_up_to_date() -> None:
    results = version_matrix.load_results(version_matrix.RESULTS)
    table = version_matrix.table(version_matrix.in_order(results))
    assert inserted(README, version_matrix.PART_OF_DOCUMENT, table) == README


def test_every_supported_release_has_passed_all_parts() -> None:
    results = version_matrix.load_results(version_matrix.RESULTS)
    assert {*version_matrix.VERSIONS} <= {*results}
    for release in results.values():
        assert release.status in (version_matrix.PASSED, version_matrix.REFUSED), release
        assert release.status == version_matrix.REFUSED or {*release.parts} == {
            *version_matrix.PARTS
        }


def test_mutation_table_is_up_to_date() -> None:
    measurements = (REPO / "benchmark" / "README.md").read_text()
    every, behavioural = (
        json.loads((version_matrix.RESULTS.parent / file).read_text())
        for file in (mutation_check.ALL, mutation_check.BEHAVIOURAL)
    )
    table = mutation_check.table(every, behavioural)
    assert inserted(measurements, mutation_check.PART_OF_DOCUMENT, table) == measurements
    for document in (every, behavioural):
        assert document["survivors"] == []
        assert document["not judged"] == []


def test_measurements_are_up_to_date() -> None:
    measurements = (REPO / "benchmark" / "README.md").read_text()
    results = [*version_matrix.RESULTS.parent.glob("prefill_*.json")]
    for kind in ("threshold", "host"):
        results += version_matrix.RESULTS.parent.glob(f"{kind}_*.json")
    assert len(results) > 5
    for path in results:
        table = plot_prefill.markdown(*plot_prefill.load(path))
        assert inserted(measurements, path.name, table) == measurements
