"""The table of attention backends: every class in it has evidence.

What was reviewed is listed here once more, by hand; the package must admit nothing else.
"""

from __future__ import annotations

import ast
import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang.srt
from packaging.version import Version

from harness.documented import TESTS, missing_tests
from scripts import tables
from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.compat.backends import (
    FA,
    GEMMA3N,
    GEMMA4,
    READ,
    RUN,
    STOCK,
    TABLE,
    TRITON,
    TRTLLM,
    XPU,
    Backend,
    list_flags,
)
from sglang_gemma4_yoco.models import gemma3n, gemma4

SGLANG = Path(sglang.srt.__path__[0])
AS_READ = pytest.mark.skipif(
    Version(version("sglang")) != compat.release.LAST_TESTED,
    reason="the source of another SGLang was reviewed",
)

# Class -> where its extend step and its decode step give the kernel the layer's window, in keys
# before a row's own. A class whose source lacks this hides no key, or gets it elsewhere. Triton's
# decode step reads the keys that its planner lists.
WINDOWS = {
    TRITON: (
        "-1 if bidirectional_extend else layer.sliding_window_size",
        "kv_indices = self.forward_metadata.window_kv_indices",
    ),
    TRTLLM: ("window_left=layer.sliding_window_size",) * 2,
    FA: (
        "(layer.sliding_window_size, 0 if causal else layer.sliding_window_size)",
        "window_size = (layer.sliding_window_size, 0)",
    ),
    XPU: ("(layer.sliding_window_size, 0)",) * 2,
}
#: The lines of SGLang 0.5.23 that were read for the window and the shape of the output.
LINES = {
    TRTLLM: "1678, 1691, 1958 and 2035",
    FA: "1558 to 1568, 2064, 2137 to 2147 and 2416",
    XPU: "747 to 752, 1050, 1413 to 1420 and 1624",
}
#: Model -> the classes that were found right for prefills, and the evidence.
REVIEWED = {
    (GEMMA4, TRITON): RUN,
    (GEMMA4, TRTLLM): READ,
    (GEMMA4, FA): READ,
    (GEMMA4, XPU): READ,
    (GEMMA3N, TRTLLM): READ,
    (GEMMA3N, FA): READ,
    (GEMMA3N, XPU): READ,
}
#: For the tail. Another class would need its decode windows compared with its extend windows.
TAILS = {(GEMMA4, TRITON), (GEMMA3N, TRITON)}
ADMITTED = sorted({row.path for row in TABLE if row.prefills != STOCK})


def name_of(path: str) -> str:
    return path.rpartition(".")[2]


def in_words(row: Backend) -> str:
    return f"{name_of(row.path)}, {row.model}"


def source_of(path: str) -> str:
    module = path.rpartition(".")[0].removeprefix("sglang.srt.")
    return (SGLANG / f"{module.replace('.', '/')}.py").read_text()


def method_of(path: str, name: str) -> str:
    """Return the source of a method that this class itself defines, without an import of it."""
    source = source_of(path)
    for kind in ast.parse(source).body:
        if isinstance(kind, ast.ClassDef) and kind.name == name_of(path):
            for method in kind.body:
                if isinstance(method, ast.FunctionDef) and method.name == name:
                    return str(ast.get_source_segment(source, method))
    return ""


def test_what_is_admitted_was_reviewed() -> None:
    """Each class is reviewed for each model: one model's review admits no other."""
    prefills = {(row.model, row.path): row.prefills for row in TABLE if row.prefills != STOCK}
    assert prefills == REVIEWED
    assert {(row.model, row.path) for row in TABLE if row.tail} == TAILS


@pytest.mark.parametrize("path", ADMITTED, ids=name_of)
def test_a_window_is_what_the_layer_says(path: str) -> None:
    """A class without windows would attend to keys that stock hides."""
    extend, decode = WINDOWS[path]
    assert extend in method_of(path, "forward_extend")
    assert decode in method_of(path, "forward_decode")


@pytest.mark.parametrize("row", TABLE, ids=in_words)
def test_evidence(row: Backend) -> None:
    """Tests exist; a run names SGLang's class; a reading has its lines."""
    assert row.tests
    assert missing_tests((*row.tests, *row.tail)) == []
    ran = list(row.tail)
    if row.prefills == RUN:
        ran += row.tests
    elif row.prefills == READ:
        assert LINES[row.path]
    else:
        assert row.prefills == STOCK
        assert row.note
    for test in ran:
        assert name_of(row.path) in (TESTS / f"{test.partition('::')[0]}.py").read_text()


@AS_READ
@pytest.mark.parametrize("row", TABLE, ids=in_words)
def test_a_flag_builds_its_class(row: Backend) -> None:
    """The class is the one in SGLang's registry."""
    registry = (SGLANG / "layers" / "attention" / "attention_registry.py").read_text()
    assert row.flags
    for flag in row.flags:
        [function] = re.findall(rf'_backend\("{flag}"\)\ndef (?s:.*?)(?=\n@|\Z)', registry)
        assert f"return {name_of(row.path)}(" in function
    assert f"\nclass {name_of(row.path)}(" in source_of(row.path)


def test_a_class_has_one_row_for_a_model() -> None:
    """A second row would replace the first."""
    assert len({(row.model, row.path) for row in TABLE}) == len(TABLE)


@AS_READ
def test_each_backend_that_sglang_takes_for_gemma_4_is_judged() -> None:
    [accepted] = re.findall(
        r'"Gemma4UnifiedForConditionalGeneration",\n    \):.*?accepted_backends = \((.*?)\)',
        (SGLANG / "arg_groups" / "model_hook.py").read_text(),
        re.DOTALL,
    )
    assert set(re.findall(r'"(\w+)"', accepted)) == {
        *list_flags(gemma4.ATTENTION, RUN, READ, STOCK)
    }


@AS_READ
@pytest.mark.parametrize("card", tables.CARDS)
def test_what_sglang_chooses_on_a_card(card: str) -> None:
    from sglang.srt.arg_groups.model_overrides import gemma4 as overrides
    from sglang.srt.runtime_context import override_platform

    architecture, flag = tables.CARDS[card]
    unset = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    given = SimpleNamespace(**dict.fromkeys((*unset, "moe_runner_backend")))
    with override_platform(is_sm100=architecture == "SM100"):
        assert overrides._gemma4_overrides(given, None) == {"attention_backend": flag}


def test_a_model_admits_what_the_table_has_for_it() -> None:
    for model, kind in ((GEMMA4, gemma4), (GEMMA3N, gemma3n)):
        for path in WINDOWS:
            assert kind.ATTENTION[path].prefills == REVIEWED.get((model, path), STOCK)
