"""The check of exits at start: synthetic prefills leave at them, each compared with its graph."""

from __future__ import annotations

from typing import Any

import torch

from sglang_gemma4_yoco import log, seams
from sglang_gemma4_yoco.captured.graphs import TailGraphs
from sglang_gemma4_yoco.checking import requests, rounding, start
from sglang_gemma4_yoco.checking.rounding import Finding
from sglang_gemma4_yoco.checking.start import Checked
from sglang_gemma4_yoco.core.cut import Plan
from sglang_gemma4_yoco.core.replaced import replaced
from sglang_gemma4_yoco.core.state import ModelState

NOT_TAKEN = "not every prefill of the check has left at an exit"


def at_start(runner: Any, state: ModelState, longest: int) -> Checked:
    """Have synthetic prompts that finish, and chunks that do not, leave at exits, which are open.

    Args:
        runner: SGLang's ``ModelRunner``, which serves no requests at the moment.
        longest: tokens of the largest bucket.

    Raises:
        Exception: one of them failed, and other ranks wait for this one.
    """
    unchecked = start.why_not(runner)
    if unchecked is not None:
        return Checked(unchecked=unchecked)
    found, finished, tail = list[Finding](), list[bool](), state.captured

    def compared(forward: Any, plan: Plan, output: torch.Tensor) -> torch.Tensor:
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
