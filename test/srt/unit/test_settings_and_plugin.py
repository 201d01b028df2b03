"""The switch, and what loading does in this process; in new ones: ``server/test_load_faults``."""

from __future__ import annotations

import dataclasses
import logging
import os
from importlib.metadata import entry_points

import pytest

from sglang_gemma4_yoco import plugin, settings


@pytest.mark.parametrize("value", ["", "yes", "true", "2", " 1"])
def test_any_other_value_names_variable_and_remedy(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(settings.SWITCH, value)
    with pytest.raises(ValueError, match=r"SGLANG_GEMMA4_YOCO=.*use 1 .* 0 to turn it off"):
        settings.read(os.environ)


def test_what_a_variable_says_of_its_default_is_true() -> None:
    """Of all settings, in the words of their documentation."""
    defaults = dataclasses.asdict(settings.Settings())
    assert list(settings.VARIABLES) == list(defaults)
    for setting, variable in settings.VARIABLES.items():
        unset = None if variable.unset == "automatic" else variable.read(variable.unset)
        assert unset == defaults[setting]
        assert type(unset) is type(defaults[setting])
        assert ("unset: " in variable.help) == (unset is None)


def test_what_is_switched_off_needs_no_other_setting() -> None:
    found = {settings.SWITCH: "0", settings.name_of("audit"): "often"}
    assert settings.read(found) == settings.Settings(enabled=False)


def test_entry_point_is_registered_once() -> None:
    ours = [ep for ep in entry_points(group="sglang.srt.plugins") if ep.name == "gemma4_yoco"]
    assert [ep.value for ep in ours] == ["sglang_gemma4_yoco.plugin:load"]
    assert not [
        ep
        for ep in entry_points(group="sglang.srt.platforms")
        if ep.dist and ep.dist.name == "sglang-gemma4-yoco"
    ]


def test_load_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, not_loaded: None
) -> None:
    from sglang_gemma4_yoco import seams
    from sglang_gemma4_yoco.loading import patch

    def broken() -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(patch, "install", broken)
    monkeypatch.setenv(settings.SWITCH, "1")
    answers = seams.Scheduler.get_internal_state
    with caplog.at_level(logging.INFO):
        plugin.load()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "something else" in record.getMessage()
    assert plugin.left_alone == "something else"
    assert seams.Scheduler.get_internal_state is answers
