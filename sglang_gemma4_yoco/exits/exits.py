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

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sglang_gemma4_yoco import compat, counters, settings
from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.checking import layerwise, rounding, tail_graphs
from sglang_gemma4_yoco.checking.rounding import Comparison, Difference
from sglang_gemma4_yoco.compat import captured_prefills
from sglang_gemma4_yoco.core import eligibility, plan
from sglang_gemma4_yoco.core.forward import serve_forward
from sglang_gemma4_yoco.core.per_layer import Buffers
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import STATE_ENTRY, ModelState
from sglang_gemma4_yoco.exits import capture, text_inputs
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.replaced import replaced

NO_POINT = "some captured prefill does not run the layer inside which batches are cut"
# Why a batch runs SGLang's graph to its end.
CLOSED = "SGLang runs its captured prefill to the end"
TAIL_NOT_CAPTURED = "its prefill is captured, and its tail is not"
MEDIA = "its prefill is captured, and it is multimodal"

# Rows to skip on a GPU, where an exit saves device time alone. By a model: up to 90 rows a layer
# takes as long as reading its weights, and planning the tail takes as long as 45 rows of E2B.
_FEWEST_ON_GPU = 128


def replay_to_exit(graph: Any) -> capture.ExitPoint:
    """Run a captured prefill up to its exit point; returns that point."""
    point: capture.ExitPoint = getattr(graph, STATE_ENTRY)
    captured_prefills.replay_first_segments(graph, point.segments)
    return point


class PrefillGraphExits:
    """The exits of one model's captured prefills, one for each bucket; all are open, or none.

    Only SGLang's runner of captured prefills holds it: graphs that SGLang drops are freed. With
    ``hooks`` closed, that runner is as it was.

    Attributes:
        embed: what the tail is given for ids, as the graphs were captured: see ``inputs.embed``.
        closed: why no batch may take them; None if they are open.
        segments: how many run before the exit, by bucket; 0 for a graph that has no exit.

    Raises:
        AttributeError: this SGLang captures prefills differently; nothing is changed.
    """

    def __init__(self, state: ModelState, prefills: Any, config: Any) -> None:
        self.embed = partial(embed_for_tail, state, config)
        self.closed: str | None = "they are not open yet"
        self._graphs = graphs = captured_prefills.list_graphs(prefills)
        self.segments = {
            getattr(bucket, "size", bucket): getattr(
                getattr(graph, STATE_ENTRY, None), "segments", 0
            )
            for bucket, (graph, _) in graphs.items()
        }
        self._state = state
        self._batch: Any = None  # that SGLang serves by a captured prefill now
        for _, output in graphs.values():
            output.zero_()  # rows that are not written any more must at least be finite
        execute = partial(self._execute, prefills.execute)
        replay = partial(self._replay, prefills.backend.replay)
        self.hooks = ExitStack()
        self.hooks.enter_context(replaced(prefills, execute=execute, **{STATE_ENTRY: self}))
        self.hooks.enter_context(replaced(prefills.backend, replay=replay))

    def __str__(self) -> str:
        after, longest = max(self.segments.values()), max(self.segments)
        return f"after segment {after} ({len(self.segments)} buckets of up to {longest} tokens)"

    def _execute(self, stock: Callable[..., Any], forward_batch: Any, **kwargs: Any) -> Any:
        planner = partial(plan.plan_batch, make=self._make_plan)
        # SGLang replays now what it has captured; nothing is captured anew.
        planned = replaced(self._state, planner=planner, is_capturing=lambda: False)
        with planned, replaced(self, _batch=forward_batch):
            return stock(forward_batch, **kwargs)

    def _replay(self, stock: Callable[..., Any], bucket: Any, batch: Any, **kwargs: Any) -> Any:
        to_its_end = partial(stock, bucket, batch, **kwargs)
        forward = ExitForward(self._state, *self._graphs[bucket], batch, to_its_end, self.embed)
        return serve_forward(self._state, self._batch, forward)

    def _make_plan(self, state: ModelState, forward_batch: Any) -> Plan | str:
        found = eligibility.check_eligibility(state, forward_batch)
        if isinstance(found, str):
            return found
        if self.closed is not None:
            return CLOSED
        if eligibility.is_multimodal(forward_batch):  # the tail's inputs are made anew, from ids
            return MEDIA
        if not found.is_intermediate_chunk:
            if found.bucket is None:
                return TAIL_NOT_CAPTURED
            skipped = found.kept.total - found.kept.count
            ruled = state.on_gpu and settings.current.min_skipped_rows is None
            if ruled and skipped < _FEWEST_ON_GPU:
                return eligibility.TOO_LITTLE
        outcome = counters.EXIT_CAPTURED
        if found.is_intermediate_chunk:
            outcome = counters.EXIT_SKIPPED
        return replace(plan.plan_eligible(state, forward_batch, found), outcome=outcome)


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
    embed: Callable[[torch.Tensor], text_inputs.Inputs]  # of the tail's layers
    point: capture.ExitPoint | None = None  # what can be read until the next replay, after ``fast``

    def fast(self, plan: Plan) -> torch.Tensor:
        """Run it up to the exit, write K and V, and replay the tail: [bucket, hidden]."""
        self.point = point = replay_to_exit(self.graph)
        # Rows after those of the live batch are padding, of which nothing may be written.
        keys, values = (part[: plan.tail.kept.total] for part in (point.keys, point.values))
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
        if buffers.embedded is not None and embedded is not None:
            buffers.embedded.copy_(embedded)

    @torch.no_grad()
    def findings(self, plan: Plan, output: torch.Tensor) -> list[Difference]:
        """What differs from the same graph run to its end; this runs it to its end.

        Nothing may run between the forward and this. ``output`` [bucket, hidden] is overwritten.
        Compared are K and V of layer S-1 with those recomputed from the rows at the exit; the tail
        with its layers run eagerly; K and V in the pool with those that the graph writes.
        """
        state, compared = self.state, self._at_the_exit(plan)
        if plan.runner is not None:
            assert isinstance(plan.runner, Replay)
            index = plan.tail.index
            embeds, embedded = self.embed(plan.batch.input_ids.index_select(0, index))
            eager = plan.runner.eager(embeds=embeds, embedded=embedded)
            rows = output.index_select(0, index)
            compared.append(Comparison.of(tail_graphs.TAIL, eager, rows, tail_graphs.ROUNDINGS))
        caches, slots = layerwise.get_donor_cache(state, plan)
        written = [cache[slots] for cache in caches]
        with layerwise.zero_slots(caches, slots, written):
            self.stock()
            stock = [cache[slots] for cache in caches]
            compared += layerwise.compare_keys_and_values(state.cut_layer, stock, written)
            return rounding.read_differences(compared)

    def _at_the_exit(self, plan: Plan) -> list[Comparison]:
        point, rows, layer = self.point, plan.tail.kept.total, self.state.tail_layers[0]
        assert point is not None
        normed = layer.input_layernorm(point.rows[:rows])
        made = gemma4.compute_keys_and_values(layer.self_attn, normed, self.batch.positions[:rows])
        found = point.keys[:rows], point.values[:rows]
        return layerwise.compare_keys_and_values(self.state.cut_layer, made, found, "at the exit")


def embed_for_tail(state: ModelState, config: Any, ids: torch.Tensor) -> text_inputs.Inputs:
    """Input embeddings of these rows, and the per-layer ones of the tail's layers, if any."""
    embeds, embedded = text_inputs.embed_text(state.model, config, ids)
    if embedded is not None:
        embedded = embedded[:, state.cut_layer :]
    return embeds, embedded
