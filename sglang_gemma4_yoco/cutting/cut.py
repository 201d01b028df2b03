"""One forward with the cut: all rows up to the last donor layer, kept rows behind it.

The model's own loop ends before layer K-1, by the ``end_layer`` that it has for pipeline stages.
What is left happens where the model norms its rows: layer K-1 writes K and V of all rows, the
layers behind the cut run on the kept ones (``layers``: launched here, or replayed from a graph; of
a chunk that nobody reads not at all), and what comes of them overwrites the kept rows.

For the span of one forward a few names of the model are shadowed; a decode step meets no trace of
it. With T rows, B kept ones and first shared layer K, the FFNs of the L layers see
``[T] * (K - 1) + [B] * (L - K + 1)`` rows, or ``[T] * K + [B] * (L - K)`` where layer K-1 cannot
be cut (``donor``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.cutting.gate import Plan
from sglang_gemma4_yoco.cutting.served import ServedModel
from sglang_gemma4_yoco.tail import donor, layers, per_layer
from sglang_gemma4_yoco.tail.graphs import Replay
from sglang_gemma4_yoco.tail.shadow import Shadows

ENDLESS = "the model's layers go on behind the last one that it was told to run"
OTHER_INPUTS = "the model is called without per-layer embeddings"
OTHER_NORM = "the model does something else between its layers and its norm"
STREAM_PENDING = "the residual stream is not written before the tail"
OTHER_ROWS = "the model's rows are not those of the batch"
NO_NORM = "the model did not come to its norm"

_Call = Callable[..., Any]


class LateRefusalError(Exception):
    """A forward turned out, when it had come to the cut, to be none that can be cut.

    Nothing is lost but time: run from its beginning, the stock forward serves the batch.
    """


class Cut:
    """A context manager around one forward of one model, which it cuts.

    Attributes:
        plan: of the batch.
        positions: [T], what the model was called with.
        output: [T, hidden], what the model goes on with once the tail is over; None before.
    """

    def __init__(self, known: ServedModel, plan: Plan, positions: torch.Tensor) -> None:
        self.plan = plan
        self.positions = positions
        self.output: torch.Tensor | None = None
        self._at_the_cut: torch.Tensor | None = None  # what the front's last layer has returned
        self._model = known.model
        self._first = known.first_cut
        self._inside = known.first_cut < known.first_shared
        self._kept_inputs: Callable[[], torch.Tensor | None] | None = None
        self._shadows = Shadows()
        self._front = Shadows()  # until the tail begins

    def __enter__(self) -> Cut:
        try:
            self._shadows.add(self._model, "project_per_layer_inputs", self._projecting)
            self._shadows.add(self._model.norm, "forward", self._norming)
            self._front.add(self._model, "end_layer", lambda _: self._first)
            self._front.add(self._model.layers[self._first - 1], "forward", self._written)
            self._front.add(self._model.layers[self._first], "forward", lambda _: _endless)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()
        if kind is None and self.output is None:
            raise LateRefusalError(NO_NORM)

    def _close(self) -> None:
        self._front.close()
        self._shadows.close()

    # -- before the layers ---------------------------------------------------------------------

    def _projecting(self, stock: _Call) -> _Call:
        """Per-layer inputs: of the front's layers for all rows, of the others for kept rows."""
        model, index, replay = self._model, self.plan.tail.index, self.plan.replay

        def project_per_layer_inputs(
            inputs_embeds: torch.Tensor, per_layer_inputs: torch.Tensor | None = None
        ) -> Any:
            room = None if replay is None else replay.room
            if room is not None and (room.embedded is None) != (per_layer_inputs is None):
                raise LateRefusalError(OTHER_INPUTS)
            if per_layer.can_be_split(model):
                split = per_layer.SplitInputs(
                    model, inputs_embeds, per_layer_inputs, self._first, index, room
                )
                self._kept_inputs = split.kept
                return split
            whole = stock(inputs_embeds, per_layer_inputs)
            self._kept_inputs = lambda: (
                None if whole is None else whole[:, self._first :].index_select(0, index)
            )
            return whole

        return project_per_layer_inputs

    # -- behind them ---------------------------------------------------------------------------

    def _written(self, stock: _Call) -> _Call:
        """The front's last layer, whose output must be the whole residual."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = stock(*args, **kwargs)
            self._at_the_cut = seams.layer_rows(output)
            if not seams.residual_is_written(self.plan.batch, self._at_the_cut):
                raise LateRefusalError(STREAM_PENDING)
            return output

        return forward

    def _norming(self, stock: _Call) -> _Call:
        """The tail, in the place of the model's norm."""

        def forward(front: torch.Tensor, *others: Any, **settings: Any) -> torch.Tensor:
            if self._kept_inputs is None:
                raise LateRefusalError(OTHER_INPUTS)
            if others or settings or not self._is_from_the_front(front):
                raise LateRefusalError(OTHER_NORM)
            if front.shape[0] != self.plan.tail.kept.total:
                raise LateRefusalError(OTHER_ROWS)
            self._front.close()
            if self._inside:
                self.write_keys_and_values(front)
            if self.plan.replay is not None:
                self.scatter(front, self._replayed(front, self.plan.replay))
            elif not self.plan.tail.unread:
                self.scatter(front, self._launched(front, self._kept_inputs(), stock))
            self.output = front
            return front

        return forward

    def _is_from_the_front(self, rows: torch.Tensor) -> bool:
        """Whether these are the rows that the front's last layer has returned, untouched."""
        no_front = self._model.start_layer == self._first  # of an audit
        return self.output is None and (no_front or rows is self._at_the_cut)

    def write_keys_and_values(self, front: torch.Tensor) -> None:
        """K and V of layer K-1 for all rows, from its input [T, hidden]."""
        layer, plan = self._model.layers[self._first], self.plan
        k, v = donor.keys_and_values(layer.self_attn, layer.input_layernorm(front), self.positions)
        plan.attention.write_keys_and_values(layer.self_attn.attn, plan.batch, k, v)

    def scatter(self, front: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite the kept rows; the others stay as they are: finite, and read by nobody."""
        front.index_copy_(0, self.plan.tail.index, rows)

    def _replayed(self, front: torch.Tensor, replay: Replay) -> torch.Tensor:
        index = self.plan.tail.index
        torch.index_select(front, 0, index, out=replay.inputs.rows)
        torch.index_select(self.positions, 0, index, out=replay.inputs.positions)
        return replay.run()

    def _launched(
        self, front: torch.Tensor, inputs: torch.Tensor | None, norm: _Call
    ) -> torch.Tensor:
        plan = self.plan
        rows = front.index_select(0, plan.tail.index)
        positions = self.positions.index_select(0, plan.tail.index)
        with plan.attention.running(plan.batch, plan.tail.fields_at(positions)):
            return layers.run(self._model, self._first, plan.batch, rows, positions, inputs, norm)


def _endless(*_: Any, **__: Any) -> Any:
    raise LateRefusalError(ENDLESS)
