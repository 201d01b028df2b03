"""The tail, launched layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sglang_gemma4_yoco.core.backend_pair import BackendPair
from sglang_gemma4_yoco.core.kept_batch import KeptBatch
from sglang_gemma4_yoco.core.per_layer import Buffers
from sglang_gemma4_yoco.core.state import ModelState


@dataclass(frozen=True)
class EagerTail:
    """A ``TailRunner`` that launches each layer; ``metadata`` is that of the tail's backend."""

    state: ModelState
    backends: BackendPair
    kept_batch: KeptBatch
    metadata: object
    buffers: Buffers | None = None

    @classmethod
    def of(cls, state: ModelState, backends: BackendPair, kept_batch: KeptBatch) -> EagerTail:
        """Return a runner with the tail's attention metadata; the next one may overwrite it."""
        metadata = backends.init_tail_metadata(kept_batch.batch, kept_batch.fields)
        return cls(state, backends, kept_batch, metadata)

    def run(
        self,
        rows: Tensor,
        positions: Tensor,
        get_inputs: Callable[[], Tensor | None],
    ) -> Tensor:
        """Return the kept rows [B, hidden], normed, from all rows [T, ...] at the cut."""
        state, batch, index = self.state, self.kept_batch.batch, self.kept_batch.index

        kept_positions = positions.index_select(0, index)
        fields = {**self.kept_batch.fields, "positions": kept_positions}
        inputs = get_inputs()
        with self.backends.running_tail(batch, fields, self.metadata):
            return state.adapter.run_tail(
                state.model,
                state.tail_layers,
                batch,
                rows.index_select(0, index),
                kept_positions,
                inputs,
            )
