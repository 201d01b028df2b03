"""The package's counters in SGLang's metrics; on servers: ``server/test_served_metrics``."""

from __future__ import annotations

import functools
import math
from typing import Any

import msgspec
import orjson
import prometheus_client
import pytest

from harness.fixtures import Said
from sglang_gemma4_yoco import compat, counters, metrics
from sglang_gemma4_yoco.checking import self_check as check
from sglang_gemma4_yoco.checking.rounding import Difference
from sglang_gemma4_yoco.checking.self_check import CheckResult
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.core import state as states
from sglang_gemma4_yoco.refusal import Refusal, ServerRefusal

pytestmark = pytest.mark.usefixtures("outside_of_a_server", "forgotten_reports")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """Return a registry of the metrics that are made from here on; nothing is counted yet."""
    made = prometheus_client.CollectorRegistry()
    metric = functools.partial(prometheus_client.Counter, registry=made)
    monkeypatch.setattr(prometheus_client, "Counter", metric)
    monkeypatch.setattr(counters.served, "observers", [])
    monkeypatch.setattr(states, "_attached", set())
    return made


LABELS = {"model_name": "a model"}
A_REASON = Refusal("a reason")


def test_no_model_is_served() -> None:
    state = answered()
    assert (state["active"], state["reason"]) == (False, metrics.NO_MODEL)
    assert state["cut"] is state["tail"] is None


class Serving:
    """State of a model whose batches may be cut."""

    off_because: ServerRefusal | None = None
    after_cut = None

    def __init__(self) -> None:
        self.report = states.ModelReport(tail_mode="eager", exits="closed: some reason")

    def describe(self) -> str:
        return "cut inside layer 14"


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Serving:
    """Return an attached state."""
    known = Serving()
    monkeypatch.setattr(states, "_attached", {known})
    return known


def answered() -> dict[str, Any]:
    """Return a scheduler's answer, which SGLang must be able to send and encode."""
    state = metrics.describe_state()
    # As SGLang does: from the scheduler in MessagePack, and to the client in JSON.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state)) == state
    assert orjson.loads(orjson.dumps(state)) == state
    return state


SAME_TEXT = "LoRA"  # a server's reason, and a batch's
LINE = f"YOCO fast prefill falls back to stock: {SAME_TEXT}"


@pytest.mark.parametrize(
    ("refusal", "label", "lines"),
    [
        (Refusal(SAME_TEXT), "lora", [LINE]),
        (Refusal(SAME_TEXT, is_logged=False), "lora", []),
        (ServerRefusal(SAME_TEXT), "server_unsupported", []),
        (ServerRefusal(SAME_TEXT, label="another"), "another", []),
    ],
)
def test_a_batch_is_logged_and_counted_as_its_refusal_says(
    said: Said, refusal: Refusal, label: str, lines: list[str]
) -> None:
    """The text of the refusal does not matter."""
    for _ in range(2):
        counters.served.count_ineligible(refusal, 7)
    assert answered()["forwards"] == {label: 2}
    assert said() == lines


@pytest.mark.parametrize("reason", [None, check.CHECK_FAILED])
def test_whatever_turns_the_path_off_is_told(
    serving: Serving, reason: ServerRefusal | None
) -> None:
    serving.off_because = reason
    state = answered()
    assert (state["active"], state["reason"]) == (reason is None, reason and reason.text)
    # If nothing is cut, the tail's kind does not matter.
    how = ("cut inside layer 14", "eager", "closed: some reason")
    assert (state["cut"], state["tail"], state["exits"]) == (how if reason is None else (None,) * 3)


@pytest.mark.parametrize(
    ("largest", "word"),
    [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")],
)
def test_a_number_that_is_not_finite_is_a_string(
    serving: Serving, largest: float, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The self-check's and audits' numbers become strings."""
    serving.report.check = CheckResult(Difference("keys", largest, 0.5)).to_json()
    counters.served.worst_audit = largest
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
    counters.served.count_ineligible(A_REASON, 3)
    of = {"tp_rank": str(rank), "outcome": "a_reason"}
    assert registry.get_sample_value("sglang:gemma4_yoco_forwards_total", of) == (counts or None)


def test_what_was_counted_before_is_counted_at_once(
    monkeypatch: pytest.MonkeyPatch, registry: prometheus_client.CollectorRegistry
) -> None:
    """No prefill looks its series up again, which takes longer than counting."""
    counters.served.count_ineligible(A_REASON, 3)
    counters.served.count_audit(0.25, agrees=True)
    metrics.collect_metrics(LABELS)
    monkeypatch.delattr(prometheus_client.metrics.MetricWrapperBase, "labels")
    counters.served.count_ineligible(A_REASON, 4)
    counters.served.count_audit(0.125, agrees=True)
    for name, labels, value in (
        ("forwards_total", {"outcome": "a_reason"}, 2),
        ("rows_total", {"part": "computed"}, 7),
        ("audits_total", {"result": "agrees"}, 2),
    ):
        of = LABELS | labels
        assert registry.get_sample_value(f"sglang:gemma4_yoco_{name}", of) == value


def test_metrics_that_cannot_be_made_cost_nothing() -> None:
    """Another plugin may have taken their names."""
    metrics.collect_metrics(LABELS)
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.collect_metrics(LABELS)
    counters.served.count_ineligible(A_REASON, 3)
    assert counters.served.forwards == {A_REASON: 1}


def test_metrics_that_break_are_not_tried_again(said: Said) -> None:
    """Forwards continue, and are counted; the failure is logged once."""
    calls = []

    def observe(*counted: object) -> None:
        calls.append(counted)
        raise OSError

    counters.served.observers.append(observe)
    for _ in range(2):
        counters.served.count_ineligible(eligibility.TOO_LITTLE, 7)
    assert calls == [("forwards", eligibility.TOO_LITTLE, 1)]
    assert counters.served.forwards[eligibility.TOO_LITTLE] == 2
    assert said() == ["YOCO fast prefill: its metrics are no longer collected: OSError()"]
