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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.core.eligibility import is_multimodal
from sglang_gemma4_yoco.core.forward import serve_forward
from sglang_gemma4_yoco.core.per_layer import Buffers
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.prefill_exits import text_inputs
from sglang_gemma4_yoco.replaced import replaced

#: Where SGLang's runner of captured prefills has its exits.
EXITS_ENTRY = "_yoco_exits"
# Where a graph of SGLang's has its exit point.
_POINT_ENTRY = "_yoco_exit_point"


@dataclass(frozen=True)
class ExitPoint:
    """Where a captured prefill can be left; an attribute of SGLang's graph, freed with it."""

    segments: int  # of the graph that run before it
    rows: torch.Tensor  # [bucket, hidden], the residual at the input of layer S-1
    keys: torch.Tensor  # [bucket, kv_heads, head_dim], that layer's
    values: torch.Tensor


@contextmanager
def note_exit_points(attention: Any) -> Iterator[None]:
    """Note the exit point of each graph that is captured in the ``with`` block.

    Args:
        attention: the ``RadixAttention`` of layer S-1.
    """
    attend = attention.forward

    def noting(q: Any, k: Any, v: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        graph = compat.captured_prefills.get_graph_being_captured()
        rows = compat.layers.get_written_residual(forward_batch)
        if graph is not None and rows is not None:
            heads = (-1, attention.tp_k_head_num, attention.head_dim)
            point = compat.captured_prefills.note_next_break(
                graph, rows, k.view(heads), v.view(heads)
            )
            setattr(graph, _POINT_ENTRY, ExitPoint(*point))
        return attend(q, k, v, forward_batch, *args, **kwargs)

    with replaced(attention, forward=noting):
        yield


def replay_to_exit(graph: Any) -> ExitPoint:
    """Run a captured prefill up to its exit point; returns that point."""
    point: ExitPoint = getattr(graph, _POINT_ENTRY)
    compat.captured_prefills.replay_first_segments(graph, point.segments)
    return point


class PrefillGraphExits:
    """The exits of one model's captured prefills, one for each bucket; all are open, or none.

    Only SGLang's runner of captured prefills holds it: graphs that SGLang drops are freed. As long
    as there are graphs, they serve no media, whether exits are open or closed.
    """

    def __init__(self, state: ModelState, runner: Any) -> None:
        """They are closed, and nothing is changed yet."""
        self.are_open = False
        self._state, self._config = state, runner.model.config
        self._prefills = runner.prefill_cuda_graph_runner
        self._graphs = compat.captured_prefills.list_graphs(self._prefills)
        self._batch: Any = None  # that SGLang serves by a captured prefill now

    def attach(self) -> None:
        """Have SGLang's runner of captured prefills call this, for as long as it exists."""
        prefills = self._prefills
        prefills.can_run_graph = partial(self._can_run_graph, prefills.can_run_graph)
        prefills.execute = partial(self._execute, prefills.execute)
        prefills.backend.replay = partial(self._replay, prefills.backend.replay)
        setattr(prefills, EXITS_ENTRY, self)
        for _, output in self._graphs.values():
            output.zero_()  # rows that are not written any more must at least be finite

    def are_complete(self) -> bool:
        """Return True if each graph has its exit point."""
        return all(hasattr(graph, _POINT_ENTRY) for graph, _ in self._graphs.values())

    def __str__(self) -> str:
        sizes = [bucket.size for bucket in self._graphs]
        after = self._state.cut_layer + 1
        return f"after segment {after} ({len(sizes)} buckets of up to {max(sizes)} tokens)"

    def _can_run_graph(self, stock: Callable[[Any], bool], forward_batch: Any) -> bool:
        return not is_multimodal(forward_batch) and bool(stock(forward_batch))

    def _execute(self, stock: Callable[..., Any], forward_batch: Any, **kwargs: Any) -> Any:
        self._batch, self._state.replayed_exits = forward_batch, self
        try:
            return stock(forward_batch, **kwargs)
        finally:
            self._batch = self._state.replayed_exits = None

    def _replay(self, stock: Callable[..., Any], bucket: Any, batch: Any, **kwargs: Any) -> Any:
        to_its_end = partial(stock, bucket, batch, **kwargs)
        forward = ExitForward(self._state, *self._graphs[bucket], batch, to_its_end, self._config)
        return serve_forward(self._state, self._batch, forward)


def get_exits(runner: Any) -> PrefillGraphExits | None:
    """Return the exits of what SGLang has captured; None if nothing was, or without the repair."""
    prefills = compat.server.get_captured_prefills(runner)
    exits: PrefillGraphExits | None = getattr(prefills, EXITS_ENTRY, None)
    return exits


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
    config: Any  # of the multimodal model
    point: ExitPoint | None = None  # what can be read until the next replay, after ``fast``
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

    def embed(self, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Input embeddings of these rows, and the per-layer ones of the tail's layers, if any."""
        embeds, embedded = text_inputs.embed_text(self.state.model, self.config, ids)
        if embedded is not None:
            embedded = embedded[:, self.state.cut_layer :]
        return embeds, embedded
