"""Claims of the documents: every mode has its tests, every table is up to date."""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import sglang

from harness.documented import missing_tests
from scripts import plot_prefill, tables
from scripts.dev import version_matrix
from scripts.environment import REPO
from sglang_gemma4_yoco import settings
from sglang_gemma4_yoco.admission import arguments

#: Level of evidence -> the folders of its tests in ``test/srt``.
LEVELS = {
    "real server": {"server"},
    "process without a server": {"server"},
    "ModelRunner": {"triton", "forward"},
    "simulated GPU": {"rehearsal"},
    "gate alone": {"unit"},
}
#: The evidence for each row of docs/modes.md: tests by level, and what of SGLang was read.
EVIDENCE = json.loads((REPO / "test" / "srt" / "harness" / "modes.json").read_text())
README = (REPO / "README.md").read_text()
GENERATED = re.compile(r"<!-- (.+): begin -->.*<!-- \1: end -->", re.DOTALL)


def modes() -> dict[str, str]:
    """Return the remark of each configuration in docs/modes.md, except generated rows."""
    page = GENERATED.sub("", (REPO / "docs" / "modes.md").read_text())
    ours, _, _ = page.partition("## What SGLang itself does not serve")
    remarks = {}
    for row in re.findall(r"^\| .*", ours, re.MULTILINE):
        _, configuration, path, remark, _ = re.split(r" *\| *", row)
        if path != "fast prefill":  # the head
            assert path in ("active", "stock", "active or stock", "not supported"), row
            remarks[configuration] = remark
    return remarks


def test_what_loads_no_plugins() -> None:
    """docs/operating.md and docs/modes.md say so: it measures, or serves, stock."""
    package = Path(sglang.__file__).parent
    for file in ("benchmark/one_batch.py", "srt/ray/scheduler_actor.py"):
        assert "load_plugins" not in (package / file).read_text()


def test_every_mode_has_its_evidence() -> None:
    assert modes().keys() ^ EVIDENCE.keys() == set(), "docs/modes.md and harness/modes.json differ"


@pytest.mark.parametrize("mode", EVIDENCE)
def test_the_evidence_is_there(mode: str) -> None:
    tests = {**EVIDENCE[mode]}
    read = tests.pop("read", [])
    assert tests or (read and "not run" in modes()[mode])
    for level, names in tests.items():
        assert missing_tests(names) == []
        assert {name.partition("/")[0] for name in names} <= LEVELS[level]


def test_every_argument_that_refuses_a_server_is_in_modes() -> None:
    page = (REPO / "docs" / "modes.md").read_text()
    flags = map(arguments._name_flag, arguments.list_judged_arguments())
    missing = [flag for flag in flags if not re.search(rf"`{flag}[ =`]", page)]
    assert missing == [], "not in docs/modes.md"


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
    """test/README.md names the files that run only with ``--all``."""
    listed = (REPO / "test" / "README.md").read_text()
    files = [*(REPO / "test" / "srt").rglob("test_*.py")]
    marked = re.compile(r"^pytestmark = pytest.mark.release$", re.MULTILINE)
    names = [path.stem for path in files if marked.search(path.read_text())]
    assert names
    assert [name for name in names if f"`{name}`" not in listed] == []


def test_the_tables_are_up_to_date() -> None:
    """If this fails: run ``scripts/tables.py --write``."""
    assert tables.main([]) == 0


def test_the_least_gain_of_others_comes_first() -> None:
    """README counts each published measurement, and none is below its first row.

    Its first screen gives their range and median.
    """
    published = tomllib.loads((REPO / "benchmark" / "others.toml").read_text())["measured"]
    gains = [one.get("ratio") or one["off"] / one["on"] for one in published]
    [table] = re.findall(r"measured by others: begin -->(.*?)<!--", README, re.DOTALL)
    rows = re.findall(r"^\| [^|]*\| (\d+) \| ([\d.]+)x", table, re.MULTILINE)
    assert sum(int(number) for number, _ in rows) == len(published)
    shown = [float(least) for _, least in rows]
    assert shown == sorted(shown)
    assert shown[0] == pytest.approx(min(gains), abs=0.006)
    least, largest, middle = min(gains), max(gains), statistics.median(gains)
    assert (
        f"Others have published {len(gains)} measurements of the same idea, which [range from "
        f"{least:.2f}x to {largest:.2f}x](#measurements), with a median of {middle:.2f}x."
    ) in README


def test_noted_figures_are_those_of_their_pages() -> None:
    for run in tomllib.loads(tables.NOTED.read_text())["run"]:
        for noted in run["noted"]:
            for page in noted["pages"]:
                text = (REPO / page).read_text()
                for one in noted["figure"].split("; "):
                    assert re.search(rf"(?<![\d.]){re.escape(one)}(?![\d.]*\d)", text), (page, one)


def test_every_supported_release_has_passed() -> None:
    releases = json.loads(version_matrix.FILE.read_text())
    passed = {release["sglang"] for release in releases if not release["failed"]}
    assert passed == {*version_matrix.VERSIONS}


def test_a_table_that_is_out_of_date_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**settings.VARIABLES}
    del changed[settings.name_of("audit")]
    monkeypatch.setattr(settings, "VARIABLES", changed)
    assert tables.main([]) == 1


def test_the_pictures_are_up_to_date() -> None:
    """Other releases of Matplotlib draw other files."""
    for picture, (contents, style) in plot_prefill.PICTURES.items():
        if f"Matplotlib v{version('matplotlib')}," not in picture.read_text():
            pytest.skip("another Matplotlib has drawn it")
        assert plot_prefill.draw(contents, style) == picture.read_text()
