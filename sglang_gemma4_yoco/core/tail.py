"""One prefill that is cut: the layers before the cut, K and V, the tail, the scatter.

With T rows, B kept ones and S the first KV-shared layer, the FFNs of the L layers run
on ``[T] * (S - 1) + [B] * (L - S + 1)`` rows. For E2B (S = 15, L = 35) and a prompt of 2048 tokens,
14 layers run on 2048 rows and 21 layers on 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.core.attention import TailBackend
from sglang_gemma4_yoco.core.per_layer import Buffers
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.core.tail_batch import TailBatch
from sglang_gemma4_yoco.replaced import replaced

pass

KeptInputs = Callable[[], "torch.Tensor | None"]


@dataclass(frozen=True)
class EagerTail:
    """Runs the tail of one batch layer by layer; ``metadata`` is what ``attention`` planned."""

    state: ModelState
    batch: Any
    tail: TailBatch
    attention: TailBackend
    metadata: Any
    outcome: str = counters.TAIL_EAGER
    buffers: Buffers | None = None

    def run(
        self, front: torch.Tensor, positions: torch.Tensor, kept_inputs: KeptInputs
    ) -> torch.Tensor:
        """The kept rows [B, hidden], normed, from all rows [T, hidden] at the cut."""
        attention, index = self.attention, self.tail.index
        rows, positions = front.index_select(0, index), positions.index_select(0, index)
        fields = {**self.tail.fields, "positions": positions}
        inputs = kept_inputs()
        with attention.running(self.batch, fields, self.metadata):
            return run_layers(self.state, self.batch, rows, positions, inputs)


def run_layers(
    state: ModelState,
    batch: Any,
    rows: torch.Tensor,
    positions: torch.Tensor,
    inputs: torch.Tensor | None,
) -> torch.Tensor:
    """Run layers S-1 to L-1 and the norm; the tail's attention is planned and is the current one.

    Args:
        batch: the batch of the kept rows.
        rows: [B, hidden], the residual at the input of layer S-1; overwritten.
        positions: [B].
        inputs: [B, L - S + 1, width], the layers' per-layer inputs; None without any.

    Returns:
        [B, hidden], normed.
    """
    attention = state.tail_layers[0].self_attn
    shares = {"is_kv_shared_layer": True, "kv_shared_layer_index": attention.attn.layer_id}
    try:
        # SGLang's code for a KV-shared layer: the donor shares its own K and V, from the pool.
        with replaced(attention, **shares):
            compat.batch.start_residual(batch, rows)
            own_inputs = None
            for number, layer in enumerate(state.tail_layers):
                if inputs is not None:
                    own_inputs = inputs[:, number, :]
                output = layer(
                    positions=positions,
                    hidden_states=rows,
                    per_layer_input=own_inputs,
                    forward_batch=batch,
                )
                rows = compat.layers.get_rows(output)
    finally:
        compat.batch.end_residual(batch)
    normed: torch.Tensor = state.model.norm(rows)
    return normed
