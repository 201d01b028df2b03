"""Comparison of prefills that leave SGLang's graph at an exit with a full replay of the graph."""

from typing import Any

import torch

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.checking import layerwise, tail_graphs
from sglang_gemma4_yoco.checking.rounding import Difference
from sglang_gemma4_yoco.compat.text_model import ModelOutput
from sglang_gemma4_yoco.core.plan import Plan


@torch.no_grad()
def compare_exit(forward: Any, plan: Plan, output: ModelOutput) -> list[Difference]:
    """Replay the graph in full, and return the differences from it.

    Nothing may run between the forward and this. K and V of layer S-1 in the pool are compared with
    those recomputed from the rows at the exit and with those that the graph writes, and the
    captured tail with an eager run of its layers.

    Args:
        forward: a ``graph_exits.ExitForward``, after its fast path.
        output: [bucket, hidden], the forward's output; overwritten.
    """
    state = forward.state
    total = plan.kept_batch.kept.total
    rows = forward.point.rows[:total]
    positions = forward.static_batch.positions[:total]
    made = state.adapter.compute_keys_and_values(state.tail_layers[0], rows, positions)
    cached = layerwise.get_donor_cache(state, plan)
    written = cached.read()
    found = layerwise.compare_keys_and_values(state.cut_layer, made, written)
    if isinstance(plan.runner, Replay):  # otherwise there is no tail: see ``ExitForward.fast``
        index = plan.kept_batch.index
        kept = compat.layers.get_rows(output).index_select(0, index)
        embeds, embedded = forward.embed(plan.kept_batch.batch.input_ids.index_select(0, index))
        found.append(tail_graphs.compare_eager(plan.runner, kept, embeds=embeds, embedded=embedded))
    cached.write((0, 0))  # so that the exit's K and V cannot mask a missing write
    try:
        forward.stock()
    except BaseException:
        cached.write(written)  # later forwards read these slots
        raise
    return found + layerwise.compare_keys_and_values(state.cut_layer, cached.read(), written)
