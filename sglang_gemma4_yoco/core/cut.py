"""One prefill that is cut: the layers before the cut, K and V, the tail, the scatter.

With T rows, B kept ones and S the first KV-shared layer, the FFNs of the L layers run
on ``[T] * (S - 1) + [B] * (L - S + 1)`` rows. For E2B (S = 15, L = 35) and a prompt of 2048 tokens,
14 layers run on 2048 rows and 21 layers on 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_gemma4_yoco import compat, log
from sglang_gemma4_yoco.core import donor
from sglang_gemma4_yoco.core.attention import TailBackend
from sglang_gemma4_yoco.core.kept import TailBatch
from sglang_gemma4_yoco.core.per_layer import Buffers, PerLayerInputs
from sglang_gemma4_yoco.core.replaced import replaced
from sglang_gemma4_yoco.core.state import ModelState, TailRunner

OTHER_INPUTS = "the model is called without per-layer embeddings"
OTHER_NORM = "the model does something else between its layers and its norm"
OTHER_ROWS = "the model's rows are not those of the batch"

KeptInputs = Callable[[], "torch.Tensor | None"]


class NotCuttableError(Exception):
    """This model's forward cannot be cut; the message has the reason.

    It is raised after the layers before the cut have run. Only time is lost: the stock forward then
    serves the batch from its beginning.
    """


@dataclass(frozen=True)
class Plan:
    """A batch that is cut.

    Attributes:
        batch: SGLang's ``ForwardBatch``.
        tail: its kept rows, and the batch as the tail sees it.
        attention: the tail's attention backend.
        runner: runs the tail, whose attention is already planned; None for an intermediate chunk,
            no row of which is read.
        outcome: the name under which ``log`` counts the forward.
    """

    batch: Any
    tail: TailBatch
    attention: TailBackend
    runner: TailRunner | None
    outcome: str


def prefill(
    state: ModelState, plan: Plan, positions: torch.Tensor, stock: Callable[[], Any]
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
    with layers_before_the_cut(state, plan) as kept_inputs:
        output = stock()
    front = compat.layer_rows(output)
    if front.shape[0] != plan.tail.kept.total:
        raise NotCuttableError(OTHER_ROWS)
    write_keys_and_values(state, plan, front, positions)
    if plan.runner is not None:
        rows = plan.runner.run(front, positions, kept_inputs)
        front.index_copy_(0, plan.tail.index, rows)
    return output


def write_keys_and_values(
    state: ModelState, plan: Plan, front: torch.Tensor, positions: torch.Tensor
) -> None:
    """Write K and V of layer S-1 for all rows, from its input [T, hidden]."""
    layer, attention = state.tail_layers[0], plan.attention
    k, v = donor.keys_and_values(layer.self_attn, layer.input_layernorm(front), positions)
    compat.write_keys_and_values(
        attention.main, attention.tail, layer.self_attn.attn, plan.batch, k, v
    )


@contextmanager
def layers_before_the_cut(state: ModelState, plan: Plan) -> Iterator[KeptInputs]:
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
            raise NotCuttableError(OTHER_NORM)
        normed.append(True)
        return rows

    normed: list[bool] = []
    with (
        replaced(model, end_layer=state.cut_layer, project_per_layer_inputs=inputs.project),
        replaced(model.norm, forward=unchanged),
    ):
        yield inputs.kept
    if len(normed) != 1:
        raise NotCuttableError(OTHER_NORM)
    if not inputs.projected or (
        buffers is not None and (inputs.embedded is None) != (buffers.embedded is None)
    ):
        raise NotCuttableError(OTHER_INPUTS)


@dataclass(frozen=True)
class EagerTail:
    """Runs the tail of one batch layer by layer; ``metadata`` is what ``attention`` planned."""

    state: ModelState
    batch: Any
    tail: TailBatch
    attention: TailBackend
    metadata: Any
    outcome: str = log.TAIL_EAGER
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
            compat.start_residual(batch, rows)
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
                rows = compat.layer_rows(output)
    finally:
        compat.end_residual(batch)
    normed: torch.Tensor = state.model.norm(rows)
    return normed
