"""The counters of ``report`` where an operator looks: in SGLang's metrics, and in /server_info.

SGLang's endpoint collects what all processes of a server count in a directory that they share, so
counters that are made here appear there by themselves. They have the labels of SGLang's own
scheduler, taken from its collector of metrics when that is made; one rank counts for its group, as
SGLang's do.

``prometheus_client`` is imported then and not before. When it is imported it decides whether
processes share a directory, and SGLang names that directory after it has loaded its plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from sglang_gemma4_yoco import __version__, owner, seams
from sglang_gemma4_yoco.telling import report

#: What /server_info has it under, in the internal state of each scheduler.
ENTRY = "gemma4_yoco"
NO_MODEL = "no model with a KV-shared tail is served"


def state() -> dict[str, Any]:
    """What this process would say of itself, in plain types.

    ``active``: batches may be cut, ``reason``: why not; ``cut``, ``tail``: where, and how the tail
    runs; ``check``: what came of the check at start; ``forwards`` by outcome; ``rows``, of prefills
    at the last layer, by what became of them; ``audits``, None where nothing is audited.
    """
    known = owner.attached()
    reason = NO_MODEL if known is None else known.constant_reason
    cut = tail = None
    if known is not None and reason is None:
        cut, tail = known.attends(), known.runs_its_tail()
    is_audited = known is not None and known.auditor is not None
    audited = is_audited or report.audits != report.Audits()  # until one differed, it may be
    return {
        "version": __version__,
        "active": reason is None,
        "reason": reason,
        "cut": cut,
        "tail": tail,
        "check": None if known is None or known.checked is None else known.checked.state(),
        "forwards": dict(report.forwards),
        "rows": dict(report.rows),
        "audits": asdict(report.audits) if audited else None,
    }


def add_to(internal_state: Any) -> None:
    """Put ``state`` into what a scheduler answers to /server_info. Never raises."""
    try:
        internal_state.internal_state[ENTRY] = state()
    except Exception as failure:  # noqa: BLE001 - SGLang's answer is worth more than ours
        report.failure("Gemma 4 fast prefill: /server_info goes without its state", failure)


def collect(labels: Mapping[str, Any]) -> None:
    """Count in SGLang's metrics from now on, and what was counted so far. Never raises.

    Args:
        labels: those of this process's scheduler.
    """
    argument = seams.server_arguments()
    every_rank = argument is not None and argument("enable_metrics_for_all_schedulers")
    if labels.get("tp_rank", 0) != 0 and not every_rank:
        return
    try:
        tell = _counters(labels)
        for outcome, forwards in report.forwards.items():
            tell(outcome, {}, forwards)
        tell(None, report.rows, 0)
        tell_audit = _audit_metrics(labels)
    except Exception as failure:  # noqa: BLE001 - a server without these metrics serves as well
        report.failure("Gemma 4 fast prefill: its metrics are not collected", failure)
    else:
        report.observe(tell)
        report.observe_audits(tell_audit)


def _counters(labels: Mapping[str, Any]) -> Callable[..., None]:
    from prometheus_client import Counter

    forwards = Counter(
        "sglang:gemma4_yoco_forwards_total",
        "Prefill forwards of Gemma 4, by what became of them: how they were cut, or why not.",
        [*labels, "outcome"],
    )
    rows = Counter(
        "sglang:gemma4_yoco_rows_total",
        "Rows of prefills, by whether the KV-shared layers have computed them.",
        [*labels, "part"],
    )
    parts = {part: rows.labels(**labels, part=part) for part in report.PARTS}

    def tell(outcome: str | None, counted: Mapping[str, int], times: int = 1) -> None:
        if outcome is not None:
            forwards.labels(**labels, outcome=outcome).inc(times)
        for part, number in counted.items():
            parts[part].inc(number)

    return tell


def _audit_metrics(labels: Mapping[str, Any]) -> Callable[[report.Audits], None]:
    from prometheus_client import Counter, Gauge

    audits = Counter(
        "sglang:gemma4_yoco_audits_total",
        "Prefills that were run again as stock, by whether they differed beyond rounding.",
        [*labels, "result"],
    )
    changes = Counter(
        "sglang:gemma4_yoco_audit_greedy_changes_total",
        "Rows of audited prefills whose likeliest token was another one.",
        [*labels],
    ).labels(**labels)
    worst = Gauge(
        "sglang:gemma4_yoco_audit_worst_difference",
        "Largest relative difference of an audited prefill from stock.",
        [*labels],
        multiprocess_mode="max",
    ).labels(**labels)
    agree = audits.labels(**labels, result="agrees")
    differ = audits.labels(**labels, result="differs")
    so_far = 0.0

    def tell(audit: report.Audits) -> None:
        nonlocal so_far
        agree.inc(audit.agree)
        differ.inc(audit.differ)
        changes.inc(audit.greedy_changes)
        so_far = max(so_far, audit.worst)
        worst.set(so_far)

    return tell
