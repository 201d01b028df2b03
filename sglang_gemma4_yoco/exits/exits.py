"""Exits from SGLang's captured prefills: at the attention of the layer that is cut inside.

SGLang captures a prefill as one CUDA graph for each stretch between two attentions, a *segment*,
and runs the attentions eagerly (its *breakable* graphs). With the cut inside layer S-1 of L::

    segment 0 | attention 0 | segment 1 | ... | segment S-1 | attention S-1 | ... | segment L
                                                            ^ the exit point

A batch that is cut runs SGLang's own segments up to the exit point; then its K and V of layer S-1
are written, its captured tail is replayed, and the tail's rows go into SGLang's output. What can be
read at the exit point are tensors that Python held there when SGLang captured: the graph keeps
their memory, and later segments overwrite it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.compat import captured_prefills
from sglang_gemma4_yoco.core.forward import serve_forward
from sglang_gemma4_yoco.core.per_layer import Buffers
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.exits import capture, text_inputs
from sglang_gemma4_yoco.replaced import replaced

NO_POINT = "some captured prefill does not run the layer inside which batches are cut"
#: Where SGLang's runner of captured prefills has its exits.
EXITS_ENTRY = "_yoco_exits"


def replay_to_exit(graph: Any) -> capture.ExitPoint:
    """Run a captured prefill up to its exit point; returns that point."""
    point: capture.ExitPoint = getattr(graph, capture.POINT_ENTRY)
    captured_prefills.replay_first_segments(graph, point.segments)
    return point


class PrefillGraphExits:
    """The exits of one model's captured prefills, one for each bucket; all are open, or none.

    Only SGLang's runner of captured prefills holds it: graphs that SGLang drops are freed. With
    ``hooks`` closed, that runner is as it was.

    Attributes:
        embed: what the tail is given for ids, as the graphs were captured: see ``text_inputs``.
        closed: why no batch may take them; None if they are open.
        segments: how many run before the exit, by bucket; 0 for a graph that has no exit.

    Raises:
        AttributeError: this SGLang captures prefills differently; nothing is changed.
    """

    def __init__(self, state: ModelState, prefills: Any, config: Any) -> None:
        self.embed = partial(embed_for_tail, state, config)
        self.closed: str | None = "they are not open yet"
        self._graphs = graphs = captured_prefills.list_graphs(prefills)
        self.segments: dict[int, int] = {}
        for bucket, (graph, _) in graphs.items():
            point = getattr(graph, capture.POINT_ENTRY, None)
            self.segments[getattr(bucket, "size", bucket)] = getattr(point, "segments", 0)
        self._state = state
        self._batch: Any = None  # that SGLang serves by a captured prefill now
        for _, output in graphs.values():
            output.zero_()  # rows that are not written any more must at least be finite
        execute = partial(self._execute, prefills.execute)
        replay = partial(self._replay, prefills.backend.replay)
        self.hooks = ExitStack()
        self.hooks.enter_context(replaced(prefills, execute=execute, **{EXITS_ENTRY: self}))
        self.hooks.enter_context(replaced(prefills.backend, replay=replay))

    def __str__(self) -> str:
        after, longest = max(self.segments.values()), max(self.segments)
        return f"after segment {after} ({len(self.segments)} buckets of up to {longest} tokens)"

    def _execute(self, stock: Callable[..., Any], forward_batch: Any, **kwargs: Any) -> Any:
        self._batch, self._state.replayed_exits = forward_batch, self
        try:
            return stock(forward_batch, **kwargs)
        finally:
            self._batch = self._state.replayed_exits = None

    def _replay(self, stock: Callable[..., Any], bucket: Any, batch: Any, **kwargs: Any) -> Any:
        to_its_end = partial(stock, bucket, batch, **kwargs)
        forward = ExitForward(self._state, *self._graphs[bucket], batch, to_its_end, self.embed)
        return serve_forward(self._state, self._batch, forward)


@dataclass
class ExitForward:
    """A forward that SGLang runs by a captured prefill."""

    state: ModelState
    graph: Any
    output: torch.Tensor  # [bucket, hidden], written by the graph, and on every path
    #: SGLang's static batch, which the graph reads: the live one's tokens first, up to the bucket.
    #: Gemma 4 has added 1 to its positions, in place.
    batch: Any
    stock: Callable[[], torch.Tensor]  # runs the graph to its end; returns ``output``
    embed: Callable[[torch.Tensor], Any]  # ``text_inputs.Inputs`` of the tail's layers
    point: capture.ExitPoint | None = None  # what can be read until the next replay, after ``fast``
    is_replay: ClassVar[bool] = True

    def fast(self, plan: Plan) -> torch.Tensor:
        """Run it up to the exit, write K and V, and replay the tail: [bucket, hidden]."""
        self.point = point = replay_to_exit(self.graph)
        # Rows after those of the live batch are padding, of which nothing may be written.
        total = plan.tail.kept.total
        keys, values = point.keys[:total], point.values[:total]
        main, tail = plan.attention.main, plan.attention.tail
        layer = self.state.tail_layers[0].self_attn.attn
        compat.pools.write_keys_and_values(main, tail, layer, plan.batch, keys, values)
        if plan.runner is not None:
            if plan.runner.buffers is not None:
                self.fill(plan.runner.buffers, plan.tail.index)
            rows = plan.runner.run(point.rows, self.batch.positions, lambda: None)
            self.output.index_copy_(0, plan.tail.index, rows)
        return self.output

    def fill(self, buffers: Buffers, index: torch.Tensor) -> None:
        """Make the embeddings of the kept rows anew: the graph's own are overwritten by now."""
        embeds, embedded = self.embed(self.batch.input_ids.index_select(0, index))
        buffers.embeds.copy_(embeds)
        if buffers.embedded is not None:
            buffers.embedded.copy_(embedded)


def embed_for_tail(state: ModelState, config: Any, ids: torch.Tensor) -> text_inputs.Inputs:
    """Input embeddings of these rows, and the per-layer ones of the tail's layers, if any."""
    embeds, embedded = text_inputs.embed_text(state.model, config, ids)
    if embedded is not None:
        embedded = embedded[:, state.cut_layer :]
    return embeds, embedded
