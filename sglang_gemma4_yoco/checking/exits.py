"""A prefill that has left SGLang's graph at an exit, compared with that graph run to its end."""

from typing import Any

import torch

from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.checking import layerwise, rounding, tail_graphs
from sglang_gemma4_yoco.checking.rounding import Difference
from sglang_gemma4_yoco.core.plan import Plan


@torch.no_grad()
def compare_exit(forward: Any, plan: Plan, output: torch.Tensor) -> list[Difference]:
    """What differs from the same graph run to its end; this runs it to its end.

    Nothing may run between the forward and this. Compared are K and V of layer S-1 with those
    recomputed from the rows at the exit; the tail with its layers run eagerly; K and V in the pool
    with those that the graph writes.

    Args:
        forward: an ``exits.ExitForward``, after its fast path.
        output: [bucket, hidden], what the forward has returned; it is overwritten.
    """
    state, point, total = forward.state, forward.point, plan.tail.kept.total
    made = state.kind.compute_keys_and_values(
        state.tail_layers[0], point.rows[:total], forward.batch.positions[:total]
    )
    at_exit = point.keys[:total], point.values[:total]
    found = layerwise.compare_keys_and_values(state.cut_layer, made, at_exit, "at the exit")
    if plan.runner is not None:
        assert isinstance(plan.runner, Replay)
        index = plan.tail.index
        embeds, embedded = forward.embed(plan.batch.input_ids.index_select(0, index))
        eager = plan.runner.eager(embeds=embeds, embedded=embedded)
        rows = output.index_select(0, index)
        found.append(rounding.compare(tail_graphs.TAIL, eager, rows, tail_graphs.ROUNDINGS))
    cached = layerwise.get_donor_cache(state, plan)
    written = cached.read()
    with layerwise.zero_slots(cached, written):
        forward.stock()
        stock = cached.read()
        return found + layerwise.compare_keys_and_values(state.cut_layer, stock, written)
