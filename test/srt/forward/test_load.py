"""Refusals when the plugin is loaded: wrong settings, and an SGLang that lacks a needed name.

It is loaded again in this process. What an operator sees: ``server/test_load_faults``.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import pkgutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from harness.fixtures import Said
from sglang_gemma4_yoco import compat, log, plugin, settings
from sglang_gemma4_yoco.core import eligibility, forward
from sglang_gemma4_yoco.core.model import Adapter
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.startup import patch

pytestmark = pytest.mark.usefixtures("not_loaded", "outside_of_a_server", "forgotten_reports")


FORWARDS = [(text_model, "forward") for text_model in registry.list_text_models()]
ALL = [text_model.__name__ for text_model, _ in FORWARDS]


def list_cut() -> list[str]:
    """Return the text models whose forward is this package's."""
    models = [model for model, _ in FORWARDS]
    return [model.__name__ for model in models if forward.is_wrapped(vars(model).get("forward"))]


def of_sglang() -> list[Any]:
    """Return the functions to be wrapped."""
    return [getattr(owner, name) for owner, name in (*patch.WRAPPED, *FORWARDS)]


def refusal(caplog: pytest.LogCaptureFixture) -> str:
    """Return the one line that says why nothing is patched; assert that nothing is."""
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
#: What a setting accepts -> what it does not.
INVALID = {
    "1 or 0": ("on", "2", "", " 1"),
    "an integer >= 0": NOT_A_NUMBER,
    "an integer >= 1": ("0", *NOT_A_NUMBER),
    "names of Python modules or classes, separated by commas": (
        *("", "a module", "theirs,", "theirs..Model", "*"),
    ),
}


@pytest.mark.parametrize("name", settings.VARIABLES)
def test_an_invalid_value(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    accepted = settings.VARIABLES[name].metadata["kind"].accepted
    for value in INVALID[accepted]:
        monkeypatch.setenv(name, value)
        why = refusal(caplog)
        assert why.startswith(f"{name}={value!r} is not a valid value: ")
        assert f"use {accepted}, or leave it unset (" in why


@pytest.mark.parametrize("name", settings.VARIABLES)
def test_a_valid_value(name: str) -> None:
    """Each sets the field that it is named after, and no other."""
    setting = settings.VARIABLES[name]
    values: dict[str, Any] = {"0": False, "1": True}
    if "integer" in setting.metadata["kind"].accepted:
        values = {"1": 1, "04096": 4096}
        if "integer >= 0" in setting.metadata["kind"].accepted:
            values["0"] = 0
    elif setting.default == ():
        values = {"theirs": ("theirs",), "a.B, c_1.d": ("a.B", "c_1.d")}
    for value, meaning in values.items():
        expected = dataclasses.replace(settings.Settings(), **{setting.name: meaning})
        assert settings.read({name: value}) == expected


# ---------------------------------------------------------------- SGLang's names


def test_fields_that_are_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A release may have given each of them another name."""
    monkeypatch.setattr(compat.batch, "ForwardBatch", SimpleNamespace(__dataclass_fields__={}))
    why = refusal(caplog)
    for name in eligibility.FIELDS_BY_NAME:
        assert f"ForwardBatch.{name}" in why
    for of_other_models in ("dimensions", "encoder_lens", "engram_history"):
        assert of_other_models not in why
    assert "Install a supported SGLang, or a newer sglang-gemma4-yoco" in why


@pytest.mark.parametrize("place", patch.WRAPPED, ids=lambda place: place[1])
def test_a_method_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: tuple[type, str]
) -> None:
    """No other method is wrapped then."""
    owner, name = place
    wrapped = dict(patch.WRAPPED)
    wrapped[owner, f"{name}_by_another_name"] = wrapped.pop(place)
    before = of_sglang()
    with monkeypatch.context() as gone:
        gone.setattr(patch, "WRAPPED", wrapped)
        plugin.load()
    assert of_sglang() == before
    assert f"'{owner.__name__}' has no attribute '{name}_by_another_name'" in caplog.text


@pytest.mark.parametrize("imported", [True, False])
def test_a_process_that_runs_no_model_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, imported: bool
) -> None:
    """SGLang starts some, such as the detokenizer, without importing its scheduler."""
    if not imported:
        monkeypatch.delitem(sys.modules, plugin._SCHEDULER, raising=False)
    monkeypatch.setattr(plugin, "parent_process", multiprocessing.current_process)
    plugin.load()
    assert patch.installed == imported
    assert list_cut() == ALL * imported
    assert plugin.why_not_installed is None


def _anything(*_: Any) -> None:
    """Accept any arguments, and do nothing."""


def test_a_signature_that_has_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(AttentionBackend, "init_forward_metadata", _anything)
    assert "AttentionBackend.init_forward_metadata(self, forward_batch)" in refusal(caplog)


# ---------------------------------------------------------------- names of one model


def _another_loop(
    self: Any, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any
) -> None:
    """Model forward whose layers have another name."""
    for layer in self.blocks:
        layer(positions)


CHANGES: list[tuple[Any, str, Any]] = []
for _kind in registry.MODELS:
    _model = _kind.SGLANG.text_model.rpartition(".")[2]
    for _name in (_model, *_kind.SGLANG.signatures):
        CHANGES.append((_kind, _name, None))
        if _name.endswith(".forward"):
            CHANGES.append((_kind, _name, _anything))
    CHANGES.append((_kind, f"{_model}.forward", _another_loop))


@pytest.mark.parametrize(("kind", "name", "instead"), CHANGES)
def test_a_name_that_one_model_needs(
    monkeypatch: pytest.MonkeyPatch,
    said: Said,
    kind: Adapter,
    name: str,
    instead: Any,
) -> None:
    """If it is gone or means something else, that model runs as stock, and the other one is cut."""
    module, _, model = kind.SGLANG.text_model.rpartition(".")
    owner, _, attribute = f"{module}.{name}".rpartition(".")
    monkeypatch.delattr(pkgutil.resolve_name(owner), attribute)
    if instead is not None:
        monkeypatch.setattr(pkgutil.resolve_name(owner), attribute, instead, raising=False)
    plugin.load()
    assert plugin.why_not_installed is None
    [line] = said(logging.WARNING)
    lacks, _, rest = line.partition(": prefills of ")
    assert name in lacks
    assert rest.startswith(f"{model} run as stock. Install a supported SGLang, ")
    assert list_cut() == [other for other in ALL if other != model]


def test_no_model_has_its_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for text_model, name in FORWARDS:
        monkeypatch.setattr(text_model, name, _anything)
    why = refusal(caplog)
    for model in ALL:
        assert f"prefills of {model} run as stock" in why
