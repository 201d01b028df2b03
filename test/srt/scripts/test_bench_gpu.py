"""``bench_gpu.py``: its summary of a profile, its commands, and a whole run on a CPU."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import bench_gpu, result_files, tables
from scripts.bench import bench_latency, bench_prefill
from scripts.environment import REPO
from sglang_gemma4_yoco import counters


def event(name: str, start: float, end: float, **fields: Any) -> SimpleNamespace:
    """Return an event of PyTorch's profiler; times are in microseconds."""
    about = {"device_type": SimpleNamespace(name="CUDA"), "cpu_children": []}
    about |= {"is_user_annotation": False, "time_range": SimpleNamespace(start=start, end=end)}
    return SimpleNamespace(name=name, **about | fields)


def test_busy_and_idle_time_of_a_device() -> None:
    of_host = SimpleNamespace(name="CPU")
    events = [
        event("gemm", 60, 100),
        event("gemm", 0, 30),
        event("norm", 20, 40),
        event("a named range", 0, 500, is_user_annotation=True),
        event("aten::mm", 0, 900, device_type=of_host),
    ]
    found = bench_gpu.device_time(events, "cuda")
    assert (found["device_busy_ms"], found["device_idle_ms"], found["kernels"]) == (0.08, 0.02, 3)
    assert found["largest"] == [["gemm", 2, pytest.approx(0.07)], ["norm", 1, 0.02]]


@pytest.mark.parametrize("part", bench_gpu.COMMANDS)
def test_a_part_is_a_command_of_another_script(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripts = {"bench_latency.py": bench_latency, "bench_prefill.py": bench_prefill}
    for preset in ("E2B", "E2B_TINY"):
        command = bench_gpu.command_of(part, Namespace(preset=preset, results=tmp_path), "cpu")
        monkeypatch.setattr(sys, "argv", command[1:])
        parsed = vars(scripts[Path(command[1]).name])["parse_arguments"]()
        assert parsed.preset == preset
        assert (REPO / parsed.json).resolve().parent == tmp_path.resolve()


def test_a_rehearsal_is_no_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    for device, written in (("rehearsal", False), ("a GPU", True)):
        document = {"device": device}
        assert json.loads(result_files.write_result(file, document)) == document
        assert file.exists() is written
    assert "This is a rehearsal: nothing was measured" in capsys.readouterr().err


@pytest.mark.release
@pytest.mark.timeout(1800)  # ten minutes, if the machine is busy
def test_every_part_is_measured_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, bench_gpu.__file__, "--preset", "E2B_TINY", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = {}
    for part in (*bench_gpu.COMMANDS, *bench_gpu.PARTS):
        [path] = tmp_path.glob(f"gpu_{part}_*.json")
        document = found[part] = json.loads(path.read_text())
        assert document["model"] == "E2B_TINY"
        assert shlex.split(document["command"])[0] == "python"
    [point] = found["prefill"]["points"]
    assert point["path"] == counters.TAIL_CAPTURED
    [point] = found["replayed"]["points"]
    assert point["replayed"]["on replayed"]["path"] == counters.EXIT_CAPTURED
    [point] = found["profile"]["points"]
    assert point["on"]["kernels"] > 0
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    for table in tables.TABLES:
        if table.part.startswith("gpu"):
            assert "E2B_TINY" in "".join(table.lines()), table.part
