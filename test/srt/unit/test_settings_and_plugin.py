"""The switch, and what loading does in this process; in new ones: ``server/test_load_faults``."""

from __future__ import annotations

import dataclasses
import logging
import os
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

from sglang_gemma4_yoco import plugin, settings


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_accepted_values(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    monkeypatch.delenv(settings.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(settings.SWITCH, value)
    assert settings.read(os.environ).enabled is expected


@pytest.mark.parametrize("value", ["", "yes", "true", "2", " 1"])
def test_any_other_value_names_variable_and_remedy(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(settings.SWITCH, value)
    with pytest.raises(ValueError, match=r"SGLANG_GEMMA4_YOCO=.*use 1 .* 0 to turn it off"):
        settings.read(os.environ)


def test_every_setting_has_its_variable() -> None:
    fields = [field.name for field in dataclasses.fields(settings.Settings)]
    assert list(settings.VARIABLES) == fields


def test_what_is_switched_off_needs_no_other_setting() -> None:
    found = {settings.SWITCH: "0", settings.name_of("audit"): "often"}
    assert settings.read(found) == settings.Settings(enabled=False)


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_prefill_graphs(value: str | None, expected: bool) -> None:
    found = {} if value is None else {"SGLANG_GEMMA4_YOCO_PREFILL_GRAPHS": value}
    assert settings.read(found).prefill_graphs is expected


def test_entry_point_is_registered_once() -> None:
    ours = [ep for ep in entry_points(group="sglang.srt.plugins") if ep.name == "gemma4_yoco"]
    assert [ep.value for ep in ours] == ["sglang_gemma4_yoco.plugin:load"]
    assert not [
        ep
        for ep in entry_points(group="sglang.srt.platforms")
        if ep.dist and ep.dist.name == "sglang-gemma4-yoco"
    ]


def test_what_was_loaded_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the settings are by then: what was said of the first time is true still."""
    from sglang_gemma4_yoco import seams
    from sglang_gemma4_yoco.loading import patch

    monkeypatch.setattr(patch, "_installed", {"something": "wrapped"})
    monkeypatch.setenv(settings.SWITCH, "no such value")
    answers = seams.Scheduler.get_internal_state
    plugin.load()
    (record,) = caplog.records
    assert "is loaded a second time; the first stays installed" in record.getMessage()
    assert plugin.left_alone is None
    assert seams.Scheduler.get_internal_state is answers


def test_load_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, not_loaded: None
) -> None:
    from sglang_gemma4_yoco import seams
    from sglang_gemma4_yoco.core import state
    from sglang_gemma4_yoco.loading import metrics, patch

    def broken() -> None:
        raise RuntimeError("something else")

    def internal_state(*_: object) -> SimpleNamespace:
        return SimpleNamespace(internal_state={"theirs": 1})

    monkeypatch.setattr(seams.Scheduler, "get_internal_state", internal_state)
    monkeypatch.setattr(patch, "install", broken)
    monkeypatch.setattr(served, "attached", lambda: None)  # whatever other tests have left
    monkeypatch.setenv(settings.SWITCH, "1")
    with caplog.at_level(logging.INFO):
        plugin.load()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "something else" in record.getMessage()
    assert plugin.left_alone == "something else"
    told = seams.Scheduler.get_internal_state(None, None).internal_state
    assert told["theirs"] == 1
    assert (told[metrics.ENTRY]["active"], told[metrics.ENTRY]["reason"]) == (
        False,
        "something else",
    )
    assert told[metrics.ENTRY].keys() <= metrics.state().keys()
