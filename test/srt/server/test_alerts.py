"""Alerts on the metrics of real servers; ``scripts/test_monitoring_rules.py`` tests each rule."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import pytest

from harness.ask import generate, tokens
from harness.rules import MONITORING, evaluate
from harness.scraped import samples
from harness.server import Server, pair
from sglang_gemma4_yoco.core import forward

pytestmark = pytest.mark.release

NAMES = set(re.findall(r"sglang:\w+", (MONITORING / "alerts.yml").read_text()))
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'

#: The values of one server's series at a scrape.
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


def assert_fires(directory: Path, values: Scrape, *alerts: str, track: str = "fast") -> None:
    """Assert that these alerts, and no others, fire for a server that keeps exporting this."""
    series = {
        name.replace("{", f'{{track="{track}",', 1): f"{value}x60" for name, value in values.items()
    }
    fire = {f'{{alertname="Gemma4FastPrefill{alert}"}}': 1 for alert in alerts}
    evaluate(directory, "alerts.yml", series, {FIRING: fire})


def test_a_server_without_failures(exported: Exported, tmp_path: Path) -> None:
    assert_fires(tmp_path, exported.fresh)


def test_failures_before_the_first_scrape(exported: Exported, tmp_path: Path) -> None:
    """The path is off then, so the alert stays."""
    assert_fires(tmp_path, exported.failed, "Fails")


def test_a_server_without_the_plugin(exported: Exported, tmp_path: Path) -> None:
    assert_fires(tmp_path, exported.stock, "Missing")
    assert_fires(tmp_path, exported.stock, track="stock")
