"""``bench_gpu.py``: a rehearsal of it, and a whole run on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import bench_gpu, result_files, tables
from sglang_gemma4_yoco import counters


def test_a_rehearsal_is_no_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    for device, written in (("rehearsal", False), ("a GPU", True)):
        document = {"device": device}
        assert json.loads(result_files.write_result(file, document)) == document
        assert file.exists() is written
    assert "This is a rehearsal: nothing was measured" in capsys.readouterr().err


def test_a_part_that_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "bench_gpu.py --preset E2B E4B --part load --minutes 2 --device cpu"
    monkeypatch.setattr(sys, "argv", words.split())
    assert bench_gpu.main() == 1
    told = capsys.readouterr().err
    assert "skipped: it takes about 3 minutes, " in told
    assert told.endswith("load of E2B, load of E4B\n")


@pytest.mark.release
@pytest.mark.timeout(1800)  # ten minutes, if the machine is busy
def test_every_part_is_measured_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, bench_gpu.__file__, "--preset", "E2B_TINY", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = {}
    for part in bench_gpu.COMMANDS:
        [path] = tmp_path.glob(f"gpu_{part}_*.json")
        document = found[part] = json.loads(path.read_text())
        assert document["model"] == "E2B_TINY"
    [point] = found["prefill"]["points"]
    assert point["path"] == counters.TAIL_CAPTURED
    [point] = found["replayed"]["points"]
    assert point["replayed"]["on replayed"]["path"] == counters.EXIT_CAPTURED
    [point] = found["profile"]["points"]
    assert point["profile"]["on"]["kernels"] > 0
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    for table in tables.TABLES:
        # "gpu eager" is of bench_prefill.py; "gpu replayed" has times on a GPU only.
        if table.part.startswith("gpu") and table.part not in ("gpu eager", "gpu replayed"):
            assert any(line.startswith("| E2B_TINY") for line in table.lines()), table.part
