"""One forward with the cut: rows are gathered at the last donor layer, scattered after the tail.

Layers are reached through their own calls, not through the model's loop, whose body differs from
release to release; but where nothing is left to run, it ends early, by the ``end_layer`` that it
has for pipeline stages. For the span of one forward the methods of a few objects are shadowed; a
decode step meets no trace of it. With T rows, B kept ones and first shared layer K, the FFNs of
the L layers see ``[T] * (K - 1) + [B] * (L - K + 1)`` rows, or ``[T] * K + [B] * (L - K)`` where
layer K-1 cannot be cut (``donor``).

What happens where the cut comes is one function for each kind of it, ``_AT_THE_CUT``; what happens
behind it is one for each way to run the tail, ``_launched`` or ``_replayed``, and none where nobody
reads it or the cut itself has replayed it all. They share a ``Cut``, which holds nothing but what
was gathered, and what came out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.attending.attention import Way
from sglang_gemma4_yoco.cutting import donor, per_layer
from sglang_gemma4_yoco.cutting.donor import DonorCut
from sglang_gemma4_yoco.cutting.plan import Plan
from sglang_gemma4_yoco.cutting.shadow import Shadows
from sglang_gemma4_yoco.cutting.tail import Tail
from sglang_gemma4_yoco.served import ServedModel

ENDLESS = "the model's layers go on behind the last one that it was told to run"
FOREIGN_RESIDUAL = "the donor layer's attention is not added to the layer's input"
OTHER_INPUTS = "the model is called without per-layer embeddings"
OTHER_NORM = "the model does something else between its layers and its norm"
STREAM_PENDING = "the residual stream is not written before the tail"

_Call = Callable[..., Any]


class LateRefusalError(Exception):
    """A forward turned out, when it had come to the cut, to be none that can be cut.

    Nothing is lost but time: run from its beginning, the stock forward serves the batch.
    """


@dataclass(frozen=True)
class Gathered:
    """The kept rows of one batch, which is the tail's until ``restore`` is called.

    Attributes:
        front: [T, hidden], the residual at the cut.
        rows: [B, hidden], copies of its kept rows.
        positions: [B].
        restore: puts the batch and the attention state back; called again, it does nothing.
    """

    front: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    restore: Callable[[], None]


def gather(
    forward_batch: Any, tail: Tail, way: Way, front: torch.Tensor, positions: torch.Tensor
) -> Gathered:
    """Take the kept rows of ``front`` [T, hidden]; when this raises, all is put back already.

    Args:
        positions: [T].
    """
    rows = front.index_select(0, tail.index)
    row_positions = positions.index_select(0, tail.index)
    with ExitStack() as stack:
        stack.enter_context(way.running(forward_batch, tail.fields_at(row_positions)))
        seams.write_residual(forward_batch, rows)
        return Gathered(front, rows, row_positions, stack.pop_all().close)


class Cut:
    """A context manager around one forward of one model, which it cuts.

    Attributes:
        layers: layers K to L-1.
        donor: layer K-1.
        tail: the tail of this batch.
        way: the attention that front and tail run on.
        replay: its recorded tail; None if its layers are launched, or skipped.
        output: [T, hidden], what the model goes on with once the tail is over; None before.
    """

    def __init__(self, known: ServedModel, plan: Plan) -> None:
        self.layers = known.tail_layers
        self.donor = known.model.layers[known.first_shared - 1]
        self.tail = plan.tail
        self.way = plan.way
        self.replay = plan.replay
        self.output: torch.Tensor | None = None
        self._model = known.model
        self._first_shared = known.first_shared
        self._first_cut = known.first_shared - (plan.donor is not DonorCut.NONE)
        self._plan = plan
        self._gathered: Gathered | None = None
        self._shadows = Shadows()

    def __enter__(self) -> Cut:
        try:
            if self._splits_inputs():
                self.shadow(self._model, "project_per_layer_inputs", self._split_projection)
            for prepare in _strategies(self._plan):
                prepare(self)
            self.shadow(self._model.norm, "forward", self._final_norm)
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
            self.restore()
        finally:
            self._shadows.close()

    def shadow(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``wrap(owner.name)`` until the exit."""
        self._shadows.add(owner, name, wrap)

    def end_before(self, layer: int) -> None:
        """Have the model's loop end before layer K + ``layer``, as on a pipeline stage."""

        def behind_the_last(_: _Call) -> _Call:
            def forward(*args: Any, **kwargs: Any) -> Any:
                raise LateRefusalError(ENDLESS)

            return forward

        self.shadow(self._model, "end_layer", lambda _: self._first_shared + layer)
        for following in self.layers[layer : layer + 1]:
            self.shadow(following, "forward", behind_the_last)

    # -- from the front to the tail, and back ------------------------------------------------

    def must_be_whole(self, hidden_states: torch.Tensor) -> None:
        """Asked where the first cut layer begins: is its input the whole residual, all rows?"""
        if (
            not seams.residual_is_written(self._plan.batch, hidden_states)
            or hidden_states.shape[0] != self.tail.kept.total
        ):
            raise LateRefusalError(STREAM_PENDING)

    def keys_and_values(
        self, hidden_states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of layer K-1 for all rows of its input, each [T, kv_heads, head_dim]."""
        self.must_be_whole(hidden_states)
        normed = self.donor.input_layernorm(hidden_states)
        return donor.keys_and_values(self.donor.self_attn, normed, positions)

    def gather(self, front: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The kept rows of ``front`` [T, hidden]; the batch is the tail's from here on."""
        plan = self._plan
        self._gathered = gather(plan.batch, plan.tail, self.way, front, positions)
        return self._gathered.rows

    @property
    def row_positions(self) -> torch.Tensor:
        """[B], the positions of the kept rows, while the tail runs."""
        assert self._gathered is not None, "the tail has begun"
        return self._gathered.positions

    def scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """The front's own rows, the kept ones overwritten by the tail's output.

        The front's tensor is what the batch's residual stream held at the cut, and holds again
        now; the tail worked on copies, so the other rows are the front's finite output.
        """
        gathered = self._gathered
        assert gathered is not None, "the tail has a front"
        gathered.front.index_copy_(0, self.tail.index, rows)
        self.restore()
        return self.finish(gathered.front)

    def restore(self) -> None:
        """The batch is the front's again, if it was the tail's."""
        if self._gathered is not None:
            self._gathered.restore()

    def finish(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The tail is over, and these [T, hidden] are what is left."""
        self.output = hidden_states
        return hidden_states

    def kept(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, ...] of [T, ...]."""
        return rows.index_select(0, self.tail.index)

    def kept_input(self, given: Any) -> torch.Tensor | None:
        """One cut layer's per-layer input, for the rows that it runs on."""
        if given is None:
            return None
        return given.rows() if isinstance(given, per_layer.KeptInput) else self.kept(given)

    # -- before and after the layers ---------------------------------------------------------

    def _splits_inputs(self) -> bool:
        if self.replay is not None:
            return self.replay.room is not None  # it was asked before the recording
        return per_layer.can_be_split(self._model)

    def _split_projection(self, _: _Call) -> _Call:
        model = self._model

        def project_per_layer_inputs(
            inputs_embeds: torch.Tensor, per_layer_inputs: torch.Tensor | None = None
        ) -> per_layer.SplitInputs:
            room = None if self.replay is None else self.replay.room
            if room is not None and (room.embedded is None) != (per_layer_inputs is None):
                raise LateRefusalError(OTHER_INPUTS)
            return per_layer.SplitInputs(
                model, inputs_embeds, per_layer_inputs, self._first_cut, self.tail.index, room
            )

        return project_per_layer_inputs

    def _final_norm(self, stock: _Call) -> _Call:
        def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            front = self.output
            known = front is not None and hidden_states is front and not args and not kwargs
            if self.replay is not None:
                if not known:  # a norm of its own would come on top of the graph's
                    raise LateRefusalError(OTHER_NORM)
                return front
            if front is None or not known:
                return stock(hidden_states, *args, **kwargs)
            # The other rows stay unnormed: finite, and read by nobody.
            return front.index_copy_(0, self.tail.index, stock(self.kept(front)))

        return forward


# -- behind the cut: one function for each way to run the tail -------------------------------


def _launched(cut: Cut) -> None:
    """Layers K to L-1 run one by one on the kept rows; after the last one these are scattered."""

    def on_kept_rows(stock: _Call) -> _Call:
        def forward(
            positions: torch.Tensor,  # of all rows; the tail has its own
            hidden_states: torch.Tensor,
            per_layer_input: Any,
            forward_batch: Any,
            **kwargs: Any,
        ) -> Any:
            return stock(
                positions=cut.row_positions,
                hidden_states=hidden_states,
                per_layer_input=cut.kept_input(per_layer_input),
                forward_batch=forward_batch,
                **kwargs,
            )

        return forward

    def and_scattered(stock: _Call) -> _Call:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return seams.layer_output(cut.scatter(seams.layer_rows(stock(*args, **kwargs))))

        return forward

    for layer in cut.layers:
        cut.shadow(layer, "forward", on_kept_rows)
    cut.shadow(cut.layers[-1], "forward", and_scattered)


def _replayed(cut: Cut) -> None:
    """Layers K to L-1 are one graph, which runs where layer K does."""
    replay = cut.replay
    assert replay is not None

    def all_at_once(_: _Call) -> _Call:
        def forward(positions: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            replay.inputs.rows.copy_(hidden_states)
            replay.inputs.positions.copy_(cut.row_positions)
            return seams.layer_output(cut.scatter(replay.run()))

        return forward

    cut.end_before(1)
    cut.shadow(cut.layers[0], "forward", all_at_once)


# -- at the cut: one function for each kind of it --------------------------------------------


def _before_the_first_shared(cut: Cut) -> None:
    """Layer K-1 is stock's; layer K gets the kept rows of its input."""

    def gathering(stock: _Call) -> _Call:
        def forward(
            positions: torch.Tensor, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            cut.must_be_whole(hidden_states)
            rows = cut.gather(hidden_states, positions)
            return stock(positions, rows, *args, **kwargs)

        return forward

    cut.shadow(cut.layers[0], "forward", gathering)


def _unread_before_the_first_shared(cut: Cut) -> None:
    """Layer K-1 is stock's, and the last one to run: layer K hands on what it is given."""

    def ending(_: _Call) -> _Call:
        def forward(positions: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            cut.must_be_whole(hidden_states)
            return seams.layer_output(cut.finish(hidden_states))

        return forward

    cut.end_before(1)
    cut.shadow(cut.layers[0], "forward", ending)


def _behind_attention(cut: Cut) -> None:
    """The attention of layer K-1 is stock's; what follows it runs on the kept rows."""

    def attention(
        stock: _Call,
        layer_input: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        output = stock(
            positions=positions, hidden_states=hidden_states, forward_batch=forward_batch, **kwargs
        )
        cut.gather(seams.residual(forward_batch, layer_input), positions)
        return cut.kept(output)

    _shadow_donor(cut, attention)


def _behind_keys_and_values(cut: Cut) -> None:
    """Layer K-1 makes K and V of all rows; queries and what follows are of the kept rows."""
    parts = cut.donor.self_attn

    def attention(
        _: _Call,
        layer_input: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        **__: Any,
    ) -> torch.Tensor:
        k, v = donor.keys_and_values(parts, hidden_states, positions)
        normed_rows = cut.kept(hidden_states)
        cut.gather(seams.residual(forward_batch, layer_input), positions)
        q = donor.queries(parts, normed_rows, cut.row_positions)
        output: torch.Tensor
        output, _bias = parts.o_proj(donor.attend(parts, q, k, v, forward_batch))
        return output

    _shadow_donor(cut, attention)


def _unread_behind_keys_and_values(cut: Cut) -> None:
    """K and V are all that an unfinished chunk needs of layer K-1. Its output is its input."""
    parts = cut.donor.self_attn

    def nothing_else(
        batch: Any, front: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        rows = cut.gather(front, positions)
        # A backend writes where it attends; what these queries see is thrown away.
        q = rows.new_zeros(rows.shape[0], parts.num_heads, parts.head_dim)
        donor.attend(parts, q, k, v, batch)
        cut.restore()
        return front

    _end_in_donor(cut, nothing_else)


def _replayed_behind_keys_and_values(cut: Cut) -> None:
    """Layer K-1 makes K and V of all rows; what follows them, to layer L-1, is one graph."""
    attention, replay = cut.donor.self_attn.attn, cut.replay
    assert replay is not None

    def at_once(
        batch: Any, front: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        seams.write_keys_and_values(cut.way.main, cut.way.tail, attention, batch, k, v)
        index = cut.tail.index
        torch.index_select(front, 0, index, out=replay.inputs.rows)
        torch.index_select(positions, 0, index, out=replay.inputs.positions)
        return front.index_copy_(0, index, replay.run())

    _end_in_donor(cut, at_once)


_AT_THE_CUT: dict[tuple[DonorCut, bool], Callable[[Cut], None]] = {
    (DonorCut.NONE, False): _before_the_first_shared,
    (DonorCut.NONE, True): _unread_before_the_first_shared,
    (DonorCut.AFTER_ATTENTION, False): _behind_attention,
    (DonorCut.KEYS_AND_VALUES, False): _behind_keys_and_values,
    (DonorCut.KEYS_AND_VALUES, True): _unread_behind_keys_and_values,
}


def _strategies(plan: Plan) -> tuple[Callable[[Cut], None], ...]:
    """What happens behind the cut, and at it; the latter may wrap what the former has put there."""
    if plan.replay is not None and plan.replay.with_donor:
        return (_replayed_behind_keys_and_values,)
    at_the_cut = _AT_THE_CUT[plan.donor, plan.tail.unread]
    if plan.tail.unread:
        return (at_the_cut,)
    return (_launched if plan.replay is None else _replayed), at_the_cut


def _end_in_donor(cut: Cut, rest: Callable[..., torch.Tensor]) -> None:
    """Layer K-1 makes K and V of all rows, and is the last layer: ``rest`` does what follows.

    Args:
        rest: called with batch, front [T, hidden], positions [T], K and V [T, kv_heads, head_dim];
            returns the front [T, hidden], with the tail's output in its kept rows.
    """

    def donor_layer(_: _Call) -> _Call:
        def forward(
            positions: torch.Tensor,
            hidden_states: torch.Tensor,
            per_layer_input: Any,
            forward_batch: Any,
            **__: Any,
        ) -> Any:
            k, v = cut.keys_and_values(hidden_states, positions)
            output = rest(forward_batch, hidden_states, positions, k, v)
            return seams.layer_output(cut.finish(output))

        return forward

    cut.end_before(0)
    cut.shadow(cut.donor, "forward", donor_layer)


def _shadow_donor(cut: Cut, attention: Callable[..., torch.Tensor]) -> None:
    """Layer K-1 runs its own code, whose attention is ``attention`` and hands on kept rows."""
    layer = cut.donor
    reader = seams.residual_reader(layer)

    def donor_layer(stock: _Call) -> _Call:
        def forward(
            positions: torch.Tensor,
            hidden_states: torch.Tensor,
            per_layer_input: Any,
            forward_batch: Any,
            **kwargs: Any,
        ) -> Any:
            cut.must_be_whole(hidden_states)
            with Shadows() as within:
                within.add(
                    layer.self_attn, "forward", lambda own: partial(attention, own, hidden_states)
                )
                if reader is not None:
                    within.add(reader, "forward", lambda own: reading(own, hidden_states))
                return stock(
                    positions=positions,
                    hidden_states=hidden_states,
                    per_layer_input=cut.kept_input(per_layer_input),
                    forward_batch=forward_batch,
                    **kwargs,
                )

        return forward

    def reading(stock: _Call, layer_input: torch.Tensor) -> _Call:
        def forward(
            hidden_states: torch.Tensor, residual: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            # The layer adds its own input, which has all rows, to the attention of kept ones.
            if residual is not layer_input:
                raise LateRefusalError(FOREIGN_RESIDUAL)
            return stock(hidden_states, cut.kept(residual), *args, **kwargs)

        return forward

    cut.shadow(layer, "forward", donor_layer)
