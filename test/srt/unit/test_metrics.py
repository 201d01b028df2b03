"""The way of the counters into SGLang's metrics; on servers: ``server/test_served_metrics``."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_gemma4_yoco import owner, seams
from sglang_gemma4_yoco.telling import metrics, report

pytestmark = pytest.mark.usefixtures("outside_of_a_server", "forgotten_reports")


@pytest.fixture(autouse=True)
def _observers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_observers", [])
    monkeypatch.setattr(report, "_audit_observers", [])
    monkeypatch.setattr(metrics, "_audit_metrics", lambda _: lambda _: None)
    monkeypatch.setattr(owner, "_attached", set())


def test_nobody_is_served() -> None:
    state = metrics.state()
    assert (state["active"], state["reason"]) == (False, metrics.NO_MODEL)
    assert state["cut"] is state["tail"] is None
    assert json.loads(json.dumps(state)) == state


def test_a_server_that_steps_aside_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_attached", {Refused()})
    report.stepped_aside("LoRA", 7)
    state = metrics.state()
    assert (state["active"], state["reason"], state["cut"]) == (False, "LoRA", None)
    assert state["forwards"] == {"LoRA": 1}
    assert state["rows"] == {"computed": 7, "skipped": 0}


class Refused:
    constant_reason = "LoRA"
    checked = auditor = None


def test_a_state_that_cannot_be_told_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    answer = SimpleNamespace(internal_state=None)
    metrics.add_to(answer)
    [record] = caplog.records
    assert record.exc_info
    assert "/server_info goes without" in record.getMessage()


def test_counting_goes_on_without_an_observer_that_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[tuple[Any, ...]] = []

    def broken(*_: Any) -> None:
        raise OSError("the directory is full")

    report.observe(broken)
    report.observe(lambda *counted: told.append(counted))
    for _ in range(2):
        report.stepped_aside("a reason", 3)
    assert told == [("a reason", {"computed": 3, "skipped": 0})] * 2
    assert report.forwards["a reason"] == 2
    [record] = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "no longer" in record.getMessage()


@pytest.mark.parametrize(
    ("rank", "every", "counts"), [(0, False, True), (1, False, False), (1, True, True)]
)
def test_one_rank_counts_for_its_group(
    monkeypatch: pytest.MonkeyPatch, rank: int, every: bool, counts: bool
) -> None:
    made: list[Any] = []

    def counters(labels: Any) -> Any:
        made.append(labels)
        return lambda *_: None

    monkeypatch.setattr(metrics, "_counters", counters)
    monkeypatch.setattr(seams, "server_arguments", lambda: lambda _: every)
    metrics.collect({"tp_rank": rank})
    assert (len(made), len(report._observers)) == ((1, 1) if counts else (0, 0))


def test_what_was_counted_before_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(metrics, "_counters", lambda _: lambda *counted: told.append(counted))
    report.stepped_aside("a reason", 3)
    report.stepped_aside("a reason", 4)
    metrics.collect({})
    assert told == [("a reason", {}, 2), (None, {"computed": 7, "skipped": 0}, 0)]
