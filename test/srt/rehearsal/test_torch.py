"""The rehearsal's CUDA runtime under torch's own CUDA code: what it counts, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rehearsal import device

#: What ``python -m rehearsal...`` is run in.
FOLDER = Path(device.__file__).parents[1]
MISSING = device.say_what_is_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, timeout=300)


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    done = _run("-m", "rehearsal.ask_torch")
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def test_the_device_has_a_name_that_no_gpu_has(answers: dict[str, Any]) -> None:
    assert answers["name"] == "rehearsal"


def test_an_operation_is_one_launch_and_no_wait(answers: dict[str, Any]) -> None:
    assert answers["one operation"]["launch"] == 1
    assert answers["one operation"]["host_wait"] == 0


def test_only_a_copy_of_pageable_memory_makes_the_host_wait(answers: dict[str, Any]) -> None:
    assert answers["copy of pinned"]["host_wait"] == 0
    assert answers["copy of pageable"]["host_wait"] == 1
    assert answers["values"] == [0, 1, 2, 3]


def test_torch_refuses_what_it_refuses_on_a_gpu(answers: dict[str, Any]) -> None:
    assert "same device" in answers["other device"]
    assert "out of memory" in answers["out of memory"]
    assert "synchroniz" in answers["item in error mode"]


def test_a_replay_is_one_launch_of_a_graph(answers: dict[str, Any]) -> None:
    assert answers["captures"]["replay"]["graph_launch"] == 1


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("item while capturing", 901),  # cudaErrorStreamCaptureInvalidated
        ("synchronize while capturing", 901),
        ("unjoined stream", 904),  # cudaErrorStreamCaptureUnjoined
    ],
)
def test_a_capture_fails_as_on_a_gpu(answers: dict[str, Any], what: str, code: int) -> None:
    assert f"CUDA error {code}" in answers["captures"][what]
    assert answers["captures"]["capture after these"] is None


def test_a_function_that_is_not_written_ends_the_process_with_its_name() -> None:
    done = _run("-c", "from rehearsal import device; device.load_runtime().cudaDeviceReset()")
    assert done.returncode == 70
    assert "cudaDeviceReset is not written" in done.stderr


def test_the_host_cannot_read_device_memory() -> None:
    make = (
        "import ctypes; from rehearsal.ask_torch import torch; made = torch.zeros(4, device='cuda')"
    )
    assert _run("-c", make).returncode == 0
    read = "ctypes.string_at(made.data_ptr(), 1)"
    assert _run("-c", f"{make}; {read}").returncode == -11


WRITE_A_RESULT = """
from rehearsal import device
device.load_runtime()
import pathlib, sys
sys.path.insert(0, "../scripts")
from result_files import device_name, write_result
write_result(pathlib.Path(sys.argv[1]), {"device": device_name("cuda"), "seconds": 1})
"""


def test_no_figure_of_it_is_written_to_a_result_file(tmp_path: Path) -> None:
    done = _run("-c", WRITE_A_RESULT, str(tmp_path / "result.json"))
    assert done.returncode == 0, done.stderr
    assert "nothing was measured" in done.stderr
    assert not list(tmp_path.iterdir())
