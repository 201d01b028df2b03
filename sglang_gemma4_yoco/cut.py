"""One forward with the cut: rows are gathered at the last donor layer, scattered after the tail.

Layers are reached through their own calls, not through the model's loop, whose body differs from
release to release. For the span of one forward the methods of a few objects are shadowed; a
decode step meets no trace of it. With T rows, B kept ones and first shared layer K, the FFNs of
the L layers see ``[T] * (K - 1) + [B] * (L - K + 1)`` rows, or ``[T] * K + [B] * (L - K)`` where
layer K-1 cannot be cut (``donor``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch

from sglang_gemma4_yoco import donor, gate, per_layer, report, seams
from sglang_gemma4_yoco.attention import TailAttention, on_own_backend, on_rebuilt_backend
from sglang_gemma4_yoco.donor import DonorCut
from sglang_gemma4_yoco.shadow import Shadows
from sglang_gemma4_yoco.tail import Tail

FOREIGN_RESIDUAL = "the donor layer's attention is not added to the layer's input"
STREAM_PENDING = "the residual stream is not written before the tail"
NOT_PLANNED = "the tail's attention was not planned for this batch"
IMAGES_ON_ONE_BACKEND = "a multimodal prompt without an attention backend of the tail's own"

_Layer = Callable[..., Any]


class LateRefusalError(Exception):
    """A forward turned out, when it had come to the cut, to be none that can be cut.

    Nothing is lost but time: run from its beginning, the stock forward serves the batch.
    """


def tail_attention(model: Any) -> TailAttention | None:
    """The tail's own attention backend, where the runner could build one."""
    attention: TailAttention | None = model.__dict__.get("_yoco_tail_attention")
    return attention


def _planned(model: Any, forward_batch: Any) -> Tail | None:
    """The tail planned ahead for this very batch, if there is one."""
    attention = tail_attention(model)
    return attention.planned(forward_batch) if attention is not None else None


def refusal(model: Any, forward_batch: Any) -> str | None:
    """Why this forward runs as stock: what the gate says, or that its tail was not planned."""
    attention = tail_attention(model)
    if attention is not None:
        reason = attention.refusal(forward_batch)
        if reason is not None:
            return reason
    return gate.ineligible_reason(model, forward_batch) or _unplanned(attention, forward_batch)


def _unplanned(attention: TailAttention | None, forward_batch: Any) -> str | None:
    """Why an eligible batch has no attention metadata for its tail, or None."""
    if attention is None:
        # Rebuilding would drop the image masks that the model wrote into the metadata.
        return IMAGES_ON_ONE_BACKEND if gate.is_multimodal(forward_batch) else None
    if seams.current_attn_backend() is not attention.main:
        return NOT_PLANNED
    return None if attention.planned(forward_batch) is not None else NOT_PLANNED


def plan_as_stock(forward_batch: Any) -> None:
    """Build the runner's own attention metadata for the whole batch once more."""
    backend = seams.current_attn_backend()
    assert backend is not None, "a forward has an attention backend"
    backend.init_forward_metadata(forward_batch)


def donor_cut(model: Any) -> DonorCut:
    """How layer K-1 of this model is cut; decided once, and said when it is not the deepest."""
    facts = model.__dict__
    if "_yoco_donor_cut" not in facts:
        cut, reason = donor.donor_cut(model, seams.current_attn_backend())
        facts["_yoco_donor_cut"] = cut
        if reason is not None:
            report.once(f"Gemma 4 fast prefill: {describe(model)}, because {reason}")
    decided: DonorCut = facts["_yoco_donor_cut"]
    return decided


def describe(model: Any) -> str:
    """Where this model is cut, for the log: ``cut inside layer 14, behind K and V (of 35)``."""
    config = model.config
    first = gate.first_shared_layer(config)
    assert first is not None
    where = donor_cut(model).value.format(donor=first - 1, first=first)
    return f"{where} (of {config.num_hidden_layers})"


def truncate_to_last_tokens(
    model: Any,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    per_layer_inputs: torch.Tensor | None,
    forward_batch: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, Callable[[], None]]:
    """Cut a batch down to the rows that somebody reads.

    Args:
        model: the ``Gemma4TextModel`` that runs the batch.
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
    attention = tail_attention(model)
    planned = _planned(model, forward_batch)
    tail = planned or Tail.of(forward_batch)
    rows = hidden_states.index_select(0, tail.index)
    row_positions = positions.index_select(0, tail.index)
    tail = tail.at(row_positions)
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
    """A context manager around one forward of one model, which it cuts.

    Attributes:
        tail: the tail of this batch.
        done: whether the forward was cut.
    """

    def __init__(self, model: Any, forward_batch: Any) -> None:
        first = gate.first_shared_layer(model.config)
        assert first is not None, "the gate admits models with a tail only"
        self.tail = _planned(model, forward_batch) or Tail.of(forward_batch)
        self.done = False
        self._model = model
        self._batch = forward_batch
        self._first = first
        self._donor = self._deepest(donor_cut(model))
        self._front: torch.Tensor | None = None  # [T, hidden], the residual at the cut
        self._positions: torch.Tensor | None = None  # [B], while the tail runs
        self._restore: Callable[[], None] | None = None
        self._shadows = Shadows()

    def _deepest(self, allowed: DonorCut) -> DonorCut:
        if allowed is DonorCut.KEYS_AND_VALUES and not self.tail.decodes:
            # Only in decode mode does one attention call take fewer queries than keys to write.
            allowed = DonorCut.AFTER_ATTENTION
        if allowed is DonorCut.AFTER_ATTENTION and self.tail.unread:
            return DonorCut.NONE  # the whole layer is K and V then, but for its attention
        return allowed

    # -- the span ----------------------------------------------------------------------------

    def __enter__(self) -> Cut:
        model, add = self._model, self._shadows.add
        try:
            first_cut = self._first
            if self._donor is not DonorCut.NONE:
                first_cut -= 1
                layer = model.layers[first_cut]
                add(layer, "forward", self._donor_layer)
                add(layer.self_attn, "forward", self._donor_attention)
                reader = seams.residual_reader(layer)
                if reader is not None:
                    add(reader, "forward", self._donor_residual)
            if per_layer.can_be_split(model):
                add(model, "project_per_layer_inputs", self._split_projection(first_cut))
            for i in range(self._first, len(model.layers)):
                add(model.layers[i], "forward", self._tail_layer(i))
            add(model.norm, "forward", self._final_norm)
        except BaseException:
            self._shadows.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._leave_tail()
        finally:
            self._shadows.close()
            attention = tail_attention(self._model)
            if attention is not None:
                attention.release()

    def _enter_tail(self, front: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Gather the kept rows of the front's output; the batch is the tail's from here on."""
        self._front = front
        rows, self._positions, _, _, self._restore = self._model._yoco_truncate_to_last_tokens(
            front, positions, None, self._batch
        )
        kept: torch.Tensor = rows
        return kept

    def _leave_tail(self) -> None:
        restore, self._restore = self._restore, None
        self._positions = None
        if restore is not None:
            restore()

    def _must_be_whole(self, hidden_states: torch.Tensor) -> None:
        """Asked where the first cut layer begins: is its input the whole residual, all rows?"""
        if (
            not seams.residual_is_written(self._batch, hidden_states)
            or hidden_states.shape[0] != self.tail.kept.total
        ):
            raise LateRefusalError(STREAM_PENDING)

    def _kept(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, self.tail.index)

    def _per_layer_input(self, given: Any) -> torch.Tensor | None:
        """One cut layer's per-layer input, for the rows that it runs on."""
        if given is None:
            return None
        return given.rows() if isinstance(given, per_layer.KeptInput) else self._kept(given)

    # -- the shadows, in the order in which a forward meets them -----------------------------

    def _split_projection(self, first_cut: int) -> Callable[[_Layer], _Layer]:
        def wrap(_bound: _Layer) -> _Layer:
            stock = type(self._model).project_per_layer_inputs

            def project_per_layer_inputs(
                inputs_embeds: torch.Tensor, per_layer_inputs: torch.Tensor | None = None
            ) -> per_layer.SplitInputs:
                return per_layer.SplitInputs(
                    stock,
                    self._model,
                    inputs_embeds,
                    per_layer_inputs,
                    first_cut,
                    self.tail.index,
                )

            return project_per_layer_inputs

        return wrap

    def _donor_layer(self, stock: _Layer) -> _Layer:
        def forward(
            positions: torch.Tensor,
            hidden_states: torch.Tensor,
            per_layer_input: Any,
            forward_batch: Any,
            **kwargs: Any,
        ) -> Any:
            self._front = hidden_states
            self._must_be_whole(hidden_states)
            if self.tail.unread:
                self._write_keys_and_values(hidden_states, positions)
                return seams.layer_output(hidden_states)
            return stock(
                positions=positions,
                hidden_states=hidden_states,
                per_layer_input=self._per_layer_input(per_layer_input),
                forward_batch=forward_batch,
                **kwargs,
            )

        return forward

    def _write_keys_and_values(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> None:
        """All that an unfinished chunk needs of layer K-1. Its output is this layer's input."""
        layer = self._model.layers[self._first - 1]
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden_states)
        k, v = donor.keys_and_values(attention, normed, positions)
        rows = self._enter_tail(hidden_states, positions)
        # A backend writes where it attends; what these queries see is thrown away.
        q = rows.new_zeros(rows.shape[0], attention.num_heads, attention.head_dim)
        donor.attend(attention, q, k, v, self._batch)
        self._leave_tail()
        self.done = True

    def _donor_attention(self, stock: _Layer) -> _Layer:
        attention = self._model.layers[self._first - 1].self_attn

        def forward(
            positions: torch.Tensor,
            hidden_states: torch.Tensor,
            forward_batch: Any,
            **kwargs: Any,
        ) -> Any:
            assert self._front is not None, "the layer has begun"
            if self._donor is DonorCut.AFTER_ATTENTION:
                output = stock(
                    positions=positions,
                    hidden_states=hidden_states,
                    forward_batch=forward_batch,
                    **kwargs,
                )
                self._enter_tail(seams.residual(forward_batch, self._front), positions)
                return self._kept(output)
            k, v = donor.keys_and_values(attention, hidden_states, positions)
            normed_rows = self._kept(hidden_states)
            self._enter_tail(seams.residual(forward_batch, self._front), positions)
            assert self._positions is not None
            q = donor.queries(attention, normed_rows, self._positions)
            output, _ = attention.o_proj(donor.attend(attention, q, k, v, forward_batch))
            return output

        return forward

    def _donor_residual(self, stock: _Layer) -> _Layer:
        def forward(
            hidden_states: torch.Tensor, residual: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            # The layer adds its own input, which has all rows, to the attention of kept ones.
            if residual is not self._front:
                raise LateRefusalError(FOREIGN_RESIDUAL)
            return stock(hidden_states, self._kept(residual), *args, **kwargs)

        return forward

    def _tail_layer(self, i: int) -> Callable[[_Layer], _Layer]:
        is_first, is_last = i == self._first, i == len(self._model.layers) - 1

        def wrap(stock: _Layer) -> _Layer:
            def forward(
                positions: torch.Tensor,
                hidden_states: torch.Tensor,
                per_layer_input: Any,
                forward_batch: Any,
                **kwargs: Any,
            ) -> Any:
                if is_first and self._donor is DonorCut.NONE:
                    self._must_be_whole(hidden_states)
                    if self.tail.unread:
                        self._front, self.done = hidden_states, True
                    else:
                        hidden_states = self._enter_tail(hidden_states, positions)
                if self.tail.unread and self.done:
                    return seams.layer_output(hidden_states)
                output = stock(
                    positions=positions if self._positions is None else self._positions,
                    hidden_states=hidden_states,
                    per_layer_input=self._per_layer_input(per_layer_input),
                    forward_batch=forward_batch,
                    **kwargs,
                )
                return self._scatter(output) if is_last else output

            return forward

        return wrap

    def _scatter(self, output: Any) -> Any:
        """The front's own rows, the kept ones overwritten by the tail's output.

        The front's tensor is what the batch's residual stream held at the cut, and holds again
        now; the tail worked on copies, so the other rows are the front's finite output.
        """
        front = self._front
        assert front is not None, "the tail has a front"
        front.index_copy_(0, self.tail.index, seams.layer_rows(output))
        self._leave_tail()
        self.done = True
        return seams.layer_output(front)

    def _final_norm(self, stock: _Layer) -> _Layer:
        def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            front = self._front
            if not self.done or hidden_states is not front or front is None or args or kwargs:
                return stock(hidden_states, *args, **kwargs)
            # The other rows stay unnormed: finite, and read by nobody.
            return front.index_copy_(0, self.tail.index, stock(self._kept(front)))

        return forward
