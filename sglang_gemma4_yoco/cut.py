"""One forward with the cut: gather before the first shared layer, scatter after the last.

The layers are reached through their own call, not through the model's loop, whose body differs
from release to release. For the span of one forward each tail layer's ``forward`` is shadowed on
the instance; a decode step meets no trace of it.

With K shared layers' first index, T rows and B requests the layers see
``[T] * K + [B] * (L - K)`` rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch

from sglang_gemma4_yoco import gate, report, seams
from sglang_gemma4_yoco.attention import TailAttention, on_own_backend, on_rebuilt_backend
from sglang_gemma4_yoco.tail import Tail

STREAM_PENDING = "the residual stream is not written before the first shared layer"
NOT_PLANNED = "the tail's attention was not planned for this batch"
IMAGES_ON_ONE_BACKEND = "a multimodal prompt without an attention backend of the tail's own"


def tail_attention(model: Any) -> TailAttention | None:
    """The tail's own attention backend, where the runner could build one."""
    attention: TailAttention | None = model.__dict__.get("_yoco_tail_attention")
    return attention


def unplanned_reason(model: Any, forward_batch: Any) -> str | None:
    """Why an eligible batch has no attention metadata for its tail, or None."""
    attention = tail_attention(model)
    if attention is None:
        # Rebuilding would drop the image masks that the model wrote into the metadata.
        multimodal = getattr(forward_batch, "mm_input_embeds", None) is not None
        return IMAGES_ON_ONE_BACKEND if multimodal else None
    if seams.current_attn_backend() is not attention.main:
        return NOT_PLANNED
    return None if attention.planned(forward_batch) is not None else NOT_PLANNED


def truncate_to_last_tokens(
    model: Any,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    per_layer_inputs: torch.Tensor | None,
    forward_batch: Any,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, Callable[[], None]
]:
    """Cut a batch down to the last row of every request.

    Args:
        model: the ``Gemma4TextModel`` that runs the batch.
        hidden_states: [T, hidden].
        positions: [T].
        per_layer_inputs: [T, ...] (of one layer or of all), or None.
        forward_batch: an eligible batch; on return its ``extend_*`` fields, mode, input ids and
            positions describe the kept rows, and attention is planned for them.

    Returns:
        ``(hidden_states [B, hidden], positions [B], per_layer_inputs [B, ...], last_indices [B]
        int64, restore_fn)``. ``restore_fn()`` puts every field and the attention state back;
        calling it again does nothing. When this function raises, all is put back already.
    """
    attention = tail_attention(model)
    planned = attention.planned(forward_batch) if attention is not None else None
    tail = planned or Tail.of(forward_batch)
    rows = hidden_states.index_select(0, tail.index)
    row_positions = positions.index_select(0, tail.index)
    tail = Tail(tail.kept, tail.index, {**tail.fields, "positions": row_positions})
    span: AbstractContextManager[None]
    if attention is not None and planned is not None:
        span = on_own_backend(attention, forward_batch, tail)
    else:
        span = on_rebuilt_backend(seams.current_attn_backend(), forward_batch, tail)
    with ExitStack() as stack:
        stack.enter_context(span)
        seams.write_residual(forward_batch, rows)
        row_inputs = (
            None if per_layer_inputs is None else per_layer_inputs.index_select(0, tail.index)
        )
        restore = stack.pop_all().close
    return rows, row_positions, row_inputs, tail.index, restore


class Cut:
    """A context manager around one forward of one model: shadows its tail layers, restores all.

    After the span, ``done`` tells whether the tail ran on kept rows (it steps aside at the last
    moment when the residual stream is not in the state that it needs).
    """

    def __init__(self, model: Any, forward_batch: Any) -> None:
        first = gate.first_shared_layer(model.config)
        assert first is not None, "the gate admits models with a tail only"
        self._model = model
        self._batch = forward_batch
        self._layers: list[Any] = [model.layers[i] for i in range(first, len(model.layers))]
        self._shadowed: list[Any] = []
        self._front: torch.Tensor | None = None  # [T, hidden], what the front left
        self._index: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._restore: Callable[[], None] | None = None
        self.done = False

    def __enter__(self) -> Cut:
        for layer in self._layers:
            if "forward" in layer.__dict__:  # somebody else shadows it: leave the layer to them
                self._unshadow()
                report.once(f"{type(layer).__name__}.forward is replaced on an instance")
                break
            layer.__dict__["forward"] = self._shadow(layer.forward, layer)
            self._shadowed.append(layer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._leave()
        finally:
            self._unshadow()

    def _unshadow(self) -> None:
        while self._shadowed:
            del self._shadowed.pop().__dict__["forward"]

    def _shadow(self, layer_forward: Callable[..., Any], layer: Any) -> Callable[..., Any]:
        first, last = layer is self._layers[0], layer is self._layers[-1]

        def forward(
            positions: torch.Tensor,
            hidden_states: torch.Tensor,
            per_layer_input: torch.Tensor | None,
            forward_batch: Any,
            **kwargs: Any,
        ) -> Any:
            if first:
                hidden_states, per_layer_input = self._enter_tail(
                    hidden_states, positions, per_layer_input
                )
            elif self._index is not None and per_layer_input is not None:
                per_layer_input = per_layer_input.index_select(0, self._index)
            output = layer_forward(
                positions=positions if self._positions is None else self._positions,
                hidden_states=hidden_states,
                per_layer_input=per_layer_input,
                forward_batch=forward_batch,
                **kwargs,
            )
            return self._scatter(output) if last else output

        return forward

    def _enter_tail(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        per_layer_input: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not seams.residual_is_written(self._batch, hidden_states):
            report.stepped_aside(STREAM_PENDING)
            return hidden_states, per_layer_input
        self._front = hidden_states
        rows, self._positions, row_input, self._index, self._restore = (
            self._model._yoco_truncate_to_last_tokens(
                hidden_states, positions, per_layer_input, self._batch
            )
        )
        return rows, row_input

    def _scatter(self, output: Any) -> Any:
        """The front's own rows, the kept ones overwritten by the tail's output.

        The front's tensor is what the batch's residual stream held at the cut, and what it holds
        again now; the tail worked on copies, so the other rows are the front's finite output.
        """
        if self._front is None or self._index is None:
            return output
        front = self._front
        # Up to SGLang 0.5.21 a layer returns (hidden_states, None).
        rows, *rest = output if isinstance(output, tuple) else (output,)
        front.index_copy_(0, self._index, rows)
        self._leave()
        self.done = True
        return (front, *rest) if isinstance(output, tuple) else front

    def _leave(self) -> None:
        restore, self._restore = self._restore, None
        self._front = self._index = self._positions = None
        if restore is not None:
            restore()
