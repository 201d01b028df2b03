"""A server's report on the fast path, in SGLang's metrics and in /server_info.

On two ranks, of which one counts for both; both audit every cut prefill.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from harness.ask import chat, generate, tokens
from harness.layer_rows import assert_all_fast, without_audit
from harness.scraped import samples
from harness.server import CHUNK, Server
from scripts.environment import REPO
from sglang_gemma4_yoco import __version__, counters, metrics
from sglang_gemma4_yoco.core import eligibility

FORWARDS, ROWS = "sglang:gemma4_yoco_forwards", "sglang:gemma4_yoco_rows"
AUDITS = "sglang:gemma4_yoco_audits"
LONG = CHUNK + 40


@pytest.fixture(scope="module")
def measured(ranks_server: Server) -> Server:
    """Return a server after a prompt of two chunks, one of a single token, and a streamed one."""
    ranks_server.forget_prefixes()
    mark = ranks_server.mark()
    generate(ranks_server, tokens(LONG, seed=1))
    prefills = ranks_server.prefills(since=mark)
    for prefill in prefills:
        assert prefill.rows[0] in (2 * CHUNK, 2 * (LONG - CHUNK))
    assert_all_fast(map(without_audit, prefills))
    generate(ranks_server, tokens(1, seed=2))
    chat(ranks_server, "Which token comes next?", stream=True)  # for inter-token latencies
    return ranks_server


def series(server: Server, name: str, label: str) -> dict[str, float]:
    """Return the values of a counter by one of its labels; each value may have one series."""
    found = {}
    for sample in samples(server)[f"{name}_total"]:
        assert sample.labels[label] not in found
        assert {"model_name", "engine_type", "tp_rank", "pp_rank"} <= sample.labels.keys()
        assert sample.labels["tp_rank"] == "0"
        found[sample.labels[label]] = sample.value
    return found


def test_forwards_and_rows(measured: Server) -> None:
    """They are those that the server computed since its start, its own warm-up included."""
    prefills = [*map(without_audit, measured.prefills(since=0))]
    forwards = series(measured, FORWARDS, "outcome")
    rows = series(measured, ROWS, "part")
    assert forwards[counters.TAIL_EAGER] >= 1
    assert forwards[metrics.make_label(eligibility.NOTHING_TO_SKIP)] >= 1
    assert forwards[counters.TAIL_SKIPPED] >= 1
    # Each rank has written down each of its forwards.
    assert sum(forwards.values()) == len(prefills) / 2
    assert rows["computed"] + rows["skipped"] == sum(p.rows[0] for p in prefills) / 2
    assert rows["computed"] == sum(p.rows[-1] for p in prefills) / 2


def test_server_info_has_the_same_numbers(measured: Server) -> None:
    forwards = series(measured, FORWARDS, "outcome")
    for state in measured.reports():
        assert state["version"] == __version__
        assert state["active"] is True
        assert state["reason"] is None
        assert "inside layer 3" in state["cut"]
        assert state["tail"].startswith("eager (")
        assert Counter(state["forwards"]) == Counter(forwards)  # whose equality ignores zeros
        assert state["rows"] == series(measured, ROWS, "part")


def test_audits(measured: Server) -> None:
    """Each cut prefill counts once, though both ranks have run it again."""
    audits = series(measured, AUDITS, "result")
    forwards = series(measured, FORWARDS, "outcome")
    cut = sum(number for outcome, number in forwards.items() if outcome in counters.CUT)
    assert audits == {"agrees": cut, "differs": 0}
    for state in measured.reports():
        assert state["audits"]["agrees"] == cut
        assert 0 < state["audits"]["worst"] < 0.5  # half of the tolerance
        assert state["check"]["largest_difference"] <= state["check"]["allowed"]


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yml", "canary.yml", "canary_test.yml"])
def test_dashboards_and_alerts_use_existing_metrics(measured: Server, file: str) -> None:
    """Dashboards' and rules' names, labels and outcomes all exist; no prefill failed."""
    text = (REPO / "docs" / "monitoring" / file).read_text().replace('\\"', '"')
    named = set(re.findall(r"sglang:\w+", text))
    assert named
    # Prometheus adds the first four, all but `instance` where it is told to; rules add the others.
    known = {"instance", "pod", "namespace", "track", "check", "otherwise", "verdict"}
    measured_samples = samples(measured)
    assert named <= measured_samples.keys()
    pairs = set()
    for name in named:
        for sample in measured_samples[name]:
            known.update(sample.labels)
            pairs.update(sample.labels.items())
    assert known >= set(re.findall(r"(\w+)=~?\"", text))
    for grouped in re.findall(r"by \(([^)]*)\)", text):
        assert known >= set(grouped.split(", "))
    assert pairs >= set(re.findall(r'(outcome|part|result)="([^"]+)"', text))
