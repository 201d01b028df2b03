"""SGLang metrics and the /server_info entry of ``counters``.

SGLang's endpoint collects the metrics of all processes from a shared multiprocess directory, so
counters created here appear there. They are created with SGLang's scheduler metrics and have their
labels; one rank counts for its group.

``prometheus_client`` must be imported late: on import it decides whether to use that directory,
which SGLang sets after it has loaded its plugins.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sglang_gemma4_yoco import COMMIT, __version__, compat, counters, settings
from sglang_gemma4_yoco.admission import arguments
from sglang_gemma4_yoco.core.state import ModelState, get_attached_state
from sglang_gemma4_yoco.counters import Outcome, served
from sglang_gemma4_yoco.refusal import SERVER_UNSUPPORTED, ServerRefusal

#: The key in the internal state of each scheduler in /server_info.
SERVER_INFO_ENTRY = "gemma4_yoco"
NO_MODEL = "no model with a KV-shared tail is served"

_PREFIX = "sglang:gemma4_yoco_"
# Outcomes whose series start at 0: Prometheus sees no increase in the first value of a series.
_EXPECTED = (
    *counters.CUT,
    counters.FAILED,
    counters.UNSEEN,
    SERVER_UNSUPPORTED,
    arguments.UNTESTED_RELEASE,
)
# An attribute of ``Counters`` -> the documentation of its metric, the metric's own label, and the
# values of that label whose series start at 0.
_COUNTERS: dict[str, tuple[str, str, tuple[Outcome, ...]]] = {
    "forwards": (
        "Prefill forwards, by outcome: how they were cut, or why not.",
        "outcome",
        _EXPECTED,
    ),
    "rows": (
        "Rows of prefills, by whether the KV-shared layers computed them.",
        "part",
        counters.PARTS,
    ),
    "audits": (
        "Prefills that were run again as stock, by result of the comparison.",
        "result",
        counters.RESULTS,
    ),
}


def describe_state() -> dict[str, Any]:
    """Return this process's entry in /server_info.

    ``commit``: the commit from which the wheel was built; ``settings``: those of this process;
    ``reason``: why it is not active; ``cut``, ``tail``: where it is cut, and how the tail runs;
    ``exits``: whether captured prefills may be cut; ``check``, ``exits_check``: results of the
    checks at start; ``rows``: by whether the last layer computed them; ``audits``: their results.
    """
    state = get_attached_state()
    reason = _find_inactive_reason(state)
    forwards = Counter[str]()
    for outcome, number in served.forwards.items():
        forwards[make_label(outcome)] += number
    entry = {
        "version": __version__,
        "commit": COMMIT,
        # A list: JSON has no tuples.
        "settings": {**asdict(settings.current), "trust": [*settings.current.trust]},
        "active": reason is None,
        "reason": reason,
        **dict.fromkeys(("cut", "tail", "exits", "check", "exits_check")),
        "forwards": forwards,
        "rows": served.rows,
        "audits": {
            **dict.fromkeys(counters.RESULTS, 0),
            **served.audits,
            "worst": served.worst_audit,
        },
    }
    if state:
        report = state.report
        entry |= {"check": report.check, "exits_check": report.exits_check}
        if not reason:
            entry |= {"cut": state.describe(), "tail": report.tail_mode, "exits": report.exits}
    return {name: replace_infinite(value) for name, value in entry.items()}


def _find_inactive_reason(state: ModelState | None) -> str | None:
    """Return the text of the reason why the fast path is not active, or None."""
    if not state:
        return NO_MODEL
    if state.off_because:
        return state.off_because.text
    if served.is_unused():
        return counters.NOT_CUT
    return None


def make_label(outcome: Outcome) -> str:
    """Return the metric label of an outcome, in snake case; server-wide reasons share labels.

    >>> make_label("forward mode IDLE"), make_label(ServerRefusal("LoRA"))
    ('forward_mode_idle', 'server_unsupported')
    """
    if isinstance(outcome, ServerRefusal):
        return outcome.label
    return re.sub(r"\W+", "_", str(outcome).replace("'", "")).lower().strip("_")


def replace_infinite(value: object) -> object:
    """Return ``value`` with non-finite numbers as strings, since JSON has none.

    >>> replace_infinite({"worst": math.inf, "check": {"allowed": 0.5}})
    {'worst': 'inf', 'check': {'allowed': 0.5}}
    """
    if isinstance(value, Mapping):
        return {name: replace_infinite(part) for name, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def collect_metrics(labels: Mapping[str, object]) -> None:
    """Create the metrics with the scheduler's labels, and count in them from now on."""
    every_rank = compat.server.read_argument("enable_metrics_for_all_schedulers")
    if labels.get("tp_rank") and not every_rank:
        return

    import prometheus_client

    counted = {
        name: prometheus_client.Counter(f"{_PREFIX}{name}", text, [*labels, own])
        for name, (text, own, _) in _COUNTERS.items()
    }

    @functools.cache  # looking up a series takes longer than incrementing it
    def find_series(name: str, own: Outcome) -> prometheus_client.Counter:
        return counted[name].labels(*labels.values(), make_label(own))

    def collect(name: str, own: Outcome, number: int) -> None:
        find_series(name, own).inc(number)

    for name, (_, _, expected) in _COUNTERS.items():
        counts: Counter[Outcome] = getattr(served, name)
        for label in {*expected, *counts}:
            collect(name, label, counts[label])
    served.observers.append(collect)
