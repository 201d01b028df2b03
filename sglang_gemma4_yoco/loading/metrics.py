"""Publish ``counters`` in SGLang's metrics and in /server_info.

SGLang's endpoint collects what all processes of a server count in a directory that they share, so
counters that are made here appear there. They have the labels of SGLang's scheduler metrics and are
made together with these; one rank counts for its group.

``prometheus_client`` must not be imported earlier. On import it decides whether processes share a
directory, and SGLang names that directory after it has loaded its plugins.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sglang_gemma4_yoco import __version__, compat, counters
from sglang_gemma4_yoco.core.state import get_attached_state
from sglang_gemma4_yoco.loading import limits

#: The key in the internal state of each scheduler in /server_info.
ENTRY = "gemma4_yoco"
NO_MODEL = "no model with a KV-shared tail is served"
SERVER_UNSUPPORTED, UNTESTED_RELEASE = "server_unsupported", "untested_release"

_PREFIX = "sglang:gemma4_yoco_"
# The name of a counter -> its documentation, and the label of its own.
_COUNTERS = {
    "forwards": (
        "Prefill forwards of Gemma 4, by what became of them: how they were cut, or why not.",
        "outcome",
    ),
    "rows": ("Rows of prefills, by whether the KV-shared layers have computed them.", "part"),
    "audits": ("Prefills that were run again as stock, by whether a defect was found.", "result"),
}
# Outcomes whose series exist from the start, at 0: in what a series begins with, Prometheus sees no
# increase.
_EXPECTED = {
    *counters.CUT,
    *(counters.FAILED, counters.UNSEEN),
    *(SERVER_UNSUPPORTED, UNTESTED_RELEASE),
}


def describe_state() -> dict[str, Any]:
    """This process's entry in /server_info.

    ``reason``: why not active; ``fast_prefill``: whose serves, if any; ``cut``, ``tail``: where,
    and how the tail runs; ``exits``: whether prefills that SGLang has captured may be cut;
    ``check``, ``exits_check``: results of the checks at start; ``rows`` by whether the last layer
    computed them; ``audits``: what they have found.
    """
    served = get_attached_state()
    reason: str | None = NO_MODEL
    names = (
        "version",
        "active",
        "reason",
        "fast_prefill",
        "cut",
        "tail",
        "exits",
        "check",
        "exits_check",
    )
    entry: dict[str, Any] = dict.fromkeys(names)
    if served is not None:
        reason = served.unsupported
        if reason is None and counters.is_unused():
            reason = counters.NOT_CUT
        entry |= asdict(served.report)
        if reason is None:
            entry |= {"cut": served.describe(), "fast_prefill": "this package"}
        else:  # no prefill is cut, so how is of no interest
            entry |= {"tail": None, "exits": None}
        if reason == limits.SGLANG_SERVES:
            entry["fast_prefill"] = "SGLang"
    forwards = Counter[str]()
    for outcome, number in counters.forwards.items():
        forwards[make_label(outcome)] += number
    entry |= {
        "version": __version__,
        "active": reason is None,
        "reason": reason,
        "forwards": forwards,
        "rows": counters.rows,
        "audits": asdict(counters.audits),
    }
    finite: dict[str, Any] = replace_infinite(entry)
    return finite


def make_label(outcome: str) -> str:
    """An outcome in snake case, for a metric; reasons of the whole server have one in common.

    A release that was not tested has one of its own.

    >>> make_label("LoRA"), make_label("forward mode TARGET_VERIFY"), make_label("active_eager")
    ('lora', 'forward_mode_target_verify', 'active_eager')
    """
    if outcome == limits.find_release_reason():
        return UNTESTED_RELEASE
    if outcome in counters.server_reasons:
        return SERVER_UNSUPPORTED
    return re.sub(r"\W+", "_", outcome.replace("'", "")).lower().strip("_")


def replace_infinite(value: Any) -> Any:
    """``value`` with a word for each number in it that is not finite: JSON has none.

    >>> replace_infinite({"worst": math.inf, "check": {"allowed": 0.5}})
    {'worst': 'inf', 'check': {'allowed': 0.5}}
    """
    if isinstance(value, Mapping):
        return {name: replace_infinite(part) for name, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def add_to_server_info(output: Any) -> None:
    """Put this process's entry into a scheduler's answer to /server_info."""
    output.internal_state[ENTRY] = describe_state()


def collect_metrics(labels: Mapping[str, Any]) -> None:
    """Count in SGLang's metrics from now on, with the scheduler's labels."""
    every_rank = compat.server.read_argument("enable_metrics_for_all_schedulers")
    if labels.get("tp_rank", 0) == 0 or every_rank:
        _collect_counters(labels)


def _collect_counters(labels: Mapping[str, Any]) -> None:
    import prometheus_client

    of_metrics = {
        name: prometheus_client.Counter(f"{_PREFIX}{name}_total", text, [*labels, own])
        for name, (text, own) in _COUNTERS.items()
    }
    worst = prometheus_client.Gauge(
        f"{_PREFIX}audit_worst_difference",
        "Largest error of an audited prefill, in multiples of what is rounding.",
        [*labels],
        multiprocess_mode="max",
    ).labels(**labels)

    @functools.cache  # to find a series takes longer than to count in it
    def find_series(name: str, own: str) -> Any:
        return of_metrics[name].labels(*labels.values(), make_label(own))

    def collect(name: str, own: str, number: int) -> None:
        find_series(name, own).inc(number)
        if name == "audits":
            worst.set(counters.audits.worst)

    for (name, own), number in _list_counts().items():
        collect(name, own, number)
    counters.observers.append(collect)


def _list_counts() -> dict[tuple[str, str], int]:
    """All numbers, each by the name of its counter and the value of the label of its own."""
    outcomes = _EXPECTED | counters.forwards.keys()
    return {
        **{("forwards", outcome): counters.forwards[outcome] for outcome in outcomes},
        **{("rows", part): counters.rows[part] for part in counters.PARTS},
        ("audits", counters.AGREES): counters.audits.agree,
        ("audits", counters.DIFFERS): counters.audits.differ,
    }
