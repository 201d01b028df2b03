"""Setup of a runner's captured prefills: the fix of their capture, and the opening of exits.

Captured prefills embed text from its ids alone and would ignore images, so multimodal prompts run
eagerly while such graphs exist (``graph_exits``).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from sglang_gemma4_yoco import compat, log, settings
from sglang_gemma4_yoco.checking import exit_check
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.prefill_exits.graph_exits import add_exits

#: The attribute of an SGLang prefill graph runner whose graphs have exits.
EXITS_ENTRY = "_yoco_exits"


def is_repaired() -> bool:
    """Return True if SGLang's capture of prefills is fixed with these flags and settings.

    The operator must have requested these graphs. A newer SGLang may not need the fix.
    """
    is_tested = not compat.release.is_newer_than_tested()
    return (
        settings.current.prefill_graphs and is_tested and compat.captured_prefills.are_requested()
    )


@contextmanager
def repair_capture(runner: Any, state: ModelState) -> Iterator[None]:
    """Fix SGLang's capture of this model's prefills in the block; their exits start closed.

    No-op on a server of which no batch may be cut: that setup was never tested.
    """
    if state.unsupported is not None or not is_repaired():
        yield
        return
    log.log_once(
        "Gemma 4 fast prefill: SGLang's capture of prefill CUDA graphs is fixed for this model "
        f"({compat.captured_prefills.SHARED_LAYER_IDS}), because --cuda-graph-backend-prefill "
        f"requests them; {settings.name_of('prefill_graphs')}=0 disables the fix"
    )
    config, attention = runner.model.config, state.tail_layers[0].self_attn.attn
    with compat.captured_prefills.capture_with_exits(state.model, config, attention):
        yield
    try:
        prefills = compat.server.get_captured_prefills(runner)
        # If SGLang captured decode steps only, the prefills are those of an earlier capture.
        if prefills is not None and not hasattr(prefills, EXITS_ENTRY):
            add_exits(state.model, config, prefills)
            setattr(prefills, EXITS_ENTRY, True)
            state.exits_are_open = False
            # Without the state, no batch can be served with these graphs.
            state.on_close(partial(setattr, runner, "prefill_cuda_graph_runner", None))
    except Exception:
        # Without the exits nothing keeps multimodal prompts out of these graphs.
        runner.prefill_cuda_graph_runner = None
        raise


def open_exits(runner: Any, state: ModelState) -> None:
    """Open the exits of captured prefills if they agree with stock, before the server serves."""
    if state.exits_are_open is None:
        return
    checked = exit_check.check_exits(runner, state)
    state.report.exits_check = checked.to_json()
    # A rank that leaves a graph would wait for one that replays it in full.
    differ = ranks.find_difference(f"exits agree with stock: {checked.agrees}")
    state.exits_are_open = checked.agrees and differ is None
    if state.exits_are_open:
        fact, level = f"open after {state.cut_layer + 1} segments", logging.INFO
    else:
        reason = differ or f"the check found {checked.worst}"
        remedy = "with --cuda-graph-backend-prefill=disabled prefills are cut"
        fact, level = f"closed: {reason}; {remedy}", logging.ERROR
    state.report.exits = fact
    log.log_once(f"Gemma 4 fast prefill: exits from captured prefills are {fact}", level)
