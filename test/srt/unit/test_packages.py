"""Imports between the folders of the package, as the map in ``__init__`` says; its doctests.

Those for annotations alone, under ``TYPE_CHECKING``, may go anywhere.
"""

from __future__ import annotations

import doctest
from types import ModuleType

import grimp
import pytest

from sglang_gemma4_yoco import metrics
from sglang_gemma4_yoco.compat import release
from sglang_gemma4_yoco.core import kept_batch, worth

PACKAGE = "sglang_gemma4_yoco"
#: From the top down: each imports from those after it alone.
PARTS = (
    *("__main__", "commands", "plugin", "startup", "metrics", "prefill_exits", "checking"),
    *("captured", "admission", "models", "core", "compat", "counters"),
    *("refusal", "log", "settings", "patched"),
)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        PACKAGE, include_external_packages=True, exclude_type_checking_imports=True
    )


def test_imports_go_down(graph: grimp.ImportGraph) -> None:
    """No two folders import each other, and the core knows no model."""
    assert graph.find_children(PACKAGE) == {f"{PACKAGE}.{part}" for part in PARTS}
    layers = [grimp.Layer(f"{PACKAGE}.{part}") for part in PARTS]
    assert graph.find_illegal_dependencies_for_layers(layers) == set()


def test_a_module_of_startup_needs_few_others(graph: grimp.ImportGraph) -> None:
    """Each is one moment: rules of other folders are kept there."""
    for module in graph.find_children(f"{PACKAGE}.startup"):
        imported = graph.find_modules_directly_imported_by(module)
        own = sorted(name for name in imported if name.startswith(PACKAGE))
        assert len(own) <= 8, (module, own)


def test_no_two_files_import_each_other(graph: grimp.ImportGraph) -> None:
    """A package and its own modules count as one."""
    inside = {module for module in graph.modules if module.startswith(f"{PACKAGE}.")}
    for module in inside:
        for imported in graph.find_modules_directly_imported_by(module) & inside:
            if not module.startswith(imported):
                assert not graph.chain_exists(imported, module), f"{module} and {imported}"


def test_sglang_is_imported_in_one_folder_and_by_commands(graph: grimp.ImportGraph) -> None:
    importers = graph.find_modules_that_directly_import("sglang")
    parts = {module.split(".")[1] for module in importers}
    assert parts == {"compat", "commands"}


@pytest.mark.parametrize("module", [kept_batch, metrics, release, worth])
def test_the_examples_in_docstrings(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
