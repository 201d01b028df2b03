"""How the counters reach SGLang's metrics; on servers: ``server/test_served_metrics``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
import prometheus_client
import pytest

from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.checking import audit
from sglang_gemma4_yoco.checking import start as check
from sglang_gemma4_yoco.checking.rounding import Difference
from sglang_gemma4_yoco.checking.start import Checked
from sglang_gemma4_yoco.core import forward
from sglang_gemma4_yoco.core import state as states
from sglang_gemma4_yoco.loading import metrics

pytestmark = pytest.mark.usefixtures("outside_of_a_server", "forgotten_reports")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """The metrics that are made from here on; nothing is served, and nothing is counted."""
    made = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge"):
        metric = functools.partial(getattr(prometheus_client, kind), registry=made)
        monkeypatch.setattr(prometheus_client, kind, metric)
    monkeypatch.setattr(counters, "observers", [])
    monkeypatch.setattr(counters, "server_reasons", set())
    monkeypatch.setattr(states, "_attached", set())
    return made


LABELS = {"model_name": "a model"}


def test_no_model_is_served() -> None:
    state = answered()
    assert (state["active"], state["reason"]) == (False, metrics.NO_MODEL)
    assert state["cut"] is state["tail"] is None


class Serving:
    """What is known of a model whose batches may be cut."""

    unsupported: str | None = None
    after_cut = None

    def __init__(self) -> None:
        self.report = states.Report(tail="eager", exits="closed: some reason")

    def describe(self) -> str:
        return "cut inside layer 14"


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Serving:
    """It is attached."""
    known = Serving()
    monkeypatch.setattr(states, "_attached", {known})
    return known


def answered() -> dict[str, Any]:
    """What is in a scheduler's answer, which SGLang can send and encode."""
    answer = SimpleNamespace(internal_state={"theirs": 1})
    metrics.add_to_server_info(answer)
    state: dict[str, Any] = answer.internal_state[metrics.ENTRY]
    # As SGLang does: from the scheduler in MessagePack, and to the client in JSON.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer.internal_state)) == (
        answer.internal_state
    )
    assert orjson.loads(orjson.dumps(state)) == state
    return state


def test_a_refused_server_says_why(
    serving: Serving, registry: prometheus_client.CollectorRegistry
) -> None:
    """All its batches are counted as one outcome, in the metrics as well."""
    serving.unsupported = "LoRA"
    counters.note_unsupported("LoRA")
    metrics.collect_metrics(LABELS)
    counters.count_ineligible("LoRA", 7)
    name, outcome = "sglang:gemma4_yoco_forwards_total", LABELS | {"outcome": "server_unsupported"}
    assert registry.get_sample_value(name, outcome) == 1
    state = answered()
    assert (state["active"], state["reason"], state["cut"]) == (False, "LoRA", None)
    assert state["forwards"] == {"server_unsupported": 1}
    assert state["rows"] == {"computed": 7, "skipped": 0}


@pytest.mark.parametrize("reason", [None, forward.GIVEN_UP, check.FAILED, audit.DIFFERED])
def test_whatever_turns_the_path_off_is_told(serving: Serving, reason: str | None) -> None:
    serving.unsupported = reason
    state = answered()
    assert (state["active"], state["reason"]) == (reason is None, reason)
    # Where nothing is cut, it is of no interest how.
    how = ("cut inside layer 14", "eager", "closed: some reason")
    assert (state["cut"], state["tail"], state["exits"]) == (how if reason is None else (None,) * 3)


@pytest.mark.parametrize(
    ("largest", "word"),
    [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")],
)
def test_a_number_that_is_not_finite_is_a_word(
    serving: Serving, largest: float, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As in what the self-check and the audits say; Prometheus has such numbers, and keeps them."""
    serving.report.check = Checked(Difference("keys", largest, 0.5)).to_json()
    counters.audits.worst = largest
    state = answered()
    assert state["check"]["largest_difference"] == state["audits"]["worst"] == word
    assert state["check"]["allowed"] == 0.5
    assert caplog.records == []


@pytest.mark.parametrize(
    ("rank", "every", "counts"), [(0, False, True), (1, False, False), (1, True, True)]
)
def test_one_rank_counts_for_its_group(
    monkeypatch: pytest.MonkeyPatch,
    registry: prometheus_client.CollectorRegistry,
    rank: int,
    every: bool,
    counts: bool,
) -> None:
    monkeypatch.setattr(compat.server, "read_argument", lambda _: every)
    metrics.collect_metrics({"tp_rank": rank})
    counters.count_ineligible("a reason", 3)
    of = {"tp_rank": str(rank), "outcome": "a_reason"}
    assert registry.get_sample_value("sglang:gemma4_yoco_forwards_total", of) == (counts or None)


def test_what_is_alerted_on_is_there_before_the_first_prefill(
    registry: prometheus_client.CollectorRegistry,
) -> None:
    metrics.collect_metrics(LABELS)
    for outcome in (counters.FAILED, counters.UNSEEN, *counters.CUT):
        labels = LABELS | {"outcome": outcome}
        assert registry.get_sample_value("sglang:gemma4_yoco_forwards_total", labels) == 0


def test_what_was_counted_before_is_counted_at_once(
    monkeypatch: pytest.MonkeyPatch, registry: prometheus_client.CollectorRegistry
) -> None:
    """And no prefill looks its series up again, which takes longer than counting."""
    counters.count_ineligible("a reason", 3)
    counters.count_audit(0.25, agrees=True)
    metrics.collect_metrics(LABELS)
    monkeypatch.delattr(prometheus_client.metrics.MetricWrapperBase, "labels")
    counters.count_ineligible("a reason", 4)
    counters.count_audit(0.125, agrees=True)
    for name, labels, value in (
        ("forwards_total", {"outcome": "a_reason"}, 2),
        ("rows_total", {"part": "computed"}, 7),
        ("audits_total", {"result": "agrees"}, 2),
        ("audit_worst_difference", {}, 0.25),
    ):
        of = LABELS | labels
        assert registry.get_sample_value(f"sglang:gemma4_yoco_{name}", of) == value


def test_metrics_that_cannot_be_made_cost_nothing() -> None:
    """As where another plugin has taken their names."""
    metrics.collect_metrics(LABELS)
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.collect_metrics(LABELS)
    counters.count_ineligible("a reason", 3)
    assert counters.forwards == {"a reason": 1}


def test_metrics_that_break_are_not_tried_again(said: Callable[..., list[str]]) -> None:
    """Forwards go on, and are counted; what has broken is said once."""
    calls = []

    def observe(*counted: object) -> None:
        calls.append(counted)
        raise OSError

    counters.observers.append(observe)
    for _ in range(2):
        counters.count_ineligible("LoRA", 7, logged=False)
    assert calls == [("forwards", "LoRA", 1)]
    assert counters.forwards["LoRA"] == 2
    assert said() == ["Gemma 4 fast prefill: its metrics are no longer collected: OSError()"]
