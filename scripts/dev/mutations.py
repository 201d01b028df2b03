"""The named ways in which ``mutation_check.py`` breaks the package.

``mutations.toml`` lists them. Every single entry of the package's tables is one more, made from the
source itself.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]  # pytest brings it along there

REPO = Path(__file__).resolve().parents[2]

PACKAGE = "sglang_gemma4_yoco"
LIST = Path(__file__).with_name("mutations.toml")  # which also says what its fields are


@dataclass(frozen=True)
class Mutation:
    """One way to break the package: in ``file``, ``old`` becomes ``new``.

    Attributes:
        old: source that occurs exactly once in its file.
        first: the behavioural tests that should notice, relative to ``test/srt``.
    """

    name: str
    file: str
    old: str
    new: str
    first: str

    @property
    def change(self) -> str:
        """What it does, in twelve digits: a verdict is on this, whatever the mutation is called."""
        return sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:12]


class StaleMutationError(Exception):
    """A mutation's ``old`` does not occur exactly once in its file."""


def broken(mutation: Mutation, source: str) -> str:
    """``source`` with the mutation applied.

    Raises:
        StaleMutationError: the source has changed since the mutation was written.
    """
    count = source.count(mutation.old)
    if count != 1:
        raise StaleMutationError(
            f"{mutation.name!r}: its source occurs {count} times in {mutation.file}; "
            "bring the list of mutations up to date"
        )
    return source.replace(mutation.old, mutation.new)


def _removals(table: str, value: ast.expr) -> Iterator[tuple[str, str]]:
    """Each entry of a table, by name, and a statement that takes it out."""
    made_of = value.args[0] if isinstance(value, ast.Call) and value.args else value
    if isinstance(made_of, ast.Dict):
        for key, within in zip(made_of.keys, made_of.values, strict=True):
            assert key is not None, table
            name, place = ast.unparse(key).strip("'"), f"{table}[{ast.unparse(key)}]"
            entries = [*_removals(place, within)]
            yield from ((f"{name}: {entry}", removal) for entry, removal in entries)
            if not entries:
                yield name, f"del {place}"
    elif isinstance(made_of, ast.Tuple | ast.Set):
        for entry in map(ast.unparse, made_of.elts):
            yield (
                entry.strip("'"),
                f"{table} = type({table})(entry for entry in {table} if entry != {entry})",
            )


def _lines(file: str, source: str, first: dict[str, str]) -> Iterator[Mutation]:
    """Each line of the sections taken out, and each value; but where ``first`` names no test."""
    for section in source.split("\n[")[1:]:
        title, _, lines = section.partition("]\n")
        if first.get(title) == "":  # of no consequence in a release that was tested
            continue
        for line in lines.split("\n\n")[0].splitlines():
            if not line.startswith("#"):
                name, _, value = line.partition(" = ")
                tests = first.get(title, first["all"])
                yield Mutation(f"{file} without {name}", file, f"\n{line}\n", "\n", tests)
                if value:
                    without = f"{file} without the {value} of {name}"
                    changed, tests = f"\n{name}\n", first.get("values", tests)
                    yield Mutation(without, file, f"\n{line}\n", changed, tests)


def table_entries(listed: dict[str, Any]) -> list[Mutation]:
    """One mutation for every entry of the tables: without it.

    Args:
        listed: ``mutations.toml``.
    """
    mutations: list[Mutation] = []
    for file, tables in listed["tables"].items():
        source = (REPO / PACKAGE / file).read_text()
        if file.endswith(".ini"):
            mutations += _lines(file, source, tables)
            continue
        assigned = {
            ast.unparse(statement.targets[0]): statement
            for statement in ast.parse(source).body
            if isinstance(statement, ast.Assign)
        }
        for table, first_of_table in tables.items():
            statement = assigned[table]
            whole = ast.get_source_segment(source, statement)
            assert whole is not None
            for name, removal in _removals(table, statement.value):
                first = listed["entries"].get(name, first_of_table)
                changed = f"{whole}\n{removal}"
                mutations.append(Mutation(f"{table} without {name}", file, whole, changed, first))
    return mutations


def written(listed: dict[str, Any]) -> list[Mutation]:
    """The mutations of ``mutations.toml``, file by file."""
    files = {name: found for name, found in listed.items() if name not in ("tables", "entries")}
    return [Mutation(file=file, **one) for file, found in files.items() for one in found]


LISTED = tomllib.loads(LIST.read_text())
MUTATIONS = (*written(LISTED), *table_entries(LISTED))
