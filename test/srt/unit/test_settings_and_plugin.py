"""Settings, and loading in this process; in new ones: ``server/test_load_faults``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from sglang.srt import plugins

from sglang_gemma4_yoco import plugin, settings
from sglang_gemma4_yoco.commands import preflight
from sglang_gemma4_yoco.commands.main import main
from sglang_gemma4_yoco.startup import patch


def test_what_a_variable_says_of_its_default_is_true() -> None:
    """A setting whose default is None explains in its help, after "unset: ", what happens then."""
    for name, setting in settings.VARIABLES.items():
        unset = settings.describe_default(setting)
        explained = "unset: " in setting.metadata["help"]
        assert (unset == "automatic") == explained == (setting.default is None)
        is_empty = setting.default == () and unset == "none"
        assert explained or is_empty or settings.parse(name, unset) is setting.default


def test_what_is_switched_off_needs_no_other_setting() -> None:
    found = {settings.SWITCH: "0", settings.name_of("audit"): "often"}
    assert settings.read(found) == settings.Settings(enabled=False)


@pytest.fixture
def mistype(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that makes a module of this package fail at import, as after a typo."""

    def mistype(module: Any) -> None:
        folder, _, name = module.__name__.rpartition(".")
        monkeypatch.delattr(import_module(folder), name)
        monkeypatch.setitem(sys.modules, module.__name__, None)

    return mistype


def test_a_typo_is_not_said_to_be_of_sglang(
    monkeypatch: pytest.MonkeyPatch, mistype: Callable[[Any], None], not_loaded: None
) -> None:
    """A release that lacks a name is another case: ``server/test_load_faults``."""
    monkeypatch.setenv(settings.SWITCH, "1")
    mistype(patch)
    plugin.load()
    assert "lacks" not in str(plugin.why_not_installed)
    assert patch.__name__ in str(plugin.why_not_installed)


def test_a_typo_is_no_verdict_of_doctor(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mistype: Callable[[Any], None],
) -> None:
    monkeypatch.setattr(plugins, "load_plugins", lambda: None)
    mistype(preflight)
    assert main(["doctor", "--model-path", "none"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" in printed.err
