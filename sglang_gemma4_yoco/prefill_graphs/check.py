"""A captured prefill that was left at its exit, beside the same graph run to its end.

Up to the exit both are the very same graph of the same bucket: there is no rounding between them.
So each thing that can go wrong at the exit is compared. K and V of layer S-1 are made once more of
the rows at the exit and of their positions, and must be those that lie there. The tail must give
what its layers give eagerly on the same rows. K and V in the pool must be those that the graph
writes when it runs to its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_gemma4_yoco import log, seams
from sglang_gemma4_yoco.captured import proof
from sglang_gemma4_yoco.captured.graphs import Replay, TailGraphs
from sglang_gemma4_yoco.checking import layerwise, requests, rounding, start
from sglang_gemma4_yoco.checking.rounding import Finding
from sglang_gemma4_yoco.checking.start import Checked
from sglang_gemma4_yoco.core import donor
from sglang_gemma4_yoco.core.cut import Plan
from sglang_gemma4_yoco.core.replaced import replaced
from sglang_gemma4_yoco.core.state import ModelState

if TYPE_CHECKING:
    from sglang_gemma4_yoco.prefill_graphs.exits import ExitForward

NOT_TAKEN = "not every prefill of the check has left at an exit"


def at_start(runner: Any, state: ModelState, longest: int) -> Checked:
    """Have synthetic prompts that finish, and chunks that do not, leave at exits, which are open.

    Args:
        runner: SGLang's ``ModelRunner``, which serves nobody at the moment.
        longest: tokens of the largest bucket.

    Raises:
        Exception: one of them failed, and other ranks wait for this one.
    """
    unchecked = start.why_not(runner)
    if unchecked is not None:
        return Checked(unchecked=unchecked)
    found, finished, tail = list[Finding](), list[bool](), state.captured

    def compared(forward: ExitForward, plan: Plan, output: torch.Tensor) -> torch.Tensor:
        found.extend(forward.findings(plan, output))
        finished.append(plan.runner is not None)
        return output

    # SGLang replays each, however much padding its bucket needs.
    always = replaced(runner.prefill_cuda_graph_runner, can_run_graph=lambda _: True)
    comparing = replaced(state, after_cut=compared)
    try:
        with requests.synthetic_requests(runner, state) as chunks, always, comparing:
            if sum(chunks.lens) > longest:
                return Checked(rounding.defect(f"{NOT_TAKEN}: they have up to {longest} tokens"))
            if isinstance(tail, TailGraphs):
                few = chunks.requests[: tail.rows[-1]]
                requests.SyntheticRequests(runner, state, few).run()
            chunks.run(finishes=False)
            if finished != [True, False][tail is None :]:
                found.append(rounding.defect(NOT_TAKEN))
            if chunks.others_changed():
                found.append(rounding.defect(start.OTHERS_SLOTS))
    except requests.NotComparableError as why:
        return Checked(unchecked=str(why))
    except Exception as failure:
        if not seams.is_single_rank():
            raise
        log.failure("Gemma 4 fast prefill: exits could not be checked", failure)
        found.append(rounding.defect(NOT_TAKEN))
    return Checked(rounding.worst(found))


@torch.no_grad()
def findings(forward: ExitForward, plan: Plan, output: torch.Tensor) -> list[Finding]:
    """What differs; the graph has run to its end when this returns.

    Args:
        forward: has left at the exit, and nothing has run since.
        output: [bucket, hidden], what it has given; overwritten.
    """
    state = forward.state
    found = _at_the_exit(forward, plan)
    if plan.runner is not None:
        found.append(_tail(forward, plan, output))
    caches, slots = layerwise.donor_cache(state, plan)
    written = [cache[slots] for cache in caches]
    for cache in caches:
        cache[slots] = 0  # else a graph that wrote none would be compared with the exit's
    forward.stock()
    stock = [cache[slots] for cache in caches]
    compared = layerwise.compare_keys_and_values(state.cut, stock, written)
    return found + rounding.findings(compared)


def _at_the_exit(forward: ExitForward, plan: Plan) -> list[Finding]:
    point, rows, layer = forward.point, plan.tail.kept.total, forward.state.tail_layers[0]
    assert point is not None
    normed, lying = (
        layer.input_layernorm(point.rows[:rows]),
        (point.keys[:rows], point.values[:rows]),
    )
    made = donor.keys_and_values(layer.self_attn, normed, forward.batch.positions[:rows])
    compared = layerwise.compare_keys_and_values(forward.state.cut, made, lying, "at the exit")
    return rounding.findings(compared)


def _tail(forward: ExitForward, plan: Plan, output: torch.Tensor) -> Finding:
    """The tail's rows, beside its layers on the same rows and the K and V just written."""
    state, index, tail = forward.state, plan.tail.index, forward.state.captured
    assert isinstance(plan.runner, Replay)
    assert isinstance(tail, TailGraphs)
    bucket, inputs = tail.bucket_for(plan.tail.kept), plan.runner.inputs.copied()
    assert bucket is not None
    if inputs.embeds is not None:
        ids = plan.batch.input_ids.index_select(0, index)
        inputs.embeds.copy_(state.model.embed_tokens(ids))
        if inputs.embedded is not None:
            inputs.embedded.copy_(state.model.get_per_layer_inputs(ids)[:, state.cut :])
    eager, _ = tail.difference(bucket, inputs)
    return proof.difference(eager, output.index_select(0, index))
