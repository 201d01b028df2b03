"""``bench_gpu.py`` and ``docs/gpu_report.py``, on the CPU and the smallest model."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bench_gpu
import gpu_report
from sglang_gemma4_reference.engine import SWITCHED_OFF
from sglang_gemma4_yoco import log

SCRIPT = Path(bench_gpu.__file__)
COMMAND = [sys.executable, str(SCRIPT), "--preset", "tiny", "--device", "cpu", "--commit", "c0ffee"]


def run(*more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def read(done: subprocess.CompletedProcess[str]) -> tuple[Path, dict[str, Any]]:
    path = Path(done.stdout.splitlines()[-1])
    return path, json.loads(path.read_text())


pytestmark = pytest.mark.release  # each part of the bench, on a CPU


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result file of a whole run."""
    done = run("--results", str(tmp_path_factory.mktemp("results")))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return read(done)[0]


def test_every_part_is_measured(finished: Path) -> None:
    document = json.loads(finished.read_text())
    assert finished.name.startswith("gpu_cpu-")
    assert document["model"] == "E2B_TINY"
    assert document["parts"].keys() == bench_gpu.PARTS.keys()
    for part in document["parts"].values():
        assert part["commit"] == "c0ffee"
        assert "bench_gpu.py --preset tiny" in part["command"]
        assert part["summary"]
    summary = {key: part["summary"] for key, part in document["parts"].items()}
    [published] = summary["a"]
    assert published["off"]["duration"] > 0 < published["on"]["median_ttft_ms"]
    assert [point["path"] for point in summary["c"]] == [log.TAIL_CAPTURED] * 2
    assert summary["e"][1]["on"]["long_prompts"] >= 1
    [profile] = summary["f"]
    assert 0 < len(profile["on"]["largest"]) <= 10
    assert profile["on"]["kernels"] > 0
    # In fp32 all is equal, and the weights are such that logits are not.
    assert summary["g"]["same_answer"] == summary["g"]["prompts"] == 2
    assert summary["g"]["max_difference"] < 1e-3 < summary["g"]["logit_spread"]


def test_prefills_that_sglang_replays(finished: Path) -> None:
    part = json.loads(finished.read_text())["parts"]["h"]
    summary, lengths = part["summary"], list(bench_gpu.TINY.replayed)
    assert summary["prefill_graphs"]["failed"] is None
    assert summary["prefill_graphs"]["exits"].startswith("open")
    assert summary["prefill_graphs"]["rows"] == summary["stock_right"] == lengths
    assert [row["length"] for row in summary["rows"]] == lengths
    for row in summary["rows"]:
        assert row["ms"].keys() == row["paths"].keys() == set(bench_gpu.FOUR_WAYS)
        assert row["paths"]["off replayed"] == SWITCHED_OFF
        assert row["paths"]["on replayed"] == log.EXIT_CAPTURED
        assert all(row["right"].values())
        assert row["same_cache"]


def test_a_finished_run_is_not_repeated_and_another_commit_is(finished: Path) -> None:
    before = json.loads(finished.read_text())
    again = run("--results", str(finished.parent))
    assert again.returncode == 0, again.stderr
    assert "measured before" in again.stdout
    assert read(again)[1]["parts"]["a"]["steps"] == before["parts"]["a"]["steps"]
    # No time at all: what is missing is named, and nothing else is lost.
    other = run(
        "--results", str(finished.parent), "--commit", "other", "--parts", "d", "--minutes", "0"
    )
    assert other.returncode == bench_gpu.OUT_OF_TIME
    assert "out of time before part d: 40 tokens, off" in other.stderr
    assert read(other)[1]["parts"]["a"]["steps"] == before["parts"]["a"]["steps"]


def test_examples_in_docstrings() -> None:
    failed, tried = doctest.testmod(bench_gpu)
    assert tried > 0
    assert failed == 0


def test_the_report_of_it(finished: Path, tmp_path: Path) -> None:
    """A CPU's file is left out; one that claims to be a GPU's is shown."""
    assert gpu_report.table(gpu_report.load(finished.parent)) == gpu_report.NOT_MEASURED
    document = json.loads(finished.read_text()) | {"device_kind": "cuda", "device": "no GPU"}
    (tmp_path / finished.name).write_text(json.dumps(document))
    text = gpu_report.table(gpu_report.load(tmp_path))
    for words in (
        "one prefill of 40 tokens",
        "time to first token",
        "peak memory of a prefill of 40 tokens",
        "p95",
        "greedy answers",
        "stock's replays give the answers of its eager prefills at 2 lengths",
    ):
        assert words in text, words
