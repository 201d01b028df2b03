"""Exits from prefills that SGLang has captured in CUDA graphs; ``loading.start`` calls it.

Without this folder such prefills run to their end, as stock.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from sglang_gemma4_yoco import compat, log, settings
from sglang_gemma4_yoco.checking import exits as exit_check
from sglang_gemma4_yoco.checking import requests, rounding
from sglang_gemma4_yoco.checking import start as check
from sglang_gemma4_yoco.checking.rounding import Difference
from sglang_gemma4_yoco.checking.start import Checked
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.exits import capture, text_inputs
from sglang_gemma4_yoco.exits.capture import note_exit_points
from sglang_gemma4_yoco.exits.exits import EXITS_ENTRY, NO_POINT, PrefillGraphExits
from sglang_gemma4_yoco.replaced import replaced

NOT_TAKEN = "not every prefill of the check has left at an exit"
CANARY = "SGLang's KV canary writes its marks at the end of a captured prefill"
NOT_CAPTURED = "none: SGLang has captured no prefills"
OTHER_INPUTS = "captured prefills make other inputs of text than SGLang does eagerly"
#: In what SGLang replays captured prefills with, where they were captured from ids alone.
_OF_IDS = "_yoco_of_ids"


@contextmanager
def capture_graphs(runner: Any, state: ModelState) -> Iterator[str | None]:
    """The ``with`` block in which SGLang captures graphs of this model.

    Its capture of prefills is repaired where the operator has asked for them, but not on a server
    of which no batch may be cut: its setup was never tried with a repair. Yields why it repairs.
    """
    _close_hooks(runner)
    why = None
    with ExitStack() as stack:
        if state.unsupported is None and capture.find_closed_reason() is None:
            stack.enter_context(note_exit_points(state.tail_layers[0]))
            why = capture.find_repair(multimodal=runner.model_config.is_multimodal)
        if why is not None:
            stack.enter_context(capture.repair_capture(state.model, runner.model.config, why))
        yield why


def keep_to_text(runner: Any, state: ModelState, repaired: str | None) -> None:
    """Have prefills that SGLang has captured with the repair serve text alone, if they do it right.

    Prompts with media, which graphs of ids would answer as text, run eagerly. Where their inputs
    are not bit for bit those of SGLang's eager model, none of these graphs is used.

    Raises:
        Exception: it could not be found out, and other ranks wait for this one.
    """
    prefills = compat.server.get_captured_prefills(runner)
    if prefills is None or repaired is None:
        return
    if hasattr(prefills, _OF_IDS):  # SGLang has captured decode steps anew; these graphs stay
        return
    fits = prefills.can_run_graph

    def can_run_graph(batch: Any) -> bool:
        return not batch.contains_mm_inputs() and bool(fits(batch))

    prefills.can_run_graph = can_run_graph
    setattr(prefills, _OF_IDS, True)
    agree = not settings.current.self_check
    try:
        if not agree:
            make = partial(text_inputs.embed_text, state.model, runner.model.config)
            agree = text_inputs.inputs_agree(runner, state.model, make)
        if ranks.find_difference(f"inputs: {agree}"):
            agree = False
    except Exception as failure:
        if not compat.server.is_single_rank():
            raise
        log.log_failure("Gemma 4 fast prefill: captured prefills could not be checked", failure)
    if not agree:
        runner.prefill_cuda_graph_runner = None  # then SGLang runs prefills eagerly
        state.report["exits"] = f"closed: {OTHER_INPUTS}"
        log.log_error(f"Gemma 4 fast prefill: no captured prefill is used: {OTHER_INPUTS}")


def close_exits(runner: Any) -> None:
    """Leave SGLang's captured prefills as they were.

    Those that were captured from ids go: without this package they would serve media as well.
    """
    _close_hooks(runner)
    if hasattr(compat.server.get_captured_prefills(runner), _OF_IDS):
        runner.prefill_cuda_graph_runner = None


def open_exits(runner: Any, state: ModelState) -> None:
    """Open the exits of what SGLang has captured; with several ranks on all, or on none.

    Raises:
        Exception: it failed, and other ranks wait for this one.
    """
    prefills = compat.server.get_captured_prefills(runner)
    if prefills is None:
        if capture.is_named() and compat.server.runs_prefills_eagerly(runner):
            state.report["exits"] = NOT_CAPTURED
            log.log_once(
                "Gemma 4 fast prefill: SGLang has captured no prefills, although "
                "--cuda-graph-backend-prefill asks for it; they run eagerly, and are cut",
                logging.WARNING,
            )
        return
    _close_hooks(runner)
    reason, exits = capture.find_closed_reason(), None
    if reason is None and getattr(runner, "canary_manager", None) is not None:
        reason = CANARY
    if reason not in (capture.NO_BREAKS, capture.NEWER):
        config = None
        if hasattr(prefills, _OF_IDS):
            config = runner.model.config
        exits = PrefillGraphExits(state, prefills, config)
        if not all(exits.segments.values()):
            reason = reason or NO_POINT
    reason = ranks.find_difference(f"exits: {reason}, {exits and exits.segments}") or reason
    level = logging.WARNING
    if exits is not None:
        exits.closed = reason
        if reason is None:
            exits.closed = reason = _find_defect(runner, state)
            level = logging.ERROR
    if reason is None:
        state.report["exits"] = f"open {exits}"
        log.log_once(f"Gemma 4 fast prefill: exits from captured prefills are open {exits}")
        return
    state.report["exits"] = f"closed: {reason}"
    log.log_once(
        f"Gemma 4 fast prefill: exits from captured prefills are closed: {reason}; "
        "--cuda-graph-backend-prefill=disabled shortens prefills",
        level,
    )


def _find_defect(runner: Any, state: ModelState) -> str | None:
    """Check the exits, which are open; returns why they must be closed, or None.

    Raises:
        Exception: a prefill of the check failed, and other ranks wait for this one.
    """
    checked = Checked(unchecked=check.find_reason())
    try:
        if checked.unchecked is None:
            checked = Checked(rounding.find_worst(_run_to_exits(runner, state)))
    except requests.NotComparableError as why:
        checked = Checked(unchecked=str(why))
    except Exception as failure:
        if not compat.server.is_single_rank():
            raise
        log.log_failure("Gemma 4 fast prefill: exits could not be checked", failure)
        checked = Checked(rounding.make_defect(NOT_TAKEN))
    state.report["exits_check"] = checked.to_json()
    # A rank that leaves a graph would wait for one that runs it to its end.
    differ = ranks.find_difference(f"exits agree with stock: {checked.agrees}")
    if checked.agrees:
        return differ
    if checked.worst is None:
        return f"they are not checked: {checked.unchecked}"
    return f"the check found {checked.worst}"


def _run_to_exits(runner: Any, state: ModelState) -> list[Difference]:
    """Run synthetic prompts and intermediate chunks up to the exits; compare with whole graphs.

    A prompt that finishes leaves at an exit only where the tail is captured.
    """
    found, finished = list[Difference](), list[bool]()

    def compare(forward: Any, plan: Plan, output: torch.Tensor) -> torch.Tensor:
        found.extend(exit_check.compare_exit(forward, plan, output))
        finished.append(plan.runner is not None)
        return output

    # SGLang replays each, however much padding its bucket needs.
    always = replaced(runner.prefill_cuda_graph_runner, can_run_graph=lambda _: True)
    comparing = replaced(state, after_cut=compare)
    with requests.make_synthetic_requests(runner, state) as chunks, always, comparing:
        expected = [False]
        if state.captured is not None:
            few = chunks.requests[: state.captured.rows[-1]]
            requests.SyntheticRequests(runner, state, few).run()
            expected = [True, False]
        chunks.run(finishes=False)
        if finished != expected:
            found.append(rounding.make_defect(NOT_TAKEN))
        if chunks.others_changed():
            found.append(rounding.make_defect(check.OTHERS_SLOTS))
    return found


def _close_hooks(runner: Any) -> None:
    exits = getattr(compat.server.get_captured_prefills(runner), EXITS_ENTRY, None)
    if exits is not None:
        exits.hooks.close()
