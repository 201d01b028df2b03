"""Alerts: promtool evaluates the rules on servers' metrics.

promtool is in Debian's package ``prometheus``; test/README.md says how to get it without a daemon.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import pytest

from harness.ask import generate, tokens
from harness.scraped import samples
from harness.server import Server, pair
from sglang_gemma4_yoco.core import forward

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH"),
]

RULES = Path(__file__).resolve().parents[3] / "docs" / "monitoring" / "alerts.yml"
NAMES = set(re.findall(r"sglang:\w+", RULES.read_text()))
FAILS, DIFFERS = "Gemma4FastPrefillFails", "Gemma4FastPrefillDiffers"
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'

#: The values of one server's series at a scrape; it is empty if the server does not answer.
Scrape = Mapping[str, float]


@dataclass(frozen=True)
class Exported:
    """Metrics of a server before its first request, after a burst of failures, and of stock."""

    fresh: Scrape
    failed: Scrape
    stock: Scrape


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Return the metrics of real servers, under a name like those of Google's models."""
    directory = tmp_path_factory.mktemp("alerts")
    arguments = ("--enable-metrics", "--served-model-name", "google/gemma-4-E2B-it")
    with pair(tiny_checkpoint, directory, *arguments) as (server, stock):
        fresh = scrape(server)
        server.failures.write_text("1")
        for seed in range(forward.LIMIT):
            generate(server, tokens(50, seed=seed))
        assert len(server.log_lines(forward.GIVEN_UP.text)) == 1
        return Exported(fresh, scrape(server), scrape(stock))


def scrape(server: Server) -> Scrape:
    """Return the series that the rules read, as Prometheus stores them for a server named a."""
    values = {}
    found = samples(server)
    for name in NAMES:
        for sample in found[name]:
            labels = ['instance="a"', *starmap('{}="{}"'.format, sample.labels.items())]
            values[f"{name}{{{','.join(labels)}}}"] = sample.value
    return values


def changed(values: Scrape, label: str, value: float) -> Scrape:
    """Return the scrape with another value of the series that has this label."""
    [series] = [series for series in values if label in series]
    return {**values, series: value}


def rising(values: Scrape, *labels: str) -> list[Scrape]:
    """Return scrapes of an hour and a half, in which these series rise by 3 a minute."""
    found = []
    for minute in range(90):
        now = values
        for label in labels:
            now = changed(now, label, 3 * minute)
        found.append(now)
    return found


def assert_fire(
    directory: Path, minutes: Sequence[Scrape], expected: Mapping[int, Sequence[str]]
) -> None:
    """Assert that these alerts fire in these minutes, and no others do."""
    inputs = []
    for series in set().union(*minutes):
        values = [str(known.get(series, "stale")) for known in minutes]
        inputs.append({"series": series, "values": " ".join(values)})
    checks = []
    for minute, alerts in expected.items():
        fire = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts]
        checks.append({"expr": FIRING, "eval_time": f"{minute}m", "exp_samples": fire})
    test = {"interval": "1m", "input_series": inputs, "promql_expr_test": checks}
    file = directory / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [test]}))
    ran = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_failures_between_two_scrapes(exported: Exported, tmp_path: Path) -> None:
    """The path is off then, so the alert stays."""
    minutes = [exported.fresh] * 20 + [exported.failed] * 40
    assert_fire(tmp_path, minutes, {15: [], 20: [FAILS], 59: [FAILS]})


def test_failures_before_the_first_scrape(exported: Exported, tmp_path: Path) -> None:
    assert_fire(tmp_path, [exported.failed] * 30, {0: [FAILS], 29: [FAILS]})


def test_failures_of_a_restarted_server(exported: Exported, tmp_path: Path) -> None:
    """There are as many as before the restart; after another restart there are none."""
    failed = [exported.failed] * 20 + [{}] * 5
    minutes = failed + failed + [exported.fresh] * 20
    assert_fire(tmp_path, minutes, {19: [FAILS], 22: [], 25: [FAILS], 69: []})


def test_an_audit_that_differs(exported: Exported, tmp_path: Path) -> None:
    differs = [changed(exported.fresh, 'result="differs"', 1)] * 20
    assert_fire(tmp_path, differs, {0: [DIFFERS]})
    assert_fire(tmp_path, [exported.fresh] * 20 + differs, {15: [], 20: [DIFFERS]})


def test_prefills_that_other_code_runs(exported: Exported, tmp_path: Path) -> None:
    """None of them is cut; beside one that is cut they are no fault."""
    unseen = 'outcome="unseen"'
    assert_fire(tmp_path, rising(exported.fresh, unseen), {5: [], 15: ["Gemma4FastPrefillUnseen"]})
    assert_fire(tmp_path, rising(exported.fresh, unseen, 'outcome="exit_captured"'), {15: []})


def test_an_hour_in_which_nothing_was_cut(exported: Exported, tmp_path: Path) -> None:
    off = 'outcome="server_unsupported"'
    assert_fire(tmp_path, rising(exported.fresh, off), {30: [], 80: ["Gemma4FastPrefillOff"]})
    assert_fire(tmp_path, rising(exported.fresh, off, 'outcome="active_eager"'), {80: []})
    probes = 'outcome="every_row_of_the_batch_is_read"'
    values = {series.replace(off, probes): value for series, value in exported.fresh.items()}
    assert_fire(tmp_path, rising(values, probes), {80: []})


def test_a_server_without_the_plugin(exported: Exported, tmp_path: Path) -> None:
    assert_fire(tmp_path, [exported.stock] * 30, {10: [], 20: ["Gemma4FastPrefillMissing"]})
    assert_fire(tmp_path, [exported.fresh] * 30, {20: []})
