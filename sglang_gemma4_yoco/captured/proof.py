"""A captured tail must give what the same layers give eagerly, or it is not used.

Each graph is replayed on random inputs, over a request of random K and V that is longer than the
window: full, and with as much padding as a batch can have. What was in those slots is put back: a
server that captures anew may have cached prefixes.

The eager layers get the same numbers, padding and all, in other memory. So both run the same
kernels on the same shapes. Both plan over the same widened window: that it is right is shown by the
comparisons with stock (``checking.start``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.captured.graphs import Inputs, TailGraphs
from sglang_gemma4_yoco.checking import rounding
from sglang_gemma4_yoco.checking.borrowed import borrowed, random_like
from sglang_gemma4_yoco.checking.rounding import Comparison, Finding

# Of the last layer's rows, normed: what another kernel for its last products would make.
_ROUNDINGS = 2.0
_BEYOND = 9  # tokens, of the request, before the window of its last one


def prove(graphs: TailGraphs, runner: Any) -> None:
    """Compare every graph with the eager layers, and drop what differs, with one error line."""
    for size in graphs.rows:
        largest = rounding.worst(findings(graphs, runner, size))
        if not largest.is_rounding:
            graphs.drop(size)
            log.error(
                f"Gemma 4 fast prefill: the tail captured for {size} rows differs from the "
                f"eager one (relative error {largest.error:.1e}, up to "
                f"{largest.allowed:.1e} is rounding) and is not used"
            )


def findings(graphs: TailGraphs, runner: Any, size: int) -> list[Finding]:
    """What the graph for ``size`` rows gives, compared: with most padding, and with none."""
    generator = torch.Generator(runner.device).manual_seed(size)
    fewest = max((rows for rows in graphs.rows if rows < size), default=0) + 1
    attentions = [layer.self_attn.attn for layer in graphs.state.tail_layers]
    compared = []
    with _a_request(runner, attentions, generator) as tokens:
        for rows in sorted({fewest, size}):
            fill = partial(_fill, tokens=tokens, generator=generator)
            captured = graphs.replayed(size, rows, fill)
            compared.append(comparison(graphs.eager(size, rows), captured))
    return rounding.findings(compared)


def comparison(eager: torch.Tensor, captured: torch.Tensor) -> Comparison:
    """What the two have given, each [rows, hidden]."""
    return Comparison.of("the captured tail", eager, captured, _ROUNDINGS)


def _fill(inputs: Inputs, tokens: int, generator: torch.Generator) -> None:
    """Random rows of one request: with n of them, at 1/n, 2/n, ... of its length."""
    rows = inputs.rows.shape[0]
    for tensor in (inputs.rows, inputs.embeds, inputs.embedded):
        if tensor is not None:
            tensor.copy_(random_like(tensor, generator))
    lengths = [max(1, tokens * (row + 1) // rows) for row in range(rows)]
    inputs.lengths.copy_(torch.tensor(lengths))
    inputs.positions.copy_(inputs.lengths - 1)
    inputs.requests.zero_()


@contextmanager
def _a_request(runner: Any, attentions: list[Any], generator: torch.Generator) -> Iterator[int]:
    """Give the reserved row of SGLang's table tokens with random K and V; yields how many.

    Their slots are in random order, and of other numbers in the window's pool than in the full one.
    """
    pool = runner.token_to_kv_pool
    tables = [runner.req_to_token_pool.req_to_token[0]]
    mapping = getattr(pool, "full_to_swa_index_mapping", None)
    if mapping is not None:
        tables.append(mapping)
    layers = {attention.layer_id for attention in attentions}
    caches = [buffer for layer in layers for buffer in pool.get_kv_buffer(layer)]
    window = max(attention.sliding_window_size or 0 for attention in attentions)
    tokens = min(window + _BEYOND, *(tensor.shape[0] for tensor in (*tables, *caches)))
    with borrowed([tensor[:tokens] for tensor in (*tables, *caches)]):
        for table in tables:
            shuffled = torch.randperm(tokens, generator=generator, device=generator.device)
            table[:tokens].copy_(shuffled)
        for cache in caches:
            cache[:tokens].copy_(random_like(cache[:tokens], generator))
        yield tokens
