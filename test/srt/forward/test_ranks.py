"""Two tensor-parallel ranks in two processes: cut together, or not at all.

Each process drives SGLang's ModelRunner; all-reduces go over gloo. K/V heads come in both kinds:
one head that both ranks have a copy of, and two that they share out.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.spawn import spawn

from demo import choose_ports
from layer_rows import FIRST_CUT, cut, whole
from observe import TOLERANCE, assert_same_answers, assert_same_cache, assert_same_objects, run
from sglang_gemma4_reference.checkpoint import E2B_TINY, write_checkpoint
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import ranks

RANKS = 2
_DEADLINE = 400.0  # seconds; a rank that waits for another one that failed would wait for ever

TOKENS = tuple(torch.randint(20, 500, (200,), generator=torch.Generator().manual_seed(0)).tolist())
# Prompts, and how many rows of them are read.
BATCHES = {
    "one prompt": ([Prompt((), TOKENS[:70])], 1),
    "three, two of them cached": (
        [
            Prompt(TOKENS[:30], TOKENS[30:70]),
            Prompt((), TOKENS[90:97]),
            Prompt(TOKENS[5:95], TOKENS[95:96]),
        ],
        3,
    ),
    "input logprobs": (
        [Prompt(TOKENS[:10], TOKENS[10:50], logprob_start=35), Prompt((), TOKENS[60:69])],
        16,
    ),
    "a chunk that nobody reads": ([Prompt((), TOKENS[:60], to_come=(21, 22))], 0),
}


def start(rank: int, path: Path, port: int) -> Engine:
    return Engine(
        path,
        rank=rank,
        tp_size=RANKS,
        nccl_port=port,
        device="cpu",
        dtype="float32",
        max_total_tokens=4096,
    )


def assert_every_batch_is_cut(engine: Engine) -> None:
    attention = engine.text_model.layers[FIRST_CUT].self_attn
    assert attention.num_heads == E2B_TINY.heads // RANKS
    assert attention.num_kv_heads == 1
    for name, (prompts, kept) in BATCHES.items():
        scheduled = engine.schedule(prompts)
        total = sum(len(prompt.new) for prompt in prompts)
        stock, fast = run(engine, scheduled, "0"), run(engine, scheduled, "1")
        assert stock.rows == whole(total)
        assert fast.rows == [rows for rows in cut(total, kept) if rows], name
        assert_same_objects(fast)
        assert_same_cache(stock, fast)
        if kept:
            assert_same_answers(stock, fast, TOLERANCE)


def assert_stock(engine: Engine, reason: str | None) -> None:
    prompts, _ = BATCHES["one prompt"]
    scheduled = engine.schedule(prompts)
    stock, fast = run(engine, scheduled, "0"), run(engine, scheduled, "1")
    assert fast.rows == stock.rows == whole(70)
    assert_same_answers(stock, fast, 0.0)
    assert engine.text_model.__dict__.get("_yoco_server_reason") == reason


def with_the_package(rank: int, port: int, shared_head: Path, head_each: Path) -> None:
    from sglang_gemma4_yoco import seams

    for path in (shared_head, head_each):
        assert_every_batch_is_cut(start(rank, path, port))

    def out_of_memory(_: Any) -> None:
        raise MemoryError("no room for a second attention backend")

    build = out_of_memory if rank == 1 else seams.build_attn_backend
    with mock.patch.object(seams, "build_attn_backend", build):
        assert_stock(start(rank, shared_head, port), ranks.NOT_ALIKE)


def with_the_package_on_one_rank(rank: int, port: int, path: Path) -> None:
    if rank == 1:
        os.environ["SGLANG_PLUGINS"] = "gemma4_row_trace"  # no other plugin is loaded
    with mock.patch.object(ranks, "_PATIENCE", timedelta(seconds=2)):
        assert_stock(start(rank, path, port), ranks.NOT_ALL if rank == 0 else None)


def with_a_late_rank(rank: int, port: int, path: Path) -> None:
    """Rank 1 comes when rank 0 has waited in vain and written down what follows from that."""
    compare = ranks.compare

    def late(store: Any, name: str, *others: Any) -> str | None:
        store.wait([f"{name}/verdict"], timedelta(seconds=_DEADLINE))
        return compare(store, name, *others)

    with (
        mock.patch.object(ranks, "_PATIENCE", timedelta(seconds=2)),
        mock.patch.object(ranks, "compare", late if rank == 1 else compare),
    ):
        engine = start(rank, path, port)
    # Before any forward: ranks that cut differently would wait for each other in the first one.
    assert engine.text_model.__dict__["_yoco_server_reason"] == ranks.NOT_ALL
    assert_stock(engine, ranks.NOT_ALL)


def on_all_ranks(work: Callable[..., None], *paths: Path) -> None:
    """Run ``work(rank, port, *paths)`` in a process per rank; fail when one fails or hangs."""
    arguments = (choose_ports(None)[0], *paths)
    context = spawn(work, arguments, nprocs=RANKS, join=False)
    deadline = time.monotonic() + _DEADLINE
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks wait for each other"
    finally:
        for process in context.processes:
            process.kill()


def test_tensor_parallel_ranks_cut_alike_or_not_at_all(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    head_each = write_checkpoint(tmp_path, dataclasses.replace(E2B_TINY, kv_heads=RANKS))
    on_all_ranks(with_the_package, tiny_checkpoint, head_each)


def test_a_rank_without_the_package_is_waited_for_once(tiny_checkpoint: Path) -> None:
    on_all_ranks(with_the_package_on_one_rank, tiny_checkpoint)


def test_a_rank_that_comes_late_steps_aside_with_the_others(tiny_checkpoint: Path) -> None:
    on_all_ranks(with_a_late_rank, tiny_checkpoint)
