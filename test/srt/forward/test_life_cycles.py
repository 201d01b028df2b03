"""Leaks over a server's life cycles: repeated captures, updates and restarts leave nothing.

Counts are taken from outside: attributes and hooks on SGLang's objects, the package's functions and
objects that are alive, graphs, and entries in the package's lists. Graphs are recorded on a CPU
(``graph_backend``, ``prefill_graphs``).
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.model_executor import model_runner

from harness import prefill_exits
from harness.batches import batch_of
from harness.fixtures import Said
from harness.forwards import ENGINE, state_of
from harness.observe import without_padding
from harness.prefill_exits import RECORDED, assert_served_alike, run
from sglang_gemma4_reference import prefill_graphs as graphs_on_a_cpu
from sglang_gemma4_reference import recorder, releases
from sglang_gemma4_reference.engine import Engine, reset_log
from sglang_gemma4_reference.platform import CAPTURED
from sglang_gemma4_reference.recorder import RecordedGraph
from sglang_gemma4_yoco import compat, counters, settings
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.captured.graphs import TailGraphs
from sglang_gemma4_yoco.prefill_exits import graph_exits

pytestmark = pytest.mark.usefixtures("forgotten_reports")

PACKAGE = "sglang_gemma4_yoco"
TO_THE_EXIT = batch_of((0, 30))
WITHOUT_A_BUCKET = batch_of((0, 40))


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    """Yield an engine that captures decode steps, prefills up to 32 tokens, and a tail of one row.

    Each test leaves all of it captured, and the exits open.
    """
    captured = RECORDED | {"cuda_graph_bs_decode": [1], "cuda_graph_bs_prefill": [32]}
    with pytest.MonkeyPatch.context() as patched, graphs_on_a_cpu.recordable():
        patched.setenv(CAPTURED, "decode")
        patched.setattr(prefill_exits, "BUCKETS", [32])
        engine = Engine(tiny_checkpoint, **ENGINE, **captured)
        with settings.changed(graph_rows=1):
            start_again(engine)
            yield engine


def assert_served_at_the_exit(engine: Engine) -> None:
    assert assert_served_alike(engine, TO_THE_EXIT) == counters.EXIT_CAPTURED


# ---------------------------------------------------------------- counts


def is_of_the_package(value: Any) -> bool:
    """Return True for the package's functions and objects, and functions that would call one."""
    if isinstance(value, partial):
        return any(map(is_of_the_package, (value.func, *value.args)))
    owner = value
    if not isinstance(value, FunctionType):
        owner = type(value)
    return str(getattr(owner, "__module__", "")).startswith(PACKAGE)


def count_attributes(engine: Engine) -> Counter[str]:
    """Count the package's attributes on SGLang's objects, and hooks on SGLang's modules."""
    runner, found = engine.runner, Counter[str]()
    prefills = runner.prefill_cuda_graph_runner
    owners = [
        *runner.model.modules(),
        *(runner, runner.attn_backend, runner.token_to_kv_pool, runner.decode_cuda_graph_runner),
        *(prefills, getattr(prefills, "backend", None)),
    ]
    for owner in filter(None, owners):
        for name, value in vars(owner).items():
            kind = f"{type(owner).__name__}.{name}"
            found[kind] += is_of_the_package(value)
            if name.endswith("_hooks"):
                found[kind] += len(value)
    return +found


def count_what_is_alive() -> Counter[str]:
    """Count the package's functions and objects, all attention backends, and graphs."""
    recorder.replays.clear()
    gc.collect()
    found = Counter[str]()
    for value in gc.get_objects():
        if isinstance(value, FunctionType):
            if str(value.__module__).startswith(PACKAGE):
                found[value.__qualname__] += 1
        elif isinstance(value, AttentionBackend | RecordedGraph) or is_of_the_package(value):
            found[type(value).__name__] += 1
    return found


def count_entries() -> Counter[str]:
    """Count the entries of the lists, sets and tables of the package's modules."""
    found = Counter[str]()
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGE) and "_reference" not in name:
            for attribute, value in vars(module).items():
                if not attribute.startswith("__") and hasattr(type(value), "__len__"):
                    found[f"{name}.{attribute}"] = len(value)
    return found


def what_is_left(engine: Engine) -> dict[str, Any]:
    """Return all counts after some forwards."""
    reset_log()
    outcomes = []
    for prompts in (TO_THE_EXIT, WITHOUT_A_BUCKET):
        batch = engine.schedule(prompts)
        counters.served.forwards.clear()
        engine.forward(batch)
        outcomes.append(dict(counters.served.forwards))  # each batch is counted once
        engine.decode(batch, [7])
    return {
        "outcomes": outcomes,
        "attributes": count_attributes(engine),
        "alive": count_what_is_alive(),
        "entries": count_entries(),
    }


# ---------------------------------------------------------------- repeated events


def start_again(engine: Engine) -> None:
    with torch.no_grad():
        engine.runner.init_attention_backends()
        engine.runner.init_cuda_graphs()


def capture_decode_steps(engine: Engine) -> None:
    with torch.no_grad():
        engine.runner.recapture_decode_cuda_graph()


def update_from_disk(engine: Engine, *, recapture: bool) -> None:
    runner = engine.runner
    with torch.no_grad():
        updated, message = runner.weight_updater.update_weights_from_disk(
            runner.model_config.model_path, "auto", recapture_cuda_graph=recapture
        )
    assert updated, message


def update_from_tensors(engine: Engine) -> None:
    updater = engine.runner.weight_updater
    named = engine.runner.model.named_parameters()
    weights = [(name, weight.clone()) for name, weight in named]
    updater.begin_weight_update()
    updated, message = updater.update_weights_from_tensor(weights, load_format="direct")
    updater.end_weight_update(run_post_load=False)
    assert updated, message


def release_and_resume_memory(engine: Engine) -> None:
    """Only the calls that reach the model are made: a CUDA library keeps the memory itself."""
    model = engine.runner.model
    kept = weight_updater._export_static_state(model)
    weight_updater._import_static_state(model, kept)


def close_and_start_again(engine: Engine) -> None:
    state_of(engine).close()
    start_again(engine)


CYCLES = [
    pytest.param(start_again, id="start"),
    pytest.param(close_and_start_again, id="close and start", marks=pytest.mark.release),
    pytest.param(capture_decode_steps, id="graphs of decode steps", marks=pytest.mark.release),
    pytest.param(partial(update_from_disk, recapture=True), id="new weights and graphs"),
    pytest.param(partial(update_from_disk, recapture=False), id="new weights"),
    pytest.param(update_from_tensors, id="new weights from tensors"),
    pytest.param(release_and_resume_memory, id="memory released and resumed"),
]


@pytest.mark.parametrize("cycle", CYCLES)
def test_four_times_leave_what_one_leaves(engine: Engine, cycle: Callable[[Engine], None]) -> None:
    cycle(engine)
    once = what_is_left(engine)
    assert once["outcomes"] == [{counters.EXIT_CAPTURED: 1}, {counters.TAIL_CAPTURED: 1}]
    for _ in range(3):
        cycle(engine)
    assert what_is_left(engine) == once
    assert_served_at_the_exit(engine)


# ---------------------------------------------------------------- recaptures while serving


def test_requests_that_are_paused_at_a_recapture(engine: Engine) -> None:
    """Their K and V, and the slots of these, are unchanged."""
    engine.forward(engine.schedule(batch_of((0, 60))))
    where = engine.runner.token_to_kv_pool.full_to_swa_index_mapping
    theirs = [engine.runner.req_to_token_pool.req_to_token, where]
    theirs += without_padding(engine.kv_buffers())
    before = list(map(torch.clone, theirs))
    capture_decode_steps(engine)
    assert all(map(torch.equal, before, theirs))


def test_a_recapture_logs_nothing_again(engine: Engine, said: Said) -> None:
    reset_log()
    for _ in range(3):
        capture_decode_steps(engine)
    [line] = [line for line in said() if "the tail is captured" in line]
    assert line.endswith(" for up to 1 rows")


def test_graphs_are_freed_before_others_are_captured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may not have room for the tail's graphs and two sets of SGLang's decode graphs."""
    runner = engine.runner
    before, is_freed = weakref.ref(runner.decode_cuda_graph_runner), list[bool]()
    capture = model_runner.capture_decode_graph

    def capturing(**kwargs: Any) -> Any:
        gc.collect()  # as SGLang does before it captures
        is_freed.append(before() is None)
        return capture(**kwargs)

    monkeypatch.setattr(model_runner, "capture_decode_graph", capturing)
    assert state_of(engine).captured is not None
    capture_decode_steps(engine)
    assert is_freed == [True]
    assert state_of(engine).captured is not None


def test_a_batch_that_still_runs_at_a_recapture(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the device before it borrows the batch's slots.

    Here the last batch writes its K and V when the device is waited for, or at the latest when a
    synthetic request runs.
    """
    kept = without_padding(engine.kv_buffers())
    waiting: list[Callable[[], object]] = []

    def finish(*_: Any) -> None:
        while waiting:
            waiting.pop()()

    def forward(batch: Any) -> Any:
        finish()
        return stock(batch)

    stock = engine.runner.forward
    with monkeypatch.context() as patched:
        patched.setattr(torch.cpu, "synchronize", finish)
        patched.setattr(engine.runner, "forward", forward)
        # SGLang waits as well where it captures, so this is a server without captured decode steps.
        patched.setenv(CAPTURED, "")
        waiting.append(lambda: [part.fill_(3) for part in kept])
        capture_decode_steps(engine)
    assert waiting == []
    assert all((part == 3).all() for part in kept)
    capture_decode_steps(engine)
    assert_served_at_the_exit(engine)


@pytest.mark.parametrize(
    ("shared", "eager"),
    [
        ({"disaggregation_mode": "prefill"}, lifecycle.SHARED),
        ({"enable_hierarchical_cache": True}, lifecycle.HOST_CACHE),
    ],
)
def test_slots_that_others_read_are_not_borrowed_at_a_recapture(
    engine: Engine, said: Said, shared: dict[str, Any], eager: str
) -> None:
    """A transfer, or a copy to the host, does not wait. A tail that cannot be checked is eager.

    The exits are those that the start has checked.
    """
    table = engine.runner.req_to_token_pool.req_to_token
    written = table._version
    captured = compat.server.read_argument("cuda_graph_config")
    with (
        releases.published(**shared, cuda_graph_config=captured),
        mock.patch.object(TailGraphs, "capture", side_effect=AssertionError),
    ):
        capture_decode_steps(engine)
    assert table._version == written
    assert f"YOCO fast prefill: the tail runs eagerly: {eager}" in said()
    seen = run(engine, engine.schedule(TO_THE_EXIT), fast=True)
    assert seen.outcomes == {graph_exits.TAIL_NOT_CAPTURED: 1}
    assert assert_served_alike(engine, WITHOUT_A_BUCKET) == counters.TAIL_EAGER
    capture_decode_steps(engine)
    assert table._version > written
    assert_served_at_the_exit(engine)
