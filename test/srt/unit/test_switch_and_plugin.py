"""The switch, and what happens when SGLang loads the plugin."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

from sglang_gemma4_yoco import plugin, switch

CODE = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.models.gemma4_causal import Gemma4TextModel
print("helpers", hasattr(Gemma4TextModel, "_yoco_eligibility"))
print("patch imported", "sglang_gemma4_yoco.patch" in sys.modules)
"""


def load_in_new_process(code: str = CODE, **env: str) -> str:
    """What SGLang's own loader prints in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr


def our_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if " sglang_gemma4_yoco " in line]


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_accepted_values(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    monkeypatch.delenv(switch.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(switch.VARIABLE, value)
    assert switch.enabled() is expected


@pytest.mark.parametrize("value", ["", "yes", "true", "2", " 1"])
def test_any_other_value_names_variable_and_remedy(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(switch.VARIABLE, value)
    with pytest.raises(ValueError, match=r"SGLANG_GEMMA4_YOCO=.*use 1 .* 0 to turn it off"):
        switch.enabled()


def test_entry_point_is_registered_once() -> None:
    ours = [ep for ep in entry_points(group="sglang.srt.plugins") if ep.name == "gemma4_yoco"]
    assert [ep.value for ep in ours] == ["sglang_gemma4_yoco.plugin:load"]
    assert not [
        ep
        for ep in entry_points(group="sglang.srt.platforms")
        if ep.dist and ep.dist.name == "sglang-gemma4-yoco"
    ]


@pytest.mark.slow
def test_sglang_loads_and_installs_it() -> None:
    output = load_in_new_process(SGLANG_GEMMA4_YOCO="1")
    assert "helpers True" in output
    assert [line for line in our_lines(output) if "is installed" in line]


@pytest.mark.slow
def test_off_touches_nothing() -> None:
    output = load_in_new_process(SGLANG_GEMMA4_YOCO="0")
    assert "helpers False" in output
    assert "patch imported False" in output
    assert [line for line in our_lines(output) if "is off" in line]


@pytest.mark.slow
def test_changed_seam_is_one_error_line_and_no_patch() -> None:
    rename = """
from sglang.srt.models import gemma4_causal
def forward(self, ids, positions, forward_batch): ...
gemma4_causal.Gemma4TextModel.forward = forward
del gemma4_causal.Gemma4DecoderLayer.forward
"""
    output = load_in_new_process(CODE.replace("load_plugins()\n", rename + "load_plugins()\n", 1))
    assert "helpers False" in output
    (line,) = our_lines(output)
    assert line.startswith("ERROR")
    assert "Gemma4TextModel.forward(self, input_ids, positions, forward_batch" in line
    assert "Gemma4DecoderLayer.forward" in line


def test_what_was_loaded_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the settings are by then: what was said of the first time is true still."""
    from sglang_gemma4_yoco import patch, seams

    monkeypatch.setattr(patch, "_installed", {"something": "wrapped"})
    monkeypatch.setenv(switch.VARIABLE, "no such value")
    answers = seams.Scheduler.get_internal_state
    plugin.load()
    (record,) = caplog.records
    assert "is loaded a second time; the first stays installed" in record.getMessage()
    assert plugin.left_alone is None
    assert seams.Scheduler.get_internal_state is answers


def test_load_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, not_loaded: None
) -> None:
    from sglang_gemma4_yoco import owner, patch, seams
    from sglang_gemma4_yoco.telling import metrics

    def broken() -> None:
        raise RuntimeError("something else")

    def internal_state(*_: object) -> SimpleNamespace:
        return SimpleNamespace(internal_state={"theirs": 1})

    monkeypatch.setattr(seams.Scheduler, "get_internal_state", internal_state)
    monkeypatch.setattr(patch, "install", broken)
    monkeypatch.setattr(owner, "attached", lambda: None)  # whatever other tests have left
    monkeypatch.setenv(switch.VARIABLE, "1")
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
