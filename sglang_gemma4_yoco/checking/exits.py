"""A prefill that has left SGLang's graph at an exit, compared with that graph run to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.checking import layerwise, rounding, tail_graphs
from sglang_gemma4_yoco.checking.rounding import Comparison, Difference
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState


class LeftPrefill(Protocol):
    """A forward that has left SGLang's graph: ``exits.ExitForward``, after its fast path."""

    state: ModelState
    batch: Any
    point: Any

    @property
    def stock(self) -> Callable[[], torch.Tensor]:
        """Runs the graph to its end; returns the output, [bucket, hidden]."""

    @property
    def embed(self) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]:
        """Of ids [n] what the tail is given: embeddings, and per-layer ones."""


@torch.no_grad()
def compare_exit(forward: LeftPrefill, plan: Plan, output: torch.Tensor) -> list[Difference]:
    """What differs from the same graph run to its end; this runs it to its end.

    Nothing may run between the forward and this. Compared are K and V of layer S-1 with those
    recomputed from the rows at the exit; the tail with its layers run eagerly; K and V in the pool
    with those that the graph writes.

    Args:
        output: [bucket, hidden], what the forward has returned; it is overwritten.
    """
    state = forward.state
    compared = _compare_at_exit(forward, plan)
    if plan.runner is not None:
        assert isinstance(plan.runner, Replay)
        index = plan.tail.index
        embeds, embedded = forward.embed(plan.batch.input_ids.index_select(0, index))
        eager = plan.runner.eager(embeds=embeds, embedded=embedded)
        rows = output.index_select(0, index)
        compared.append(Comparison.of(tail_graphs.TAIL, eager, rows, tail_graphs.ROUNDINGS))
    caches, slots = layerwise.get_donor_cache(state, plan)
    written = layerwise.read_slots(caches, slots)
    with layerwise.zero_slots(caches, slots, written):
        forward.stock()
        stock = layerwise.read_slots(caches, slots)
        compared += layerwise.compare_keys_and_values(state.cut_layer, stock, written)
        return rounding.read_differences(compared)


def _compare_at_exit(forward: LeftPrefill, plan: Plan) -> list[Comparison]:
    point, total, state = forward.point, plan.tail.kept.total, forward.state
    made = state.kind.compute_keys_and_values(
        state.tail_layers[0], point.rows[:total], forward.batch.positions[:total]
    )
    found = point.keys[:total], point.values[:total]
    return layerwise.compare_keys_and_values(state.cut_layer, made, found, "at the exit")
