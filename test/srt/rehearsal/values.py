"""Small widths with every value computed: the fast path answers as stock does, on CUDA's code.

K and V are compared to the bit: what computes them has the same rows in both. Answers may differ
by the rounding of bf16, for the tail's products have other rows.
"""

from __future__ import annotations

import torch

from rehearsal import operations, serving
from rehearsal.device import Answer
from rehearsal.engine import QUESTIONS
from rehearsal.serving import CAPTURED, EAGER, STOCK
from sglang_gemma4_reference.engine import Engine


def compare_each(engine: Engine) -> Answer:
    """Each batch as stock, captured (at the exit) and eager."""
    return {name: _compare_ways(engine, name) for name in QUESTIONS["values"]["outcomes"]}


def _compare_ways(engine: Engine, name: str) -> Answer:
    batch = serving.schedule(engine, name)
    is_chunk = serving.BATCHES[name]["kept"] == 0
    found: Answer = {}
    kept: dict[str, list[torch.Tensor]] = {}
    for way in (STOCK, CAPTURED, EAGER):
        engine.poison(batch)
        cost, output = serving.serve(engine, batch, way, is_chunk=is_chunk)
        results = [output.next_token_logits, *engine.written(batch)]
        kept[way] = [operations.on_cpu(tensor).clone() for tensor in results]
        pairs = zip(kept[way], kept[STOCK], strict=True)
        logits, stock_logits = next(pairs)
        found[way] = {
            "outcome": cost["outcome"],
            "failure": cost["failure"],
            "same K and V": all(torch.equal(*pair) for pair in pairs),
            "difference": float((logits.float() - stock_logits.float()).abs().max()),
            "same token": torch.equal(logits.argmax(-1), stock_logits.argmax(-1)),
            "spread": float(logits.float().std()),
        }
    return found
