"""What the README says is so: every mode has its tests, every generated part is up to date."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest

import document_tables
import draw_idea
import gpu_report
import mode_table
import plot_prefill
import result_ages
import version_matrix
from generated import inserted
from sglang_gemma4_yoco import settings

REPO = Path(__file__).resolve().parents[3]
MODES, UNSERVED, RELEASE = mode_table.load()


def missing_tests(names: Iterable[str]) -> list[str]:
    """Of files and tests below ``test/srt``, those that are not there; ``*`` ends a name."""
    missing = []
    for name in names:
        file, _, test = name.partition("::")
        path = REPO / "test" / "srt" / f"{file}.py"
        pattern = rf"^ *def {re.escape(test)}\(".replace(r"\*", r"\w*") if test else "^def test_"
        if not path.is_file() or not re.search(pattern, path.read_text(), re.MULTILINE):
            missing.append(name)
    return missing


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.situation[:40])
def test_every_mode_has_its_tests(mode: mode_table.Mode) -> None:
    assert missing_tests(mode.shown_by) == []
    assert mode.levels
    assert "for now" not in mode.what


def test_a_missing_test_is_missed() -> None:
    there = ["scripts/test_readme", "scripts/test_readme::test_every_*"]
    absent = ["unit/test_nothing", "scripts/test_readme::test_nothing", "unit/test_readme"]
    assert missing_tests(there + absent) == absent


def test_a_mode_that_nothing_shows_is_no_mode() -> None:
    for shown_by in ([], ["models/test_gemma4_yoco_fast_prefill"], ["scripts/test_readme"]):
        with pytest.raises(ValueError, match="shown by"):
            _ = mode_table.Mode("a situation", "active", shown_by).levels
    assert mode_table.Mode("a situation", "active", (), "a file").levels == [mode_table.READ]
    both = mode_table.Mode("a situation", "active", ("unit/test_a", "server/test_b"))
    assert both.levels == ["real server", "gate alone"]


@pytest.mark.parametrize(
    "script",
    [document_tables, gpu_report, mode_table, result_ages],
    ids=lambda script: script.__name__,
)
def test_documents_are_up_to_date(script: ModuleType) -> None:
    """If this fails: run the script with ``--write``."""
    assert script.main([]) == 0


def test_results_of_earlier_code_are_named() -> None:
    of_two = {"a.json": {"commit": "c", "package": "p"}, "b.json": [{"commit": "d"}]}
    assert "| `a.json` | `c` | yes |\n| `b.json` | `d` | no, " in result_ages.ages(of_two, "p")


@pytest.mark.parametrize("unserved", UNSERVED, ids=lambda unserved: unserved.situation[:40])
def test_sglang_stops_where_it_is_said_to(unserved: mode_table.Unserved) -> None:
    if version("sglang") != RELEASE:
        pytest.skip(f"the lines are those of SGLang {RELEASE}")
    source = files("sglang").joinpath("srt", *unserved.file.split("/")).read_text()
    assert unserved.text in source.splitlines()[unserved.line - 1]


def test_every_supported_release_has_passed_all_parts() -> None:
    """And the table of them is up to date."""
    results = version_matrix.load_results()
    table = version_matrix.table(version_matrix.in_order(results))
    page = (REPO / "docs" / "compatibility.md").read_text()
    assert inserted(page, version_matrix.PART_OF_DOCUMENT, table) == page
    assert {*version_matrix.VERSIONS} <= {*results}
    for release in results.values():
        assert release.status in (version_matrix.PASSED, version_matrix.REFUSED), release
        assert release.status == version_matrix.REFUSED or {*release.parts} == {
            *version_matrix.PARTS
        }


def test_figures_in_prose_are_those_of_the_results() -> None:
    """README: a decode step's cost, how near log-probabilities are; and that no answer differs."""
    gates = [document["gate"] for document in document_tables.results("prefill_*.json")]
    assert max(gate["decode_us"] for gate in gates) < 1
    for document in document_tables.results("random_workload_*.json"):
        for compared in document["comparisons"]:
            assert compared["largest_difference"] < 2e-5
            assert compared["differences"] == []


def test_measurements_are_up_to_date() -> None:
    assert sum(len(plot_prefill.results(kind)) for kind in plot_prefill.KINDS) > 5
    for kind in plot_prefill.KINDS:
        page = (plot_prefill.RESULTS / f"{kind}.md").read_text()
        assert plot_prefill.written(kind, page) == page


def test_a_page_that_is_out_of_date_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**settings.VARIABLES}
    del changed[settings.name_of("audit")]
    monkeypatch.setattr(settings, "VARIABLES", changed)
    assert document_tables.main([]) == 1


PICTURES = {
    draw_idea: list(map(draw_idea.picture, draw_idea.THEMES)),
    plot_prefill: [plot_prefill.PICTURE],
}


@pytest.mark.parametrize("script", PICTURES, ids=lambda script: script.__name__)
def test_the_pictures_are_up_to_date(script: ModuleType) -> None:
    """Other releases of Matplotlib draw other files."""
    for picture in PICTURES[script]:
        if f"Matplotlib v{version('matplotlib')}," not in picture.read_text():
            pytest.skip(f"another Matplotlib has drawn {picture}")
    assert script.main([]) == 0
