"""Prefills that have left SGLang's graph at an exit, compared with that graph run to its end."""

from typing import Any

import torch

from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.checking import layerwise, requests, rounding, tail_graphs
from sglang_gemma4_yoco.checking import start as start_check
from sglang_gemma4_yoco.checking.rounding import Difference
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.replaced import replaced

NOT_TAKEN = "the prefill of the check has not left at an exit"


def check_exits(runner: Any, state: ModelState) -> Difference:
    """Compare a synthetic prefill on a ``ModelRunner`` whose exits are open; it serves no request.

    It is a prompt, or an intermediate chunk where the tail is not captured: then prompts leave at
    no exit. Returned is what is farthest from stock.
    """
    found = list[Difference]()

    def compare(forward: Any, plan: Plan, output: torch.Tensor) -> torch.Tensor:
        found.extend(compare_exit(forward, plan, output))
        return output

    # SGLang replays it, however much padding its bucket needs.
    always = replaced(runner.prefill_cuda_graph_runner, can_run_graph=lambda _: True)
    with requests.make_synthetic_requests(runner, state) as all_of, always, state.calling(compare):
        most = None
        if state.captured is not None:
            most = state.captured.rows[-1]
        # The other way round: the tail's inputs may still be those of the check before this one.
        few = requests.SyntheticRequests(runner, state, all_of.requests[::-1][:most])
        outcome = few.run(finishes=state.captured is not None).outcome
        if outcome not in counters.AT_EXITS.values():
            found.append(rounding.make_defect(NOT_TAKEN))
        if all_of.others_changed():
            found.append(rounding.make_defect(start_check.OTHERS_SLOTS))
    return rounding.find_worst(found)


@torch.no_grad()
def compare_exit(forward: Any, plan: Plan, output: torch.Tensor) -> list[Difference]:
    """What differs from the same graph run to its end; this runs it to its end.

    Nothing may run between the forward and this. Compared are K and V of layer S-1 in the pool with
    those recomputed from the rows at the exit, and with those that the graph writes; and the tail
    with its layers run eagerly.

    Args:
        forward: a ``graph_exits.ExitForward``, after its fast path.
        output: [bucket, hidden], what the forward has returned; it is overwritten.
    """
    state, total = forward.state, plan.tail.kept.total
    rows, positions = forward.point.rows[:total], forward.batch.positions[:total]
    made = state.kind.compute_keys_and_values(state.tail_layers[0], rows, positions)
    cached = layerwise.get_donor_cache(state, plan)
    written = cached.read()
    found = layerwise.compare_keys_and_values(state.cut_layer, made, written)
    if plan.runner is not None:
        assert isinstance(plan.runner, Replay)
        index = plan.tail.index
        eager = plan.runner.eager(**forward.embed(plan.batch.input_ids, index))
        kept = output.index_select(0, index)
        found.append(rounding.compare(tail_graphs.TAIL, eager, kept, tail_graphs.ROUNDINGS))
    forward.stock()
    return found + layerwise.compare_keys_and_values(state.cut_layer, cached.read(), written)
