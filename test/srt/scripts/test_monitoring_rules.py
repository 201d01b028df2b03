"""Prometheus rules of docs/monitoring, which promtool evaluates.

``server/test_served_metrics.py`` tests that servers export the names and labels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from harness import rules
from harness.rules import MONITORING, evaluate, run_promtool

CANARIES = yaml.safe_load(Path(rules.__file__).with_name("canaries.yaml").read_text())["canaries"]
EXAMPLE = yaml.safe_load((MONITORING / "canary_test.yml").read_text())["tests"][0]
SERIES = {entry["series"]: entry["values"] for entry in EXAMPLE["input_series"]}


def change(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the series of a good canary with other values, or without those that have none."""
    series = dict(SERIES)
    for pattern, values in {'"failed"': "0x60", **changes}.items():
        found = [name for name in SERIES if re.search(pattern, name)]
        assert found, pattern
        series |= dict.fromkeys(found, values)
    return {name: values for name, values in series.items() if values}


@pytest.mark.parametrize("file", ["canary.yml"])
def test_rules_are_valid(file: str) -> None:
    run_promtool("check", "rules", "--lint=all", "--lint-fatal", MONITORING / file)


def test_the_example_of_a_canary() -> None:
    run_promtool("test", "rules", MONITORING / "canary_test.yml")


@pytest.mark.parametrize("name", CANARIES)
def test_verdict(name: str, tmp_path: Path) -> None:
    canary = CANARIES[name]
    expected = {
        "count by (verdict) (gemma4_canary:verdict)": {f'{{verdict="{canary["verdict"]}"}}': 1},
        "count by (check) (gemma4_canary:check == 0)": {
            f'{{check="{check}"}}': 1 for check in canary["unmet"]
        },
    }
    evaluate(tmp_path, "canary.yml", change(canary["changes"]), expected)


@pytest.mark.parametrize("name", sorted({re.split("{", series)[0] for series in SERIES}))
def test_a_missing_metric_is_no_pass(name: str, tmp_path: Path) -> None:
    expected = {"count(gemma4_canary:verdict == 1)": dict[str, float]()}
    evaluate(tmp_path, "canary.yml", change({f"^{name}{{": ""}), expected)
