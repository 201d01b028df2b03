"""The counters of ``log``, in SGLang's metrics and in /server_info.

SGLang's endpoint collects what all processes of a server count in a directory that they share, so
counters that are made here appear there. They have the labels of SGLang's scheduler metrics and are
made together with these; one rank counts for its group.

``prometheus_client`` must not be imported earlier. On import it decides whether processes share a
directory, and SGLang names that directory after it has loaded its plugins.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sglang_gemma4_yoco import __version__, compat, log
from sglang_gemma4_yoco.core.state import attached

#: The key in the internal state of each scheduler in /server_info.
ENTRY = "gemma4_yoco"
NO_MODEL = "no model with a KV-shared tail is served"
SERVER_REFUSED = "server_refused"

_PREFIX = "sglang:gemma4_yoco_"
# The name of a counter -> its documentation, and the label of its own.
_COUNTERS = {
    "forwards": (
        "Prefill forwards of Gemma 4, by what became of them: how they were cut, or why not.",
        "outcome",
    ),
    "rows": ("Rows of prefills, by whether the KV-shared layers have computed them.", "part"),
    "audits": ("Prefills that were run again as stock, by whether a defect was found.", "result"),
    "audit_greedy_changes": ("Rows of audited prefills whose likeliest token was another one.",),
}


def state() -> dict[str, Any]:
    """This process's entry in /server_info.

    ``reason``: why not active; ``cut``, ``tail``: where, and how the tail runs; ``exits``: whether
    prefills that SGLang has captured may be cut; ``check``, ``exits_check``: results of the checks
    at start; ``rows`` by whether the last layer computed them; ``audits``: None without any.
    """
    served, cut = attached(), None
    reason: str | None = NO_MODEL
    facts: dict[str, Any] = {}
    # A strict audit that finds a defect ends the audits; their result stays.
    audited = log.audits != log.Audits()
    if served is not None:
        reason, facts = served.refused, dict(served.facts)
        audited = audited or served.after_cut is not None
    if reason is None and log.is_unused():
        reason = log.NOT_CUT
    if reason is not None:  # no prefill is cut, so how is of no interest
        facts |= {"tail": None, "exits": None}
    elif served is not None:
        cut = served.describe()
    audits = None
    if audited:
        audits = asdict(log.audits)
    forwards = Counter[str]()
    for outcome, number in log.forwards.items():
        forwards[label(outcome)] += number
    entry = {
        "version": __version__,
        "active": reason is None,
        "reason": reason,
        "cut": cut,
        **{name: facts.get(name) for name in ("tail", "exits", "check", "exits_check")},
        "forwards": forwards,
        "rows": log.rows,
        "audits": audits,
    }
    return {name: finite(value) for name, value in entry.items()}


def label(outcome: str) -> str:
    """An outcome in snake case, for a metric; reasons of the whole server have one in common.

    >>> label("LoRA"), label("forward mode TARGET_VERIFY"), label("active_eager")
    ('lora', 'forward_mode_target_verify', 'active_eager')
    """
    if outcome in log.server_reasons:
        return SERVER_REFUSED
    return re.sub(r"\W+", "_", outcome.replace("'", "")).lower().strip("_")


def finite(value: Any) -> Any:
    """``value`` with a word for each number in it that is not finite: JSON has none.

    >>> finite({"worst": math.inf, "check": {"allowed": 0.5}})
    {'worst': 'infinite', 'check': {'allowed': 0.5}}
    """
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "not a number"
    if value > 0:
        return "infinite"
    return "-infinite"


def add_to(output: Any) -> None:
    """Put ``state`` into a scheduler's answer to /server_info. Never raises."""
    try:
        output.internal_state[ENTRY] = state()
    except Exception as failure:  # noqa: BLE001 - SGLang's own answer must not fail
        log.failure("Gemma 4 fast prefill: /server_info goes without its state", failure)


def collect(labels: Mapping[str, Any]) -> None:
    """Count in SGLang's metrics from now on, with the scheduler's labels. Never raises."""
    argument = compat.server_arguments()
    every_rank = argument is not None and argument("enable_metrics_for_all_schedulers")
    if labels.get("tp_rank", 0) != 0 and not every_rank:
        return
    try:
        _collect(labels)
    except Exception as failure:  # noqa: BLE001 - a server without these metrics serves as well
        log.failure("Gemma 4 fast prefill: its metrics are not collected", failure)


def _collect(labels: Mapping[str, Any]) -> None:
    import prometheus_client

    of_metrics = {
        name: prometheus_client.Counter(f"{_PREFIX}{name}_total", text, [*labels, *own])
        for name, (text, *own) in _COUNTERS.items()
    }
    worst = prometheus_client.Gauge(
        f"{_PREFIX}audit_worst_difference",
        "Largest error of an audited prefill, in multiples of what is rounding.",
        [*labels],
        multiprocess_mode="max",
    )
    collected: dict[tuple[str, ...], int] = {}

    def collect_what_is_new() -> None:
        for key, number in _counted().items():
            if number != collected.get(key):
                name, *own = key
                counter = of_metrics[name].labels(*labels.values(), *map(label, own))
                counter.inc(number - collected.get(key, 0))
                collected[key] = number
        worst.labels(**labels).set(log.audits.worst)

    collect_what_is_new()
    log.observers.append(collect_what_is_new)


def _counted() -> dict[tuple[str, ...], int]:
    """All numbers, each by the name of its counter and the value of the label of its own."""
    return {
        **{("forwards", outcome): number for outcome, number in log.forwards.items()},
        **{("rows", part): log.rows[part] for part in log.PARTS},
        ("audits", "agrees"): log.audits.agree,
        ("audits", "differs"): log.audits.differ,
        ("audit_greedy_changes",): log.audits.greedy_changes,
    }
