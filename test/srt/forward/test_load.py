"""What the plugin refuses when it is loaded: settings, and an SGLang that lacks what it needs.

In this process, which has loaded it once: what an operator sees of it, ``server/test_load_faults``.
"""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor import forward_context
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_gemma4_yoco import plugin, seams, settings

pytestmark = pytest.mark.usefixtures("not_loaded", "outside_of_a_server")


def refusal(caplog: pytest.LogCaptureFixture) -> str:
    """The one line that says why nothing is patched."""
    caplog.clear()
    plugin.load.cache_clear()
    with caplog.at_level(logging.INFO, "sglang_gemma4_yoco"):
        plugin.load()
    [record] = [r for r in caplog.records if r.name == "sglang_gemma4_yoco"]
    assert record.levelno == logging.ERROR
    _, _, why = record.getMessage().partition(" is NOT installed, the server runs unpatched: ")
    assert plugin.left_alone == why
    return why


NOT_A_NUMBER = ("few", "-1", "1.5", "", " 3", "\u0663")
NO_ANSWER = ("on", "2", "", " 1")
SETTINGS = {
    "SGLANG_GEMMA4_YOCO": (NO_ANSWER, "use 1 or 0, or leave it unset (1): 1 to turn"),
    "SGLANG_GEMMA4_YOCO_MIN_SKIPPED_ROWS": (
        ("0", *NOT_A_NUMBER),
        "use a whole number from 1 up",
    ),
    "SGLANG_GEMMA4_YOCO_GRAPH_ROWS": (NOT_A_NUMBER, "use a whole number from 0 up"),
    "SGLANG_GEMMA4_YOCO_SELF_CHECK": (NO_ANSWER, "use 1 or 0, or leave it unset (1): 1 to compare"),
    "SGLANG_GEMMA4_YOCO_AUDIT": (NOT_A_NUMBER, "use a whole number from 0 up"),
    "SGLANG_GEMMA4_YOCO_AUDIT_STRICT": (NO_ANSWER, "use 1 or 0, or leave it unset (0): 1 to turn"),
    "SGLANG_GEMMA4_YOCO_PREFILL_GRAPHS": (NO_ANSWER, "or leave it unset (1): 1 to shorten"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_means_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    values, remedy = SETTINGS[name]
    for value in values:
        monkeypatch.setenv(name, value)
        why = refusal(caplog)
        assert why.startswith(f"{name}={value!r} is not a valid value: ")
        assert remedy in why


@pytest.mark.parametrize("setting", settings.VARIABLES)
def test_a_setting_that_means_something(setting: str) -> None:
    """It sets what it is named after, and nothing else."""
    variable = settings.VARIABLES[setting]
    values: dict[str, Any] = {"0": False, "1": True}
    if variable.minimum is not None:
        values = {str(number): number for number in (variable.minimum, 4096)}
    for value, meaning in values.items():
        expected = dataclasses.replace(settings.Settings(), **{setting: meaning})
        assert settings.read({variable.name: value}) == expected


# ---------------------------------------------------------------- names of SGLang's

FIELDS = (
    "forward_mode",
    "batch_size",
    "input_ids",
    "req_pool_indices",
    "seq_lens",
    "seq_lens_sum",
    "out_cache_loc",
    "positions",
    "extend_num_tokens",
    "extend_seq_lens",
    "extend_prefix_lens",
    "extend_start_loc",
    "extend_seq_lens_cpu",
    "extend_prefix_lens_cpu",
    "extend_logprob_start_lens_cpu",
    "return_logprob",
    "capture_hidden_mode",
    "spec_algorithm",
    "lora_ids",
    "mm_input_embeds",
    "mm_inputs",
    "spec_info",
    "return_hidden_states_before_norm",
    "multi_item_delimiter_indices",
    "token_indices_to_pool",
    "input_embeds",
    "replace_embeds",
    "full_prefill_cuda_graph_capture",
    "kv_loc_cols",
    "residual_stream",
)
NAMES = {
    "ForwardBatch": FIELDS,
    "ForwardMode": ("EXTEND", "DECODE", "MIXED"),
    "ModelRunner": (
        "init_attention_backends",
        "init_cuda_graphs",
        "init_decode_cuda_graph",
        "init_prefill_cuda_graph",
    ),
    "forward_context": ("forward_context", "get_forward_context", "has_forward_context"),
    "layer_boundary.residual.batch": ("set_written", "start"),
}
WITH_RESIDUALS = {"residual_stream", "set_written", "start"}
FIELDS_SINCE = {
    "token_indices_to_pool": "0.5.21",
    "full_prefill_cuda_graph_capture": "0.5.22",
    "kv_loc_cols": "0.5.22",
}


@pytest.mark.parametrize(
    ("of", "name"), [(of, name) for of, names in NAMES.items() for name in names]
)
def test_a_name_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, of: str, name: str
) -> None:
    """As on a release that has given it another one."""
    if name in WITH_RESIDUALS and not seams.HAS_RESIDUAL_STREAM:
        pytest.skip("the batches of this SGLang carry no residual")
    if of == "ForwardBatch":
        monkeypatch.setattr(seams, of, record(of, set(FIELDS) - {name}))
        if name in FIELDS_SINCE:
            monkeypatch.setattr(seams, "version", lambda _: FIELDS_SINCE[name])
    elif of == "ForwardMode":
        modes = {mode: None for mode in ForwardMode.__members__ if mode != name}
        monkeypatch.setattr(seams, of, SimpleNamespace(__members__=modes))
    elif of == "ModelRunner":
        monkeypatch.delattr(seams.ModelRunner, name)
    elif of == "forward_context":
        monkeypatch.delattr(forward_context, name)
    else:
        others = {other: print for other in NAMES[of] if other != name}
        monkeypatch.setattr(seams, "residual_batch", SimpleNamespace(**others))
    why = refusal(caplog)
    assert f"{of}.{name}" in why
    assert "Install a supported SGLang, or a newer sglang-gemma4-yoco" in why


@pytest.mark.parametrize("name", FIELDS_SINCE)
def test_a_field_that_a_release_never_had_is_not_missed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(seams, "ForwardBatch", record("ForwardBatch", set(FIELDS) - {name}))
    monkeypatch.setattr(seams, "version", lambda _: "0.5.20")
    assert list(seams._missing()) == []


def record(name: str, fields: set[str]) -> type:
    """A class with these fields, and no others."""
    return dataclasses.make_dataclass(name, [(field, object, None) for field in sorted(fields)])


def _anything(*_: Any) -> None:
    """Takes what it is given, and says nothing of it."""


SIGNATURES: dict[str, tuple[type, str]] = {
    "Gemma4TextModel.forward(self, input_ids, positions, forward_batch, input_embeds": (
        seams.gemma4_causal.Gemma4TextModel,
        "forward",
    ),
    "Gemma4DecoderLayer.forward(self, positions, hidden_states, per_layer_input, forward_": (
        seams.gemma4_causal.Gemma4DecoderLayer,
        "forward",
    ),
    "AttentionBackend.init_forward_metadata(self, forward_batch)": (
        AttentionBackend,
        "init_forward_metadata",
    ),
}


@pytest.mark.parametrize("words", SIGNATURES)
def test_a_signature_that_has_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, words: str
) -> None:
    monkeypatch.setattr(*SIGNATURES[words], _anything)
    assert words in refusal(caplog)


def test_a_residual_that_has_moved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches carry it from 0.5.22 on; a release that hides where is none from before that."""
    monkeypatch.setattr(seams, "HAS_RESIDUAL_STREAM", False)
    monkeypatch.setattr(seams, "version", lambda _: "0.5.22")
    assert "gemma4_causal.residual_batch" in refusal(caplog)
    monkeypatch.setattr(seams, "version", lambda _: "0.5.21")
    assert "gemma4_causal.residual_batch" not in list(seams._missing())


def test_the_tables_are_complete() -> None:
    assert set(FIELDS) - WITH_RESIDUALS == set(seams._REQUIRED_FIELDS)
    assert {n: str(first) for n, first in seams._FIELDS_SINCE.items()} == FIELDS_SINCE
    assert NAMES["ForwardMode"] == seams._REQUIRED_MODES
    assert NAMES["ModelRunner"] == seams._REQUIRED_OF_RUNNERS
    assert NAMES["forward_context"] == seams._REQUIRED_OF_CONTEXTS
    assert NAMES["layer_boundary.residual.batch"] == seams._REQUIRED_OF_RESIDUALS
