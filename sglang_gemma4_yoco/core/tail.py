"""The tail of one batch, run layer by layer: layers S-1 to L-1 and the norm, on the kept rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.core.attention import TailBackend
from sglang_gemma4_yoco.core.per_layer import Buffers
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.core.tail_batch import TailBatch


@dataclass(frozen=True)
class EagerTail:
    """A ``TailRunner`` that launches each layer; ``metadata`` is what ``attention`` planned."""

    state: ModelState
    batch: Any
    tail: TailBatch
    attention: TailBackend
    metadata: Any
    outcome: str = counters.TAIL_EAGER
    buffers: Buffers | None = None

    def run(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        get_inputs: Callable[[], torch.Tensor | None],
    ) -> torch.Tensor:
        """The kept rows [B, hidden], normed, from all rows [T, ...] at the cut."""
        state, index = self.state, self.tail.index
        kept, kept_positions = rows.index_select(0, index), positions.index_select(0, index)
        fields = {**self.tail.fields, "positions": kept_positions}
        inputs = get_inputs()
        with self.attention.running(self.batch, fields, self.metadata):
            return state.kind.run_tail(
                state.model, state.tail_layers, self.batch, kept, kept_positions, inputs
            )
