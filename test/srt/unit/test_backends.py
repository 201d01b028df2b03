"""The table of attention backends: no class is admitted of which it is not known why it is right.

What was read is written down here once more, by hand: what the package admits must be among it.
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
    GEMMA3N,
    GEMMA4,
    READ,
    RUN,
    STOCK,
    TABLE,
    Backend,
    Evidence,
)
from sglang_gemma4_yoco.models import gemma3n, gemma4

SGLANG = Path(sglang.srt.__path__[0])
AS_READ = pytest.mark.skipif(
    Version(version("sglang")) != compat.release.LAST_TESTED,
    reason="what was read is of another release",
)

# Of each class where an extend step and a decode step tell the kernel how many keys before a row's
# own it sees in a window layer: as many as the layer says. A class whose source lacks this hides no
# key, or is told elsewhere. Triton's decode step reads the keys that its planner lists.
WINDOWS = {
    "TritonAttnBackend": (
        "-1 if bidirectional_extend else layer.sliding_window_size",
        "kv_indices = self.forward_metadata.window_kv_indices",
    ),
    "TRTLLMHAAttnBackend": ("window_left=layer.sliding_window_size",) * 2,
    "FlashAttentionBackend": (
        "(layer.sliding_window_size, 0 if causal else layer.sliding_window_size)",
        "window_size = (layer.sliding_window_size, 0)",
    ),
    "XPUAttentionBackend": ("(layer.sliding_window_size, 0)",) * 2,
}
#: By model: which of these were found right for prefills, and how.
REVIEWED = {
    (GEMMA4, "TritonAttnBackend"): RUN,
    (GEMMA4, "TRTLLMHAAttnBackend"): READ,
    (GEMMA4, "FlashAttentionBackend"): READ,
    (GEMMA4, "XPUAttentionBackend"): READ,
    (GEMMA3N, "TRTLLMHAAttnBackend"): READ,
    (GEMMA3N, "FlashAttentionBackend"): READ,
    (GEMMA3N, "XPUAttentionBackend"): READ,
}
#: For the tail. Another class would need its decode windows compared with its extend windows.
TAILS = {(GEMMA4, "TritonAttnBackend"): RUN, (GEMMA3N, "TritonAttnBackend"): RUN}
ADMITTED = [row for row in TABLE if any(e.how != STOCK for e in row.prefills.values())]
EVIDENCE = [
    pytest.param(row, evidence, id=f"{row.name}, {model}")
    for row in TABLE
    for known in (row.prefills, row.tail)
    for model, evidence in known.items()
]


def by_name(row: Backend) -> str:
    return row.name


def source_of(row: Backend) -> str:
    return (SGLANG / f"{row.module.replace('.', '/')}.py").read_text()


def method_of(row: Backend, name: str) -> str:
    """The source of a method that this class defines itself; of many classes it is not imported."""
    source = source_of(row)
    for kind in ast.parse(source).body:
        if isinstance(kind, ast.ClassDef) and kind.name == row.name:
            for method in kind.body:
                if isinstance(method, ast.FunctionDef) and method.name == name:
                    return str(ast.get_source_segment(source, method))
    return ""


def test_what_is_admitted_was_reviewed() -> None:
    """Each class for each model: nobody is admitted because another one is."""
    prefills, tails = {}, {}
    for row in TABLE:
        for model, evidence in row.prefills.items():
            if evidence.how != STOCK:
                prefills[model, row.name] = evidence.how
        for model, evidence in row.tail.items():
            tails[model, row.name] = evidence.how
    assert prefills == REVIEWED
    assert tails == TAILS


@pytest.mark.parametrize("row", ADMITTED, ids=by_name)
def test_an_admitted_class_reads_the_layers_window(row: Backend) -> None:
    """In both kinds of steps; what has no window at all attends to keys that stock hides."""
    for name in ("forward_extend", "forward_decode"):
        assert "layer.sliding_window_size" in method_of(row, name)


@AS_READ
@pytest.mark.parametrize("row", ADMITTED, ids=by_name)
def test_a_window_is_what_the_layer_says(row: Backend) -> None:
    extend, decode = WINDOWS[row.name]
    assert extend in method_of(row, "forward_extend")
    assert decode in method_of(row, "forward_decode")


def test_a_class_without_windows_is_seen() -> None:
    module = "layers.attention.torch_flex_backend"
    row = Backend(name="TorchFlexAttnBackend", module=module, flags={}, prefills={})
    for name in ("forward_extend", "forward_decode"):
        assert "self" in method_of(row, name)
        assert "sliding_window" not in method_of(row, name)


@pytest.mark.parametrize(("row", "evidence"), EVIDENCE)
def test_evidence(row: Backend, evidence: Evidence) -> None:
    """There are tests; of what was run they name SGLang's class; of what was read the lines are."""
    assert evidence.tests
    assert missing_tests(evidence.tests) == []
    if evidence.how == RUN:
        for test in evidence.tests:
            assert row.name in (TESTS / f"{test.partition('::')[0]}.py").read_text()
    elif evidence.how == READ:
        assert row.lines
    else:
        assert evidence.how == STOCK
        assert evidence.note


@AS_READ
@pytest.mark.parametrize("row", TABLE, ids=by_name)
def test_a_flag_builds_its_class(row: Backend) -> None:
    """By SGLang's registry."""
    registry = (SGLANG / "layers" / "attention" / "attention_registry.py").read_text()
    for flag in {flag for flags in row.flags.values() for flag in flags}:
        [function] = re.findall(rf'_backend\("{flag}"\)\ndef (?s:.*?)(?=\n@|\Z)', registry)
        assert f"return {row.name}(" in function
    assert row.flags.keys() == row.prefills.keys()
    assert f"\nclass {row.name}(" in source_of(row)


@AS_READ
def test_each_backend_that_sglang_takes_for_gemma_4_is_judged() -> None:
    [accepted] = re.findall(
        r'"Gemma4UnifiedForConditionalGeneration",\n    \):.*?accepted_backends = \((.*?)\)',
        (SGLANG / "arg_groups" / "model_hook.py").read_text(),
        re.DOTALL,
    )
    assert set(re.findall(r'"(\w+)"', accepted)) == gemma4.ATTENTION.flags.keys()


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
    """And no other model's: ``doctor`` names the flags."""
    for model, kind in ((GEMMA4, gemma4), (GEMMA3N, gemma3n)):
        for name in WINDOWS:
            assert kind.ATTENTION.prefills[name].how == REVIEWED.get((model, name), STOCK)
    assert gemma4.ATTENTION.list_flags(RUN) == ["triton"]
    assert gemma4.ATTENTION.list_flags(RUN, READ) == ["triton", "trtllm_mha", "fa4", "intel_xpu"]
    assert gemma3n.ATTENTION.list_flags(RUN) == []
    assert gemma3n.ATTENTION.list_flags(READ) == ["trtllm_mha", "fa3", "fa4", "intel_xpu"]
