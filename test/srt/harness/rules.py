"""Prometheus rules of docs/monitoring, evaluated by promtool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from harness.validators import run
from scripts.environment import REPO

MONITORING = REPO / "docs" / "monitoring"


def evaluate(
    directory: Path,
    rules: str,
    series: Mapping[str, str],
    expected: Mapping[str, Mapping[str, float]],
) -> None:
    """Assert the samples of expressions after 45 minutes, by their labels."""
    checks = []
    for expression, samples in expected.items():
        wanted = [{"labels": labels, "value": value} for labels, value in samples.items()]
        checks.append({"expr": expression, "eval_time": "45m", "exp_samples": wanted})
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": inputs, "promql_expr_test": checks}
    file = directory / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(MONITORING / rules)], "tests": [test]}))
    run("promtool", "test", "rules", file)
