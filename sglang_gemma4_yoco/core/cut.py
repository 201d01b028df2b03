"""One prefill that is cut: the layers before the cut, K and V, the tail, the scatter.

With T rows, B kept ones and S the first KV-shared layer, the FFNs of the L layers run
on ``[T] * (S - 1) + [B] * (L - S + 1)`` rows. For E2B (S = 15, L = 35) and a prompt of 2048 tokens,
14 layers run on 2048 rows and 21 layers on 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.core import model, plan, tail
from sglang_gemma4_yoco.core.per_layer import PerLayerInputs
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.replaced import replaced

OTHER_INPUTS = "the model is called without per-layer embeddings"
OTHER_NORM = "the model does something else between its layers and its norm"
OTHER_ROWS = "the model's rows are not those of the batch"


def run_prefill(
    state: ModelState, plan: plan.Plan, positions: torch.Tensor, stock: Callable[[], Any]
) -> Any:
    """Run one forward that is cut.

    Args:
        positions: [T].
        stock: the model's own forward.

    Returns:
        What ``stock`` returns: [T, hidden], or a tuple that begins with it. Rows that are not
        kept are finite, and never read.

    Raises:
        NotCuttableError: the stock forward must serve the batch.
    """
    with stop_before_cut(state, plan) as kept_inputs:
        output = stock()
    front = compat.layers.get_rows(output)
    if front.shape[0] != plan.tail.kept.total:
        raise model.NotCuttableError(OTHER_ROWS)
    write_keys_and_values(state, plan, front, positions)
    if plan.runner is not None:
        rows = plan.runner.run(front, positions, kept_inputs)
        front.index_copy_(0, plan.tail.index, rows)
    return output


def write_keys_and_values(
    state: ModelState, plan: plan.Plan, front: torch.Tensor, positions: torch.Tensor
) -> None:
    """Write K and V of layer S-1 for all rows, from its input [T, hidden]."""
    layer, attention = state.tail_layers[0], plan.attention
    k, v = gemma4.compute_keys_and_values(layer.self_attn, layer.input_layernorm(front), positions)
    compat.pools.write_keys_and_values(
        attention.main, attention.tail, layer.self_attn.attn, plan.batch, k, v
    )


@contextmanager
def stop_before_cut(state: ModelState, plan: plan.Plan) -> Iterator[tail.KeptInputs]:
    """Have the model's forward run layers 0 to S-2 and no norm, for the span of the ``with``.

    Yields a function that returns the per-layer inputs of the other layers, [B, L - S + 1, width];
    it can be called once the model has run.
    """
    model, buffers = state.model, None
    if plan.runner is not None:
        buffers = plan.runner.buffers
    inputs = PerLayerInputs(
        model, state.cut_layer, plan.tail.index, buffers, split=state.splits_per_layer_inputs
    )

    def unchanged(rows: torch.Tensor, *others: Any, **settings: Any) -> torch.Tensor:
        # A second argument is an update that must still be added to the residual.
        if others or settings:
            raise model.NotCuttableError(OTHER_NORM)
        normed.append(True)
        return rows

    normed: list[bool] = []
    with (
        replaced(model, end_layer=state.cut_layer, project_per_layer_inputs=inputs.project),
        replaced(model.norm, forward=unchanged),
    ):
        yield inputs.kept
    if len(normed) != 1:
        raise model.NotCuttableError(OTHER_NORM)
    if not inputs.projected or (
        buffers is not None and (inputs.embedded is None) != (buffers.embedded is None)
    ):
        raise model.NotCuttableError(OTHER_INPUTS)
