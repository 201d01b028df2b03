"""Links, tables, commands and length of the documents, and their reachability from the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.environment import REPO

LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


FOLDERS = (".", "docs", "docs/upstream", "benchmark", "benchmark/results", "scripts", "test")
PAGES = []
for _folder in (*FOLDERS, "docs/monitoring", "test/reference"):
    PAGES += sorted((REPO / _folder).glob("*.md"))


def of_each(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(REPO)))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def links(page: Path) -> list[str]:
    found = map("".join, LINK.findall(FENCED.sub("", page.read_text())))
    return [link for link in found if "://" not in link]


def leads_nowhere(page: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    return not target.exists() or bool(anchor and anchor not in anchors(target))


@of_each(PAGES)
def test_links(page: Path) -> None:
    assert [link for link in links(page) if leads_nowhere(page, link)] == []


@of_each(PAGES)
def test_rows_of_a_table_have_as_many_cells(page: Path) -> None:
    for block in re.findall(r"(?:^\|.*\n)+", FENCED.sub("", page.read_text()), re.MULTILINE):
        head, *rows = re.sub(r"`[^`\n]*`", "", block).splitlines()
        assert rows
        for row in rows:
            assert row.count("|") == head.count("|"), row


def test_every_page_of_docs_is_listed_in_the_readme() -> None:
    linked = {link.partition("#")[0] for link in links(REPO / "README.md")}
    assert {f"docs/{page.name}" for page in (REPO / "docs").glob("*.md")} - linked == set()


def test_the_readme_is_short() -> None:
    assert (REPO / "README.md").stat().st_size <= 11_000


# ---------------------------------------------------------------- commands

#: Commands that SGLang 0.5.23 warns of; it recommends sglang serve, and sglang.benchmark.serving.
OUTDATED = ("sglang.launch_server", "sglang.bench_serving")


@of_each([*PAGES, REPO / "Dockerfile"])
def test_commands_can_be_pasted(page: Path) -> None:
    """They have no outdated names, and no placeholders that a shell takes for files."""
    text = page.read_text()
    assert [name for name in OUTDATED if name in text] == []
    for block in re.findall(r"^```(?:bash|sh)$(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        assert re.findall(r"<\w[^>]*>", block) == []
