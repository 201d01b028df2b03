"""The counters of ``log`` where an operator looks: in SGLang's metrics, and in /server_info.

SGLang's endpoint collects what all processes of a server count in a directory that they share, so
counters that are made here appear there by themselves. They have the labels of SGLang's own
scheduler, taken from its collector of metrics when that is made; one rank counts for its group, as
SGLang's do.

``prometheus_client`` is imported then and not before. When it is imported it decides whether
processes share a directory, and SGLang names that directory after it has loaded its plugins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from sglang_gemma4_yoco import __version__, log, seams
from sglang_gemma4_yoco.cutting import gate, served
from sglang_gemma4_yoco.cutting.served import ServedModel

#: What /server_info has it under, in the internal state of each scheduler.
ENTRY = "gemma4_yoco"
NO_MODEL = "no model with a KV-shared tail is served"


def state() -> dict[str, Any]:
    """What this process would say of itself, as JSON has it.

    ``active``: batches may be cut, None where that cannot be told; ``reason``: why not; ``cut``,
    ``tail``: where, and how the tail runs; ``doors``: whether prefills that SGLang replays may be
    cut; ``check``: what came of the check at start; ``forwards`` by outcome; ``rows``, of prefills
    at the last layer, by what became of them; ``audits``, None where nothing is audited.

    A number that is not finite is a word, as JSON has no such numbers. An entry that cannot be told
    is None, and ``untold`` has why, by its name; it is there in that case alone.
    """
    told: dict[str, Any] = {"version": __version__}
    untold: dict[str, str] = {}
    for name, entry in _entries(served.attached()).items():
        try:
            told[name] = plain(entry())
        except Exception as failure:  # noqa: BLE001 - the other entries are worth telling
            told[name], untold[name] = None, _because(failure)
    return {**told, "untold": untold} if untold else told


def _entries(known: ServedModel | None) -> dict[str, Callable[[], Any]]:
    """What tells each entry of ``state``."""
    active, reason = _activity(known)
    cut = tail = doors = check = _nothing
    if known is not None and active:
        cut, tail, doors = known.attends, known.runs_its_tail, known.leaves_recordings
    if known is not None and known.checked is not None:
        check = known.checked.state
    is_audited = known is not None and known.auditor is not None
    audited = is_audited or log.audits != log.Audits()  # until one differed, it may be
    return {
        "active": lambda: active,
        "reason": lambda: reason,
        "cut": cut,
        "tail": tail,
        "doors": doors,
        "check": check,
        "forwards": lambda: log.forwards,
        "rows": lambda: log.rows,
        "audits": lambda: asdict(log.audits) if audited else None,
    }


def _activity(known: ServedModel | None) -> tuple[bool | None, str | None]:
    """Whether batches may be cut now, and why not."""
    if known is None:
        return False, NO_MODEL
    try:
        reason = gate.standing_reason(known)
    except Exception as failure:  # noqa: BLE001 - the counters are worth telling all the same
        return None, f"whether it is active cannot be told: {_because(failure)}"
    return reason is None, reason


def _nothing() -> Any:
    return None


def _because(failure: Exception) -> str:
    log.failure("Gemma 4 fast prefill: /server_info lacks a part of its state", failure)
    return repr(failure)


def plain(value: Any) -> Any:
    """``value`` as whoever reads its JSON has it, with a word for each number that is not finite.

    >>> plain({"a": (1, 2.5, math.inf), "b": math.nan})
    {'a': [1, 2.5, 'infinite'], 'b': 'not a number'}

    Raises:
        TypeError, ValueError: JSON has nothing like it.
    """
    # SGLang's encoders want UTF-8, which is less than JSON allows.
    text = json.dumps(_with_words(value), allow_nan=False, ensure_ascii=False)
    return json.loads(text.encode())


def _with_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_words(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_words(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite" if value > 0 else "-infinite"
    return value


def add_to(internal_state: Any) -> None:
    """Put ``state`` into what a scheduler answers to /server_info. Never raises."""
    try:
        internal_state.internal_state[ENTRY] = state()
    except Exception as failure:  # noqa: BLE001 - SGLang's answer is worth more than ours
        log.failure("Gemma 4 fast prefill: /server_info goes without its state", failure)


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
        for outcome, forwards in log.forwards.items():
            tell(outcome, {}, forwards)
        tell(None, log.rows, 0)
        tell_audit = _audit_metrics(labels)
    except Exception as failure:  # noqa: BLE001 - a server without these metrics serves as well
        log.failure("Gemma 4 fast prefill: its metrics are not collected", failure)
    else:
        log.on_forward.append(tell)
        log.on_audit.append(tell_audit)


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
    parts = {part: rows.labels(**labels, part=part) for part in log.PARTS}

    def tell(outcome: str | None, counted: Mapping[str, int], times: int = 1) -> None:
        if outcome is not None:
            forwards.labels(**labels, outcome=outcome).inc(times)
        for part, number in counted.items():
            parts[part].inc(number)

    return tell


def _audit_metrics(labels: Mapping[str, Any]) -> Callable[[log.Audits], None]:
    from prometheus_client import Counter, Gauge

    audits = Counter(
        "sglang:gemma4_yoco_audits_total",
        "Prefills that were run again as stock, by whether a defect was found.",
        [*labels, "result"],
    )
    changes = Counter(
        "sglang:gemma4_yoco_audit_greedy_changes_total",
        "Rows of audited prefills whose likeliest token was another one.",
        [*labels],
    ).labels(**labels)
    worst = Gauge(
        "sglang:gemma4_yoco_audit_worst_difference",
        "Largest error of an audited prefill, in multiples of what is rounding.",
        [*labels],
        multiprocess_mode="max",
    ).labels(**labels)
    agree = audits.labels(**labels, result="agrees")
    differ = audits.labels(**labels, result="differs")
    so_far = 0.0

    def tell(audit: log.Audits) -> None:
        nonlocal so_far
        agree.inc(audit.agree)
        differ.inc(audit.differ)
        changes.inc(audit.greedy_changes)
        so_far = max(so_far, audit.worst)
        worst.set(so_far)

    return tell
