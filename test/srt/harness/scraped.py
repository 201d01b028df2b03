"""Metrics that a server exports in /metrics."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from harness.server import Server


def samples(server: Server) -> dict[str, list[Any]]:
    """Return the samples of /metrics, by name."""
    found = defaultdict(list)
    for family in text_string_to_metric_families(server._ask("GET", "/metrics").text):
        for sample in family.samples:
            found[sample.name].append(sample)
    return found
