"""Prefills that have left SGLang's graph at an exit, compared with that graph run to its end."""

from typing import Any

import torch

from sglang_gemma4_yoco import compat, counters, log
from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.checking import layerwise, requests, rounding, tail_graphs
from sglang_gemma4_yoco.checking import start as start_check
from sglang_gemma4_yoco.checking.rounding import Difference
from sglang_gemma4_yoco.checking.start import Checked
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.replaced import replaced

NOT_TAKEN = "not every prefill of the check has left at an exit"


def check_exits(runner: Any, state: ModelState) -> Checked:
    """Compare synthetic prefills on a ``ModelRunner`` whose exits are open; it serves no request.

    Raises:
        Exception: a prefill failed, and other ranks wait for this one.
    """
    reason = start_check.find_reason()
    if reason is not None:
        return Checked(unchecked=reason)
    try:
        return Checked(rounding.find_worst(_run_to_exits(runner, state)))
    except requests.NotComparableError as why:
        return Checked(unchecked=str(why))
    except Exception as failure:
        if not compat.server.is_single_rank():
            raise
        log.log_failure("Gemma 4 fast prefill: exits could not be checked", failure)
        return Checked(rounding.make_defect(NOT_TAKEN))


def _run_to_exits(runner: Any, state: ModelState) -> list[Difference]:
    """Run prompts and intermediate chunks up to the exits, and compare each.

    A prompt that finishes leaves at an exit only where the tail is captured, a chunk only where
    SGLang marks it.
    """
    found, outcomes, expected = list[Difference](), list[str | None](), list[str]()

    def compare(forward: Any, plan: Plan, output: torch.Tensor) -> torch.Tensor:
        found.extend(compare_exit(forward, plan, output))
        return output

    # SGLang replays each, however much padding its bucket needs.
    always = replaced(runner.prefill_cuda_graph_runner, can_run_graph=lambda _: True)
    with requests.make_synthetic_requests(runner, state) as chunks, always, state.calling(compare):
        if compat.batch.MARKS_CHUNKS:
            outcomes.append(chunks.run(finishes=False).outcome)
            expected.append(counters.EXIT_SKIPPED)
        if state.captured is not None:
            few = chunks.requests[: state.captured.rows[-1]]
            outcomes.append(requests.SyntheticRequests(runner, state, few).run().outcome)
            expected.append(counters.EXIT_CAPTURED)
        if not outcomes or outcomes != expected:
            found.append(rounding.make_defect(NOT_TAKEN))
        if chunks.others_changed():
            found.append(rounding.make_defect(start_check.OTHERS_SLOTS))
    return found


@torch.no_grad()
def compare_exit(forward: Any, plan: Plan, output: torch.Tensor) -> list[Difference]:
    """What differs from the same graph run to its end; this runs it to its end.

    Nothing may run between the forward and this. Compared are K and V of layer S-1 with those
    recomputed from the rows at the exit; the tail with its layers run eagerly; K and V in the pool
    with those that the graph writes.

    Args:
        forward: a ``graph_exits.ExitForward``, after its fast path.
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
