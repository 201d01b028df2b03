"""The layers behind the cut, on kept rows alone: what a graph records, and what is launched.

They begin with layer K-1, whose K and V of all rows are in the pool by then, or with layer K where
layer K-1 cannot be cut (``donor``). They end behind the model's norm. Nobody calls them but here:
the model's own loop ends before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.tail import donor
from sglang_gemma4_yoco.tail.shadow import Shadows


def run(
    model: Any,
    first: int,
    batch: Any,
    rows: torch.Tensor,
    positions: torch.Tensor,
    inputs: torch.Tensor | None,
    norm: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run layers ``first`` to L-1 and the norm; the tail's attention is planned and current.

    Args:
        model: a ``Gemma4TextModel``.
        first: K-1 or K.
        batch: the batch of the kept rows.
        rows: [B, hidden], the residual at the input of layer ``first``; overwritten.
        positions: [B].
        inputs: [B, L - first, width], the layers' per-layer inputs; None without any.
        norm: the model's.

    Returns:
        [B, hidden], normed.
    """
    try:
        with _without_keys(model, first):
            seams.write_residual(batch, rows, begin=True)
            for number, layer in enumerate(list(model.layers)[first:]):
                output = layer(
                    positions=positions,
                    hidden_states=rows,
                    per_layer_input=None if inputs is None else inputs[:, number, :],
                    forward_batch=batch,
                )
                rows = seams.layer_rows(output)
    finally:
        seams.end_residual(batch)
    return norm(rows)


@contextmanager
def _without_keys(model: Any, first: int) -> Iterator[None]:
    """Layer K-1, if it is the first one, makes neither K nor V, and reads those of the pool."""
    if first == donor.first_shared_layer(model.config):
        yield
        return
    attention = model.layers[first].self_attn

    def attend(
        positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any, **_: Any
    ) -> torch.Tensor:
        q = donor.queries(attention, hidden_states, positions)
        output: torch.Tensor
        output, _bias = attention.o_proj(donor.attend(attention, q, forward_batch))
        return output

    with Shadows() as shadows:
        shadows.add(attention, "forward", lambda _: attend)
        yield
