"""The host's control flow on a GPU: PyTorch, SGLang and the package on the rehearsal's device.

Each question is answered by a process of ``ask.py``; several tests read one answer. Only integers
are computed: kernels of floats are launched and write nothing. So these are tests of control flow,
and none says anything about an answer, not even where the package compares some. Of every batch it
is asserted first, from matrix products, on how many rows the layers ran. The tests of ``gpu/`` are
rehearsed with all values.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from rehearsal import device
from scripts.environment import REPO
from scripts.result_files import REHEARSAL

MISSING = device.say_what_is_missing()
if version("sglang") != device.SGLANG:
    MISSING = f"the rehearsal knows the kernels of SGLang {device.SGLANG} alone"
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.timeout(900),
]
RELEASE = pytest.mark.release
Ask = Callable[[str], Any]


BATCHES, QUESTIONS = device.read_table("batches"), device.read_table("questions")
STOCK, CAPTURED, EAGER = "stock", "captured", "eager"
CUT_CAPTURED, CUT_EAGER = ["active_captured", None], ["active_eager", None]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository, as the documents say."""
    environment = os.environ | {"PYTHONPATH": str(device.HERE.parent)}
    environment.pop("SGLANG_PLATFORM", None)
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True)


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Return the answer to a question; each is asked once, also if asking failed."""

    @functools.cache
    def run(question: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
        file = tmp_path_factory.mktemp("rehearsal") / "answer.json"
        return file, run_python("-m", "rehearsal.ask", question, str(file))

    def answer(question: str) -> Any:
        file, done = run(question)
        assert done.returncode == 0, done.stderr[-8000:]
        return json.loads(file.read_text())

    return answer


# ---- the device


@pytest.mark.parametrize("file", device.REAL)
def test_libraries_are_built_anew_for_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str
) -> None:
    """After an upgrade of torch, libraries built for the old one lack its new functions."""
    for real in device.REAL:
        (tmp_path / real).parent.mkdir(exist_ok=True)
        (tmp_path / real).touch()
    monkeypatch.setattr(device, "CUDA", tmp_path)
    before = device.find_folder()
    assert device.find_folder() == before
    (tmp_path / file).write_text("of another release")
    assert device.find_folder() != before


def test_a_function_that_is_not_written_ends_the_process_with_its_name() -> None:
    done = run_python("-c", "from rehearsal import device; device.load_runtime().cudaDeviceReset()")
    assert done.returncode == 70
    assert "cudaDeviceReset is not written" in done.stderr


READ_A_TENSOR = """
import ctypes
from rehearsal import device
device.load_runtime()
import torch
from scripts.result_files import device_name
made = torch.zeros(4, device="cuda")
print(device_name("cuda"), flush=True)
ctypes.string_at(made.data_ptr(), 1)
"""


def test_the_host_cannot_read_device_memory() -> None:
    """The device has the name under which no result is written."""
    done = run_python("-c", READ_A_TENSOR)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout == f"{REHEARSAL}\n"


# ---- whole models

each_model = pytest.mark.parametrize(
    "question",
    ["model", *(pytest.param(q, marks=RELEASE) for q in ("e4b", "sm_100", "without_graphs"))],
)


@each_model
def test_the_control_flow_of_a_start(ask: Ask, question: str) -> None:
    """The check runs, the tail is captured, and the path is on.

    The check compares zeros on either side (2.4e-38), as nothing computes a float here: that it
    agrees does not say that the path is right.
    """
    answer = ask(question)
    assert answer["refused"] is None
    assert answer["facts"]["check"]["unchecked"] is None
    assert answer["facts"]["tail_mode"].startswith(QUESTIONS[question]["tail"])


@pytest.mark.parametrize("batch", BATCHES)
@each_model
def test_a_batch_is_cut_and_costs_no_more_than_in_stock(
    ask: Ask, question: str, batch: str
) -> None:
    """The layers after the cut run on the rows that are read, so the fast path was active.

    The host waits where it does in stock: once, where SGLang sums up what its window holds
    (``update_sliding_window_buffer``), where log-probabilities are read, and where images come in.
    Nor is there a wait in the package's planning or in the cut model: PyTorch has refused them
    there (``torch.cuda.set_sync_debug_mode("error")``). Each batch was served as stock first: what
    is compiled after that is the fast path's.
    """
    costs, asked = ask(question)["costs"][batch], BATCHES[batch]
    whole: dict[str, int] = {}
    for way, cost in costs.items():
        assert cost["failure"] is None, way
        is_replayed = asked["replayed"] and way == CAPTURED and question != "without_graphs"
        assert cost["counts"].get("graph_launch", 0) == is_replayed
        whole[way] = cost["product_rows"][str(asked["rows"])]
        assert cost["waits"] == costs[STOCK]["waits"], way
        assert sum(cost["waits"].values()) == asked["waits"], way
        if way != STOCK:
            assert not cost["compiled"], way
            assert "pinning" not in cost["counts"], way
    assert whole[CAPTURED] == whole[EAGER] < 0.7 * whole[STOCK]
    if asked["kept"]:
        after_the_cut = costs[EAGER]["product_rows"][str(asked["kept"])] - 1  # and the logits
        assert after_the_cut + whole[EAGER] > whole[STOCK], "K and V of the donor are apart"


@pytest.mark.parametrize("batch", BATCHES)
def test_launches(ask: Ask, batch: str) -> None:
    """Of E2B: 14 layers of 35 run whole, so a cut prefill without its tail has 380 of stock's 855.

    Stock launches 24 kernels a layer. A graph's tail adds 15 launches to fill its inputs, and two
    where it pads them. An eager tail of 21 layers adds 487. Input log-probabilities add those that
    pick their rows: 30. Images add their encoder.
    """
    costs = ask("model")["costs"][batch]
    for way, most in BATCHES[batch]["launches"].items():
        assert costs[way]["counts"]["launch"] <= most, way


# ---- exits, and host code broken on purpose


@pytest.mark.parametrize("batch", QUESTIONS["exits"]["batches"])
def test_a_cut_prefill_leaves_sglangs_graph_at_the_exit(ask: Ask, batch: str) -> None:
    """Stock replays 11 segments of 10 layers; a cut prefill 5, and the graph of its tail.

    No captured prefill has room for 257 tokens.
    """
    answer = ask("exits")
    assert answer["facts"]["exits"].startswith("open after 5 segments")
    stock, cut = answer["costs"][batch][STOCK], answer["costs"][batch][CAPTURED]
    tail = BATCHES[batch]["replayed"]
    stock_segments, cut_segments = 11, 5
    if batch == "257 tokens":
        stock_segments = cut_segments = 0
    assert stock["counts"].get("graph_launch", 0) == stock_segments
    assert cut["counts"].get("graph_launch", 0) == cut_segments + tail
    assert cut["failure"] is None
    assert cut["waits"] == stock["waits"]
    assert not cut["compiled"]


def test_nothing_is_found_in_what_is_not_broken(ask: Ask) -> None:
    found = ask("exits")["breakages"]
    assert found[""] == found["after them"] == []


@pytest.mark.parametrize("breakage", device.read_table("breakages"), ids=itemgetter("name"))
def test_a_breakage_is_seen(ask: Ask, breakage: dict[str, Any]) -> None:
    """Its findings are named: a breakage that is only misspelt must not count."""
    found = ask("exits")["breakages"][breakage["name"]]
    assert any(breakage["seen"] in one for one in found), found


# ---- races

each_loop = pytest.mark.parametrize("question", ["races", "races_without_overlap"])


@RELEASE
@pytest.mark.parametrize("traffic", ["sound", "audited"])
@each_loop
def test_the_schedulers_loop_has_no_race(ask: Ask, question: str, traffic: str) -> None:
    served = ask(question)[traffic]
    assert served["forwards"]["active_captured"] >= 5
    assert served["forwards"]["active_intermediate_chunk"] >= 5
    assert served["accesses"] > 5000
    assert served["races"] == {}


@RELEASE
@each_loop
def test_the_start_and_the_audits_have_no_race(ask: Ask, question: str) -> None:
    """Captures, their proof and the check have none.

    Audits compare zeros, so how many agree says only how many ran.
    """
    answer = ask(question)
    assert answer["refused"] is None
    assert answer["start"]["accesses"] > 10000
    assert answer["start"]["races"] == {}
    assert answer["audited"]["audits"]["agrees"] >= 10
    assert answer["audited"]["audits"]["differs"] == 0


@RELEASE
@pytest.mark.parametrize(
    ("race", "place"),
    [
        ("planned on a side stream", "on side"),
        ("replayed on a side stream", "on side"),
        ("without the barrier", "set_full_to_swa_mapping"),
    ],
)
def test_a_race_on_purpose_is_seen(ask: Ask, race: str, place: str) -> None:
    races = ask("races")[race]["races"]
    assert any(place in described for described in races), races


# ---- failures


@RELEASE
def test_memory_of_the_tail(ask: Ask) -> None:
    """Memory of E2B's tail for up to 32 rows, by PyTorch's allocator; the driver's is not in it."""
    found = ask("failures")["failures"]
    assert found["as started"] == found["captured four times"] == CUT_CAPTURED
    without, captured = found["without the tail"], found["captured"]
    assert 60 <= captured[0]["allocated"] - without["allocated"] <= 80
    assert captured[0]["reserved"] - without["reserved"] <= 100
    for name, once in captured[0].items():
        assert abs(captured[-1][name] - once) < 2, name


@RELEASE
def test_a_failed_capture_leaves_a_working_device(ask: Ask) -> None:
    """The second bucket's fails, when the device is synchronised; others are in the breakages."""
    answer = ask("failures")["failures"]
    found = answer["a capture fails"]
    assert found["tail"].startswith("eager (capturing failed")
    assert not found["still captures"]
    assert found["random numbers"] == [1]
    assert found["eager"] == CUT_EAGER
    assert found["memory"]["pools"] == answer["without the tail"]["pools"]
    assert found["captured again"] == CUT_CAPTURED


@RELEASE
def test_a_failed_capture_of_prefills_leaves_a_working_server(ask: Ask) -> None:
    """The second bucket's fails, when the device is synchronised: prefills are eager, and cut."""
    answer = ask("capture_fails")
    assert answer["refused"] is None
    assert answer["facts"]["tail_mode"].startswith("captured")
    assert answer["device"]["prefills"] == "EagerRunner"
    assert not answer["device"]["still captures"]
    assert answer["device"]["random numbers"] == [1]
    for way, launches in ((STOCK, 0), (CAPTURED, 1)):
        cost = answer["costs"]["40 tokens"][way]
        assert (cost["failure"], cost["counts"].get("graph_launch", 0)) == (None, launches)


@RELEASE
def test_memory_that_runs_out_in_a_tail(ask: Ask) -> None:
    """At each of five gathers of rows, stock serves the batch, and the next one is cut again."""
    found = ask("failures")["failures"]
    assert found["refused"] is None
    assert found["after it"] == CUT_CAPTURED
    *failures, at_none = found["out of memory"]
    assert at_none == CUT_EAGER
    for outcome, failure in failures:
        assert outcome == "failed"
        assert "out of memory" in failure


# ---- tests for a GPU


@RELEASE
def test_the_tests_that_need_a_gpu_pass() -> None:
    """The command is that of ``benchmark/on_a_gpu.md``; a test that needs CUPTI is left out."""
    done = run_python("scripts/run_tests.py", "--gpu", "--", "-p", "rehearsal.gpu_tests")
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed, 1 deselected", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) >= 80
