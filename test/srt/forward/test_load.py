"""What the plugin refuses when it is loaded: settings, and an SGLang that lacks what it needs.

In this process, which has loaded it once: what an operator sees of it, ``server/test_load_faults``.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import multiprocessing
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_gemma4_yoco import compat, log, plugin, settings
from sglang_gemma4_yoco.loading import classes, patch

pytestmark = pytest.mark.usefixtures("not_loaded", "outside_of_a_server")


def of_sglang() -> list[Any]:
    """What would be wrapped."""
    found: list[Any] = []
    for owner, name in patch.WRAPPED:
        found.append(getattr(owner, name))
    return found


def refusal(caplog: pytest.LogCaptureFixture) -> str:
    """The one line that says why nothing is patched, which nothing is."""
    caplog.clear()
    plugin.load.cache_clear()
    before = of_sglang()
    with caplog.at_level(logging.INFO, log.logger.name):
        plugin.load()
    assert of_sglang() == before
    [record] = [r for r in caplog.records if r.name == log.logger.name]
    assert record.levelno == logging.ERROR
    _, _, why = record.getMessage().partition(" is NOT installed, the server runs unpatched: ")
    assert plugin.why_not_installed == why
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
    "SGLANG_GEMMA4_YOCO_TRUST": (
        ("", "a module", "theirs,", "theirs..Model", "*"),
        "use names of Python modules or classes, with commas between, or leave it unset (none): ",
    ),
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


@pytest.mark.parametrize("name", settings.VARIABLES)
def test_a_setting_that_means_something(name: str) -> None:
    """It sets what it is named after, and nothing else."""
    setting = settings.VARIABLES[name]
    values: dict[str, Any] = {"0": False, "1": True}
    if "number" in setting.metadata["kind"].accepted:
        values = {"1": 1, "04096": 4096}
        if "from 0 up" in setting.metadata["kind"].accepted:
            values["0"] = 0
    elif setting.default == ():
        values = {"theirs": ("theirs",), "a.B, c_1.d": ("a.B", "c_1.d")}
    for value, meaning in values.items():
        expected = dataclasses.replace(settings.Settings(), **{setting.name: meaning})
        assert settings.read({name: value}) == expected


# ---------------------------------------------------------------- names of SGLang's


def test_fields_that_are_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a release that has given each of them another name."""
    monkeypatch.setattr(compat.batch, "ForwardBatch", SimpleNamespace(__dataclass_fields__={}))
    why = refusal(caplog)
    for name in compat.names._FIELDS:
        assert f"ForwardBatch.{name}" in why
    assert "Install a supported SGLang, or a newer sglang-gemma4-yoco" in why


@pytest.mark.parametrize("place", list(patch.WRAPPED)[1:], ids=lambda place: place[1])
def test_a_method_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: tuple[type, str]
) -> None:
    """Then no other one is wrapped."""
    owner, name = place
    wrapped = dict(patch.WRAPPED)
    wrapped[owner, f"{name}_by_another_name"] = wrapped.pop(place)
    before = of_sglang()
    with monkeypatch.context() as gone:
        gone.setattr(patch, "WRAPPED", wrapped)
        gone.setattr(patch._Model, "forward", inspect.unwrap(patch._Model.forward))
        plugin.load()
    assert of_sglang() == before
    assert f"'{owner.__name__}' has no attribute '{name}_by_another_name'" in caplog.text


@pytest.mark.parametrize(
    "path", ["sglang.srt.managers.scheduler.Scheduler", "sglang.srt.managers.scheduler.No", "no.C"]
)
def test_what_only_tells_is_gone(
    monkeypatch: pytest.MonkeyPatch, said: Callable[..., list[str]], path: str
) -> None:
    """Prefills are cut all the same, and a warning says that a server cannot tell."""
    monkeypatch.setattr(patch, "OPTIONAL", {(path, "no_method"): None})
    monkeypatch.setattr(patch._Model, "forward", inspect.unwrap(patch._Model.forward))
    plugin.load()
    assert plugin.why_not_installed is None
    assert classes.is_ours(patch._Model.forward)
    [line] = said(logging.WARNING)
    assert f"lacks {path}.no_method, so /server_info" in line


@pytest.mark.parametrize("imported", [True, False])
def test_a_process_that_runs_no_model_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, imported: bool
) -> None:
    """SGLang has started it, and its scheduler is not imported there, as in the detokenizer."""
    if not imported:
        monkeypatch.delitem(sys.modules, plugin._SCHEDULER, raising=False)
    monkeypatch.setattr(plugin, "parent_process", multiprocessing.current_process)
    monkeypatch.setattr(patch._Model, "forward", inspect.unwrap(patch._Model.forward))
    plugin.load()
    assert patch.installed == classes.is_ours(patch._Model.forward) == imported
    assert plugin.why_not_installed is None


def _anything(*_: Any) -> None:
    """Accepts any arguments, and does nothing."""


SIGNATURES: dict[str, tuple[type, str]] = {
    "Gemma4TextModel.forward(self, input_ids, positions, forward_batch, input_embeds": (
        compat.layers.gemma4_causal.Gemma4TextModel,
        "forward",
    ),
    "Gemma4DecoderLayer.forward(self, positions, hidden_states, per_layer_input, forward_": (
        compat.layers.gemma4_causal.Gemma4DecoderLayer,
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


def test_a_model_whose_loop_has_no_end_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(
        self: Any, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any
    ) -> None:
        for layer in self.layers:
            layer(positions)

    monkeypatch.setattr(compat.layers.gemma4_causal.Gemma4TextModel, "forward", forward)
    with pytest.raises(compat.release.IncompatibleError, match=r"loop up to self\.end_layer"):
        compat.names.check_names()
