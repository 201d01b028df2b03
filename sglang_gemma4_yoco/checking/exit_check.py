"""Comparison of prefills that leave SGLang's graph at an exit with a full replay of the graph."""

from dataclasses import replace
from typing import Any

import torch

from sglang_gemma4_yoco import counters, settings
from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.checking import (
    layerwise,
    rounding,
    self_check,
    synthetic_requests,
    tail_graphs,
)
from sglang_gemma4_yoco.checking.rounding import Difference
from sglang_gemma4_yoco.checking.self_check import CheckResult
from sglang_gemma4_yoco.core.interfaces import Plan
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.patched import patched

NOT_TAKEN = "the check's prefill did not leave at an exit"


def check_exits(runner: Any, state: ModelState) -> CheckResult:
    """Compare a synthetic prefill that leaves at an exit with its full replay.

    It finishes its prompts; without a captured tail it is an intermediate chunk, since only these
    leave at an exit then. The ``ModelRunner`` must be idle.
    """
    if not settings.current.self_check:
        return self_check.NOT_WANTED
    found = list[Difference]()

    def compare(forward: Any, plan: Plan, output: torch.Tensor) -> torch.Tensor:
        found.extend(compare_exit(forward, plan, output))
        return output

    leaving = replace(state, exits_are_open=True, after_cut=compare)
    # Replay it regardless of the padding in its bucket.
    always = patched(runner.prefill_cuda_graph_runner, can_run_graph=lambda _: True)
    # Reversed: the tail's inputs may still be those of the previous check.
    lengths = max(synthetic_requests.choose_batches(runner, state), key=len)[::-1]
    if state.captured is not None:
        lengths = lengths[: state.captured.rows[-1]]
    with synthetic_requests.make_synthetic_requests(runner, state, lengths) as synthetic, always:
        outcome = synthetic.run(leaving, finishes=state.captured is not None).outcome
        if outcome not in counters.AT_EXITS.values():
            found.append(rounding.make_defect(NOT_TAKEN))
        if synthetic.others_changed():
            found.append(rounding.make_defect(self_check.OTHERS_SLOTS))
    return CheckResult(rounding.find_worst(found))


@torch.no_grad()
def compare_exit(forward: Any, plan: Plan, output: torch.Tensor) -> list[Difference]:
    """Replay the graph in full, and return the differences from it.

    Nothing may run between the forward and this. K and V of layer S-1 in the pool are compared with
    those recomputed from the rows at the exit and with those that the graph writes, and the
    captured tail with an eager run of its layers.

    Args:
        forward: a ``graph_exits.ExitForward``, after its fast path.
        output: [bucket, hidden], the forward's output; overwritten.
    """
    state, total = forward.state, plan.tail.kept.total
    rows, positions = forward.point.rows[:total], forward.batch.positions[:total]
    made = state.adapter.compute_keys_and_values(state.tail_layers[0], rows, positions)
    cached = layerwise.get_donor_cache(state, plan)
    written = cached.read()
    found = layerwise.compare_keys_and_values(state.cut_layer, made, written)
    if plan.runner is not None:
        assert isinstance(plan.runner, Replay)
        index = plan.tail.index
        kept = output.index_select(0, index)
        embeds, embedded = forward.embed(plan.batch.input_ids.index_select(0, index))
        found.append(tail_graphs.compare_eager(plan.runner, kept, embeds=embeds, embedded=embedded))
    forward.stock()
    return found + layerwise.compare_keys_and_values(state.cut_layer, cached.read(), written)
