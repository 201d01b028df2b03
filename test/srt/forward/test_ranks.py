"""Two tensor-parallel ranks in two processes, which cut the same batches.

Each process drives SGLang's ModelRunner; all-reduces go over gloo.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.runtime_context import get_parallel
from torch import distributed
from torch.multiprocessing.spawn import start_processes

from harness import batches
from harness.checking import counts, result_of_check
from harness.decode_graphs import record_tail
from harness.fixtures import Checkpoints
from harness.forked import preloaded
from harness.forwards import (
    ENGINE,
    assert_fast,
    norm_called,
    state_of,
    with_one_argument_more,
)
from harness.layer_rows import FIRST_CUT, cut, whole
from harness.observe import both_ways, run
from harness.prefill_exits import RECORDED, ROWS, assert_served_alike
from sglang_gemma4_reference import gemma3n, prefill_graphs, recorder, releases
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import compat, counters, settings
from sglang_gemma4_yoco.admission import order, third_party
from sglang_gemma4_yoco.checking import audit, rounding, tail_graphs
from sglang_gemma4_yoco.checking import self_check as checking
from sglang_gemma4_yoco.commands.verify.servers import find_free_ports
from sglang_gemma4_yoco.core import model as core_model
from sglang_gemma4_yoco.core import ranks, state
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.prefill_exits import graph_exits
from sglang_gemma4_yoco.refusal import ServerRefusal
from sglang_gemma4_yoco.startup import backends_built, graphs_captured

RANKS = 2
_DEADLINE = 400.0  # seconds; a rank that waits for another one that failed would wait for ever

BATCHES = batches.BATCHES | {
    "an intermediate chunk": batches.batch_of((0, 60), to_come=(21, 22)),
}
ONE_PROMPT = BATCHES["one prompt"]


def start(rank: int, path: Path, port: int, **arguments: Any) -> Engine:
    return Engine(path, rank=rank, tp_size=RANKS, nccl_port=port, **ENGINE, **arguments)


def assert_every_batch_is_cut(engine: Engine) -> None:
    """Assert that every batch is cut with stock's results."""
    attention = engine.text_model.layers[FIRST_CUT].self_attn
    assert attention.num_heads == E2B_TINY.heads // RANKS
    assert attention.num_kv_heads == 1
    for prompts in BATCHES.values():
        assert_fast(engine, prompts)


def assert_stock(engine: Engine, reason: object) -> None:
    stock, fast = both_ways(engine, engine.schedule(ONE_PROMPT), 0.0)
    assert fast.rows == stock.rows == whole(70)
    known = state.find_state(engine.text_model)
    assert known is not None
    assert str(known.off_because).startswith(str(reason))
    if reason == ranks.NOT_ALIKE:
        assert known.backends is None  # nothing is planned for a tail, and its memory is free


def with_exits(rank: int, port: int, path: Path) -> None:
    """Assert that a graph's collectives run up to the exit, then those of the tail."""
    bucket = 80  # SGLang replays a batch that fills at least half of it, as all here do
    with prefill_graphs.recordable():
        engine = start(rank, path, port, **RECORDED | {"cuda_graph_bs_prefill": [bucket]})
        with one_graph_that_differs(rank):
            assert record_tail(engine, ROWS).sizes == (1, 4)
        record_tail(engine, ROWS)
        outcomes = []
        for prompts in BATCHES.values():
            outcomes.append(assert_served_alike(engine, prompts))
    assert outcomes == [
        counters.EXIT_CAPTURED,
        counters.EXIT_CAPTURED,
        graph_exits.TAIL_NOT_CAPTURED,
        counters.EXIT_SKIPPED,
    ]
    mine = torch.full((1, 2), float(rank))  # as the logits of a decode step are
    gathered = recorder.RecordedGraph.of(lambda: get_parallel().tp_group.all_gather(mine))
    mine += 1
    gathered.replay()
    assert gathered.outputs.tolist() == [[1, 1, 2, 2]]


@contextmanager
def one_graph_that_differs(rank: int) -> Iterator[None]:
    """Make one rank find a defect in a graph; no rank replays it, all use the next larger one."""
    stock = tail_graphs.compare_graph

    def compare(tail: Any, runner: Any, size: int) -> Any:
        found = stock(tail, runner, size)
        if rank == 1 and size == 2:
            found.append(rounding.make_defect("this rank's"))
        return found

    with mock.patch.object(tail_graphs, "compare_graph", compare):
        yield


def set_up_together(rank: int, port: int, path: Path) -> None:
    """Assert the ranks' joint decisions at start and in service.

    One engine for all of it: new attention backends have a new state.
    """
    engine = start(rank, path, port)
    assert_every_batch_is_cut(engine)
    with_a_check_that_fails_on_one_rank(rank, engine)
    without_a_backend_on_one_rank(rank, engine)
    with_settings_of_its_own(rank, engine)
    with_a_norm_that_is_called_differently(engine)
    with_audits(rank, engine)
    # An exception in the check ends that rank, and then the other one, which waits for it.
    engine.runner.init_attention_backends()
    state = state_of(engine)
    found = checking.check_model(engine.runner, state)

    def check(*_: Any) -> Any:
        if rank == 1:
            raise MemoryError("of this rank alone")
        return found

    gone = "closed by peer|reset by peer"
    if rank == 1:
        gone = "of this rank alone"
    with (
        mock.patch.object(checking, "check_model", check),
        pytest.raises((MemoryError, RuntimeError), match=gone),
    ):
        graphs_captured.set_up(engine.runner, engine.text_model)


def without_a_backend_on_one_rank(rank: int, engine: Engine) -> None:
    build: dict[str, Any] = {"side_effect": MemoryError}
    if rank != 1:
        build = {"wraps": compat.attention.build_backend}
    with mock.patch.object(compat.attention, "build_backend", **build):
        engine.runner.init_attention_backends()
        assert_stock(engine, ranks.NOT_ALIKE)


def with_a_check_that_fails_on_one_rank(rank: int, engine: Engine) -> None:
    """Assert that a defect of one rank's heads disables the path on both ranks."""
    state, found = state_of(engine), list[Any]()
    check = checking.check_model

    def differing(*args: Any) -> Any:
        found.append(check(*args))
        if rank == 1:
            return dataclasses.replace(found[-1], worst=rounding.make_defect("this rank's"))
        return found[-1]

    state.serves = False
    state.report.check = None
    with mock.patch.object(checking, "check_model", differing):
        graphs_captured.set_up(engine.runner, engine.text_model)
    assert [checked.agrees for checked in found] == [True]
    assert (result_of_check(state)["compared"] == "this rank's") == (rank == 1)
    assert_stock(engine, checking.CHECK_FAILED)


def with_settings_of_its_own(rank: int, engine: Engine) -> None:
    """Assert that other settings, versions or plugins on one rank make all ranks run as stock."""
    with settings.changed(self_check=rank == 0):
        engine.runner.init_attention_backends()
    assert state_of(engine).report.check is None
    assert_stock(engine, ranks.NOT_ALIKE)
    with mock.patch.object(order, "__version__", f"0.{rank}"):  # another version of ours
        engine.runner.init_attention_backends()
    assert_stock(engine, ranks.NOT_ALIKE)
    with mock.patch.object(third_party, "list_chunk_readers", return_value=[None] * rank):
        engine.runner.init_attention_backends()
    assert_stock(engine, ranks.NOT_ALIKE)


def with_a_norm_that_is_called_differently(engine: Engine) -> None:
    """Assert that no rank cuts any more once the norm is called in another way."""
    engine.runner.init_attention_backends()
    batch = engine.schedule(ONE_PROMPT)
    trusted = settings.changed(trust=(norm_called.__module__,))  # to be taken for SGLang's own
    with trusted, norm_called(engine, with_one_argument_more):
        assert state_of(engine).off_because is None
        assert run(engine, batch, "1").rows == [70] * FIRST_CUT + whole(70)
        assert_stock(engine, core_model.OTHER_END)
        engine.runner.init_attention_backends()  # as when a server starts
        assert state_of(engine).off_because is None
        graphs_captured.set_up(engine.runner, engine.text_model)
        assert_stock(engine, core_model.OTHER_END)


def with_audits(rank: int, engine: Engine) -> None:
    """Assert that both ranks audit every batch, and that one rank's finding disables both."""
    with settings.changed(audit=1, audit_strict=True):
        engine.runner.init_attention_backends()
        state = state_of(engine)
        graphs_captured.set_up(engine.runner, engine.text_model)
        assert state.off_because is None
        scheduled, fast = engine.schedule(ONE_PROMPT), cut(70, 1)
        assert run(engine, scheduled, "1").rows == [*fast, *whole(70), *fast[FIRST_CUT:]]
        assert counts() == (1, 0)
        stock = gemma4.compute_keys_and_values

        def other(*args: Any) -> Any:
            k, v = stock(*args)
            return (k * 1.01 if rank == 1 else k), v

        with mock.patch.object(gemma4, "compute_keys_and_values", other):
            run(engine, scheduled, "1")
        assert counts() == (1, 1)
        assert_stock(engine, audit.DIFFERED)


def with_gemma3n(rank: int, port: int, path: Path) -> None:
    """Assert that per-layer inputs, split over the ranks, are projected for all rows."""
    engine = start(rank, path, port)
    layers = len(engine.text_model.layers)
    assert engine.text_model.layers[-1].self_attn.num_heads == gemma3n.E2B_TINY.heads // RANKS
    for prompts in BATCHES.values():
        assert_fast(engine, prompts, projected=[(batches.new_rows(prompts), layers)])


def on_all_ranks(work: Callable[..., None], *paths: Path) -> None:
    """Run ``work(rank, port, *paths)`` in a process per rank; fail if one fails or hangs."""
    arguments = (find_free_ports(1)[0], *paths)
    method = preloaded().get_start_method()
    context = start_processes(work, arguments, nprocs=RANKS, join=False, start_method=method)
    deadline = time.monotonic() + _DEADLINE
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks wait for each other"
    finally:
        for process in context.processes:
            process.kill()


def test_captured_prefills_are_left_by_all_ranks(tiny_checkpoint: Path) -> None:
    on_all_ranks(with_exits, tiny_checkpoint)


def test_tensor_parallel_ranks_cut_alike_or_not_at_all(checkpoints: Checkpoints) -> None:
    """Each rank has a K/V head of its own; ``server/test_parallel`` has one that both copy."""
    head_each = dataclasses.replace(E2B_TINY, kv_heads=RANKS)
    on_all_ranks(set_up_together, checkpoints(head_each))


def test_ranks_of_gemma3n(tmp_path: Path) -> None:
    on_all_ranks(with_gemma3n, gemma3n.write_checkpoint(tmp_path, gemma3n.E2B_TINY))


def test_a_rank_that_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks log the cause."""

    def gather(everyone: list[str], mine: str, **_: Any) -> None:
        everyone[:] = [mine, "captured: None"]

    group = SimpleNamespace(ranks=[0, 1], cpu_group=None)
    monkeypatch.setattr(compat.server, "is_single_rank", lambda: False)
    monkeypatch.setattr(compat.server, "get_tensor_parallel_group", lambda: group)
    monkeypatch.setattr(distributed, "all_gather_object", gather)
    reason = ranks.find_difference("captured: less than 1024 MiB")
    assert reason == f"{ranks.NOT_ALIKE}: captured: None / captured: less than 1024 MiB"


def test_ranks_on_other_machines_are_not_compared(engine: Engine) -> None:
    """Other machines may not have this package."""
    with (
        releases.published(nnodes=2),
        mock.patch.object(ranks, "find_difference", side_effect=AssertionError),
    ):
        backends_built.start_model(engine.runner, engine.text_model)
    refusal = state_of(engine).off_because
    assert refusal == ServerRefusal("ranks on several machines (--nnodes)")
