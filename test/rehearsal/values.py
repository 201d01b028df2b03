"""Small widths with every value computed: the fast path answers as stock does, on CUDA's code.

K and V are compared to the bit: what computes them has the same rows in both. Answers may differ
by the rounding of bf16, for the tail's products have other rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from rehearsal import batches_served, operations
from rehearsal.batches_served import BATCHES, CAPTURED, EAGER, STOCK
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine

#: Heads as wide as CUDA's rotary kernel takes them, and few of them.
SHAPE = dataclasses.replace(
    E2B_TINY,
    vocab_size=4096,
    sliding_per_full=1,
    heads=4,
    kv_heads=1,
    layers=6,
    kv_shared_layers=3,
    head_dim=128,
    global_head_dim=256,
    dtype="bfloat16",
)
COMPARED = (
    *("40 tokens", "257 tokens", "after a prefix", "three", "beside decode steps", "chunk"),
)


def compare(served: Engine) -> dict[str, Any]:
    """Each batch as stock, captured (at the exit) and eager."""
    return {name: _compare_ways(served, name) for name in COMPARED}


def _compare_ways(served: Engine, name: str) -> dict[str, Any]:
    batch = served.schedule(BATCHES[name])
    found: dict[str, Any] = {}
    kept: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    is_chunk = name == "chunk"
    for way in (STOCK, CAPTURED, EAGER):
        served.poison(batch)
        cost, output = batches_served.serve_with_output(served, batch, way, is_chunk=is_chunk)
        logits = operations.on_cpu(output.next_token_logits).float().clone()
        written = [operations.on_cpu(tensor).clone() for tensor in served.written(batch)]
        kept[way] = logits, written
        found[way] = {"outcome": cost.outcome, "failure": cost.failure}
        stock_logits, stock_written = kept[STOCK]
        pairs = zip(written, stock_written, strict=True)
        found[way]["same K and V"] = all(torch.equal(*pair) for pair in pairs)
        found[way]["difference"] = float((logits - stock_logits).abs().max())
        found[way]["same token"] = bool((logits.argmax(-1) == stock_logits.argmax(-1)).all())
        found[way]["spread"] = float(logits.std())
    return found
