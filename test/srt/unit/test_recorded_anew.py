"""What a server does when SGLang records its graphs once more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_gemma4_yoco.checking import rounding
from sglang_gemma4_yoco.checking.checked import Checked
from sglang_gemma4_yoco.checking.rounding import Finding
from sglang_gemma4_yoco.core import state
from sglang_gemma4_yoco.cutting.doors import NOT_YET, Doors
from sglang_gemma4_yoco.loading import start

pytestmark = pytest.mark.usefixtures("forgotten_reports")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model that was compared with stock; recording opens its doors."""
    doors = Doors()
    known = SimpleNamespace(
        constant_reason=None,
        auditor="the first one",
        checked=None,
        doors=doors,
        forget_replays=lambda: doors.close(NOT_YET),
    )
    monkeypatch.setattr(served, "find", lambda _: known)
    monkeypatch.setattr(starting, "record_tail", lambda *_: None)
    monkeypatch.setattr(starting, "_open_doors", lambda *_: doors.open())
    return known


def test_doors_that_the_check_refused_stay_closed(known: Any) -> None:
    known.checked = Checked(doors=rounding.defect("another key"))
    for _ in range(2):
        starting.record(SimpleNamespace(), SimpleNamespace())
        assert "another key" in known.doors.closed


@pytest.mark.parametrize("found", [None, Finding("keys", 0.0, 1.0)])
def test_others_open_again(known: Any, found: Finding | None) -> None:
    known.checked = Checked(doors=found)
    starting.record(SimpleNamespace(), SimpleNamespace())
    assert known.doors.closed is None
    assert known.auditor == "the first one"
