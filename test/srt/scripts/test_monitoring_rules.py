"""Prometheus rules of docs/monitoring, which promtool evaluates.

``server/test_served_metrics.py`` tests that servers export the names and labels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from harness import rules
from harness.rules import MONITORING, evaluate
from harness.validators import run

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


@pytest.mark.parametrize("file", ["alerts.yml", "canary.yml"])
def test_rules_are_valid(file: str) -> None:
    run("promtool", "check", "rules", "--lint=all", "--lint-fatal", MONITORING / file)


def test_the_example_of_a_canary() -> None:
    run("promtool", "test", "rules", MONITORING / "canary_test.yml")


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


def test_another_pod_without_the_plugin_gets_no_verdict(tmp_path: Path) -> None:
    series = change({})
    for name, values in change({"gemma4_yoco": ""}).items():
        series[name.replace("fast-1", "fast-2").replace("10.0.0.1", "10.0.0.2")] = values
    expected = {
        "count by (verdict) (gemma4_canary:verdict)": {'{verdict="no verdict"}': 1},
        "count by (check) (gemma4_canary:check == 0)": {'{check="plugin_metrics"}': 1},
    }
    evaluate(tmp_path, "canary.yml", series, expected)


def test_stock_alone_gets_no_lines(tmp_path: Path) -> None:
    expected = {"gemma4_canary:verdict or gemma4_canary:check": dict[str, float]()}
    evaluate(tmp_path, "canary.yml", change({'track="fast"': ""}), expected)


RANK = 'tp_rank="0"'
FORWARDS = "sglang:gemma4_yoco_forwards_total"


def of(pod: str, name: str, labels: str = "") -> str:
    """Return a series of a pod's server, on the track of its name."""
    track = pod.partition("-")[0]
    own = f'namespace="n",pod="{pod}",instance="{pod}:30000",track="{track}",model_name="gemma"'
    return f"{name}{{{own},{labels}{RANK}}}"


def forwards(**outcomes: str) -> dict[str, str]:
    """Return the forwards of one server: 0 of other outcomes."""
    known = dict.fromkeys(("active_captured", "failed", "unseen", "server_unsupported"), "0x60")
    return {
        of("fast-1", FORWARDS, f'outcome="{outcome}",'): values
        for outcome, values in {**known, **outcomes}.items()
    }


def serve(*pods: str, plugin: str = "", lost: str = "") -> dict[str, str]:
    """Return the series of servers, of which some have the plugin, or had it for some minutes."""
    running = {of(pod, "sglang:num_running_reqs"): "0x60" for pod in pods}
    rows = {of(pod, "sglang:gemma4_yoco_rows_total"): "0x60" for pod in plugin.split()}
    return (
        running
        | rows
        | {of(pod, "sglang:gemma4_yoco_rows_total"): "0x20 stale" for pod in lost.split()}
    )


@pytest.mark.parametrize(
    ("series", "firing"),
    [
        pytest.param(forwards(active_captured="0+5x60"), "", id="active"),
        pytest.param(
            forwards(active_captured="0+5x30 150x30", server_unsupported="0x30 0+5x30"),
            "Off fast-1",
            id="stopped 15 minutes ago",
        ),
        pytest.param(
            forwards(active_captured="0+5x30 150x30", every_row_of_the_batch_is_read="0+8x60"),
            "",
            id="idle, with probes",
        ),
        pytest.param(forwards(server_unsupported="0+8x60"), "Off fast-1", id="idle, all stock"),
        pytest.param(forwards(unseen="0+5x60"), "Unseen fast-1", id="other code"),
        pytest.param(forwards(unseen="0+5x60", active_captured="0+1x60"), "", id="also other"),
        pytest.param(forwards(failed="8x60"), "Fails fast-1", id="failed before a scrape"),
        pytest.param(forwards(failed="0x30 8x30"), "Fails fast-1", id="failed"),
        pytest.param(forwards(failed="8x10 stale _x20 0x30"), "", id="restarted"),
        pytest.param(
            {of("fast-1", "sglang:gemma4_yoco_audits_total", 'result="differs",'): "1x60"},
            "Differs fast-1",
            id="audit",
        ),
        pytest.param(serve("fast-1", "stock-1", "stock-2", plugin="fast-1"), "", id="canary"),
        pytest.param(serve("fast-1"), "Missing fast-1", id="a canary without"),
        pytest.param(serve("fast-1", "fast-2", plugin="fast-2"), "Missing fast-1", id="one of two"),
        pytest.param(
            serve("stock-1", "stock-2", plugin="stock-1"), "Missing stock-2", id="half rolled out"
        ),
        pytest.param(
            serve("stock-1", lost="stock-1"), "Missing stock-1", id="lost after an upgrade"
        ),
    ],
)
def test_alerts(series: dict[str, str], firing: str, tmp_path: Path) -> None:
    """An alert keeps the labels by which its pod is found; no other alert fires."""
    alert, _, pod = firing.partition(" ")
    labels = f'namespace="n",pod="{pod}",instance="{pod}:30000",model_name="gemma"'
    fires = {f'{{alertname="Gemma4FastPrefill{alert}",{labels}}}': 1} if alert else {}
    count = "count by (alertname, namespace, pod, instance, model_name)"
    evaluate(tmp_path, "alerts.yml", series, {f'{count} (ALERTS{{alertstate="firing"}})': fires})


def test_expressions_of_the_dashboard(tmp_path: Path) -> None:
    """They parse with Grafana's variables replaced."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(expressions)
    ]
    file = tmp_path / "dashboard.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    run("promtool", "check", "rules", file)
