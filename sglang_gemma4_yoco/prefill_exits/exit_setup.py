"""Setup of a runner's captured prefills: the fix of their capture, and the opening of exits.

Captured prefills embed text from its ids alone and would ignore images, so multimodal prompts run
eagerly while such graphs exist (``graph_exits``).
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from sglang_gemma4_yoco import compat, counters, log, settings
from sglang_gemma4_yoco.checking import exit_check, rounding, self_check, synthetic_requests
from sglang_gemma4_yoco.checking.rounding import Difference
from sglang_gemma4_yoco.checking.self_check import CheckResult
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.compat.text_model import ModelOutput, TextModel
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.core.interfaces import Forward
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState, get_state
from sglang_gemma4_yoco.patched import patched
from sglang_gemma4_yoco.prefill_exits.graph_exits import Exits, add_exits

#: The attribute of an SGLang prefill graph runner with its ``Exits``.
EXITS_ENTRY = "_yoco_exits"
NOT_TAKEN = "the check's prefill did not leave at an exit"


def is_repaired() -> bool:
    """Return True if SGLang's capture of prefills is fixed with these flags and settings.

    Whatever has turned these graphs on: SGLang cannot start with them. A newer one may need no fix.
    """
    return (
        settings.current.prefill_graphs is not False
        and compat.release.has_exits()
        and compat.server.get_cuda_graph_backend("prefill") == compat.captured_prefills.BREAKABLE
    )


def _is_repaired_for(state: ModelState) -> bool:
    """Return True if the capture is fixed for this model.

    Not on a server of which no batch may be cut: that setup was never tested.
    """
    return state.adapter.LEAVES_CAPTURED_PREFILLS and not state.off_because and is_repaired()


def repair_capture(runner: ModelRunner, state: ModelState) -> AbstractContextManager[None]:
    """Fix SGLang's capture of this model's prefills in the ``with`` block, if that is wanted.

    Unnecessary once SGLang has both changes of ``compat.captured_prefills``; the exits still are.
    """
    if not _is_repaired_for(state):
        return nullcontext()
    log.log_once(
        "YOCO fast prefill: SGLang's capture of prefill CUDA graphs is fixed for this model "
        f"({compat.captured_prefills.SHARED_LAYER_IDS}); {settings.name_of('prefill_graphs')}=0 "
        "disables the fix"
    )
    return compat.captured_prefills.capture_with_exits(
        state.model, runner.model.config, state.tail_layers[0].self_attn.attn
    )


def add_closed_exits(runner: ModelRunner, state: ModelState) -> None:
    """Add exits to the prefills that SGLang has captured in ``repair_capture``; they are closed."""
    prefill_runner = compat.server.get_captured_prefills(runner)
    # If SGLang captured decode steps only, the prefills are those of an earlier capture.
    if not _is_repaired_for(state) or prefill_runner is None or find_exits(runner) is not None:
        return
    try:
        exits = add_exits(state.model, runner.model.config, prefill_runner)
        setattr(prefill_runner, EXITS_ENTRY, exits)
    except Exception:
        # Without the exits nothing keeps multimodal prompts out of these graphs.
        runner.prefill_cuda_graph_runner = None
        raise
    # Without the state, no batch can be served with these graphs.
    state.on_close(partial(setattr, runner, "prefill_cuda_graph_runner", None))


def find_exits(runner: ModelRunner) -> Exits | None:
    """Return the exits of this runner's captured prefills, or None."""
    prefill_runner = compat.server.get_captured_prefills(runner)
    return getattr(prefill_runner, EXITS_ENTRY, None)


def find_uncut_reason(runner: ModelRunner, model: TextModel) -> object | None:
    """Return why captured prefills are not cut; None if they are, or if none are captured yet."""
    state = get_state(model)
    exits = find_exits(runner)
    if compat.server.get_captured_prefills(runner) is None or (exits and exits.are_open):
        return state.off_because
    return state.off_because or "their exits are closed"


def open_exits(runner: ModelRunner, state: ModelState) -> None:
    """Open the exits of captured prefills if they agree with stock, before the server serves."""
    exits = find_exits(runner)
    if exits is None:
        return
    exits.are_open = True  # for the check
    try:
        checked = check_exits(runner, state)
    finally:
        exits.are_open = False
    state.report.exits_check = checked.to_json()
    # A rank that leaves a graph would wait for one that replays it in full.
    differ = ranks.find_difference(f"exits agree with stock: {checked.agrees}")
    exits.are_open = checked.agrees and differ is None
    if exits.are_open:
        level = logging.INFO
        fact = f"open after {state.cut_layer + 1} segments"
        if state.captured is None:
            fact += "; for intermediate chunks only, since the tail runs eagerly"
    else:
        reason = differ or f"the check found {checked.worst}"
        remedy = "with --cuda-graph-backend-prefill=disabled prefills are cut"
        if compat.resolution.turns_prefills_on():
            remedy = "these graphs are dropped, and prefills are cut without them"
        fact = f"closed: {reason}; {remedy}"
        level = logging.ERROR
    state.report.exits = fact
    log.log_once(f"YOCO fast prefill: exits from captured prefills are {fact}", level)


def check_exits(runner: ModelRunner, state: ModelState) -> CheckResult:
    """Compare a synthetic prefill that leaves at an exit, which must be open, with its full replay.

    It finishes its prompts; without a captured tail it is an intermediate chunk, since only these
    leave at an exit then. The ``ModelRunner`` must be idle.
    """
    if not settings.current.self_check:
        return self_check.NOT_WANTED
    found = list[Difference]()

    def compare(forward: Forward, plan: Plan, output: ModelOutput) -> ModelOutput:
        found.extend(exit_check.compare_exit(forward, plan, output))
        return output

    leaving = replace(state, after_cut=compare)
    # Replay it regardless of the padding in its bucket. Unnecessary once ``ModelRunner.forward``
    # can be told whether to replay a graph.
    always = patched(runner.prefill_cuda_graph_runner, can_run_graph=lambda _: True)
    # Reversed: the tail's inputs may still be those of the previous check.
    lengths = max(synthetic_requests.choose_batches(runner, state), key=len)[::-1]
    if state.captured is not None:
        lengths = lengths[: state.captured.sizes[-1]]
    synthetic_span = synthetic_requests.make_synthetic_requests(runner, state, lengths)
    with synthetic_span as synthetic, always:
        outcome = synthetic.run(leaving, finishes=state.captured is not None).outcome
        if outcome not in counters.AT_EXIT.values():
            found.append(rounding.make_defect(NOT_TAKEN))
        if synthetic.others_changed():
            found.append(rounding.make_defect(self_check.OTHERS_SLOTS))
    return CheckResult(rounding.find_worst(found))
