"""Two helpers that ``Gemma4TextModel`` gets, under the names of the change proposed to SGLang.

The package's own forwards need neither: they are for those who cut a batch in a forward of their
own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sglang_gemma4_yoco import seams, settings
from sglang_gemma4_yoco.cutting import gate
from sglang_gemma4_yoco.loading import starting
from sglang_gemma4_yoco.tail.attention import OwnBackend
from sglang_gemma4_yoco.tail.batch import Tail, rewritten


def _yoco_eligibility(self: Any, forward_batch: Any) -> bool:
    """Whether this forward may skip, in the KV-shared layers, the rows that nobody reads.

    As published it asks for the switch whenever it is called; the package's own forwards do not.
    """
    return (
        os.environ.get(settings.SWITCH, "1") == "1"
        and gate.ineligible_reason(starting.of(self), forward_batch) is None
    )


def _yoco_truncate_to_last_tokens(
    self: Any, hidden_states: Any, positions: Any, per_layer_inputs: Any, forward_batch: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, Callable[[], None]]:
    """Cut a batch down to the rows that somebody reads.

    Args:
        hidden_states: [T, hidden].
        positions: [T].
        per_layer_inputs: [T, ...] (of one layer or of all), or None.
        forward_batch: an eligible batch; on return its ``extend_*`` fields, mode, input ids and
            positions describe the kept rows, and attention is planned for them.

    Returns:
        ``(hidden_states [B, hidden], positions [B], per_layer_inputs [B, ...], last_indices [B]
        int64, restore_fn)``, B the number of kept rows: one per request, more for a request with
        input logprobs. ``restore_fn()`` puts every field and the attention state back; calling it
        again does nothing. When this function raises, all is put back already.
    """
    if not isinstance(hidden_states, torch.Tensor):
        # The helper was published in two argument orders; in the other one the batch leads.
        forward_batch, hidden_states, positions, per_layer_inputs = (
            hidden_states,
            positions,
            per_layer_inputs,
            forward_batch,
        )
    tail, attention = _tail_of(self, forward_batch)
    row_inputs = None if per_layer_inputs is None else per_layer_inputs.index_select(0, tail.index)
    rows = hidden_states.index_select(0, tail.index)
    row_positions = positions.index_select(0, tail.index)
    with ExitStack() as stack:
        stack.enter_context(attention.running(forward_batch, tail.fields_at(row_positions)))
        seams.write_residual(forward_batch, rows)
        return rows, row_positions, row_inputs, tail.index, stack.pop_all().close


def _tail_of(model: Any, forward_batch: Any) -> tuple[Tail, OwnBackend | _RebuiltBackend]:
    plan = gate.plan_of(starting.of(model), forward_batch)
    if plan is not None:
        if plan.tail.unread:  # of which the package itself runs no tail
            plan.attention.plan(forward_batch, plan.tail.fields)
        return plan.tail, plan.attention
    rebuilt = _RebuiltBackend(seams.current_attn_backend())
    kept, unread = gate.kept_rows(forward_batch), gate.is_unread(forward_batch)
    return Tail.of(forward_batch, kept, unread, rebuilt.main), rebuilt


class _RebuiltBackend:
    """The runner's own attention backend, planned anew for the tail, for a batch not planned.

    It stalls the host, and drops the image masks that a model has written into the metadata.
    """

    def __init__(self, main: Any) -> None:
        self.main = main

    @contextmanager
    def running(self, forward_batch: Any, fields: Mapping[str, object]) -> Iterator[None]:
        """The tail's batch, planned here, and the front's planned again on the way out."""
        try:
            with rewritten(forward_batch, fields):
                seams.plan(self.main, forward_batch)
                yield
        finally:
            self.main.init_forward_metadata(forward_batch)
