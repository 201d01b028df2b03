"""When a runner starts: SGLang's capture of prefills is repaired, and exits are opened.

SGLang 0.5.22 and 0.5.23 cannot capture prefills of E2B and E4B: two layers that share K and V count
as an error, and a multimodal model is captured with ids and embeddings at once (``docs/upstream``
has both reports). With ``--cuda-graph-backend-prefill=breakable`` such a server does not start.

So while SGLang captures, layers that it cannot index are left unindexed, and text is captured from
its ids alone, which become what they become eagerly (``text_inputs``). Such a graph would answer a
prompt with images as if it were text: those run eagerly.
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
from sglang_gemma4_yoco.prefill_exits import graph_exits, text_inputs
from sglang_gemma4_yoco.replaced import replaced

_DISABLED = "--cuda-graph-backend-prefill=disabled shortens prefills"
# Why exits are closed.
NOT_REPAIRED = f"SGLang's capture of prefills was not repaired; {_DISABLED}"
NOT_CAPTURED = "SGLang has captured no prefills, although --cuda-graph-backend-prefill asks for it"
OTHER_INPUTS = (
    "captured prefills make other inputs of text than SGLang does eagerly; none of them is used"
)
NO_POINT = "some captured prefill does not run the layer inside which batches are cut"


def is_repaired() -> bool:
    """Return True if SGLang's capture of prefills is repaired with these flags and settings.

    The operator must have named these graphs. A newer SGLang may not need it.
    """
    if not settings.current.prefill_graphs or compat.release.is_newer_than_tested():
        return False
    backend = compat.server.get_cuda_graph_backend("prefill")
    return compat.captured_prefills.are_named() and backend == compat.captured_prefills.BREAKABLE


@contextmanager
def repair_capture(runner: Any, state: ModelState) -> Iterator[None]:
    """Have SGLang capture prefills of this model in the ``with`` block; each gets an exit point.

    Nothing is repaired on a server of which no batch may be cut: its setup was never tried so.

    Raises:
        Exception: what was captured could not be checked, and other ranks wait for this one.
    """
    if state.unsupported is not None or not is_repaired():
        yield
        return
    log.log_once(
        "Gemma 4 fast prefill: SGLang's capture of prefill CUDA graphs is repaired for this model "
        f"({compat.captured_prefills.SHARED_LAYER_IDS}), because --cuda-graph-backend-prefill asks "
        f"for them; {settings.name_of('prefill_graphs')}=0 leaves it"
    )
    embed = partial(text_inputs.embed_text, state.model, runner.model.config)
    forward = compat.captured_prefills.take_ids(state.model.forward, embed)
    with (
        graph_exits.note_exit_points(state.tail_layers[0].self_attn.attn),
        compat.captured_prefills.index_shared_layers(),
        replaced(state.model, forward=forward),
    ):
        yield
    _keep_to_text(runner, state)


def _keep_to_text(runner: Any, state: ModelState) -> None:
    """Have captured prefills serve text alone, and none of them if they do it wrongly."""
    try:
        # Where SGLang has captured decode steps alone, prefills are those of an earlier capture.
        captured = compat.server.get_captured_prefills(runner)
        if captured is None or graph_exits.get_exits(runner) is not None:
            return
        graph_exits.PrefillGraphExits(state, runner).attach()
        same = not settings.current.self_check or text_inputs.inputs_agree(runner, state.model)
        differ = ranks.find_difference(f"inputs: {same}")
        if same and differ is None:
            return
    except Exception as failure:
        if not compat.server.is_single_rank():
            raise
        log.log_failure("Gemma 4 fast prefill: captured prefills could not be checked", failure)
    runner.prefill_cuda_graph_runner = None  # then SGLang runs prefills eagerly
    _report(state, f"closed: {OTHER_INPUTS}", logging.ERROR)


def drop_captured_prefills(runner: Any) -> None:
    """Have prefills run eagerly, if they were captured with the repair.

    Without this package such graphs would serve media as well.
    """
    if graph_exits.get_exits(runner) is not None:
        runner.prefill_cuda_graph_runner = None


def open_exits(runner: Any, state: ModelState) -> None:
    """Open the exits of what SGLang has captured, or report why they are closed.

    Raises:
        Exception: it failed, and other ranks wait for this one.
    """
    exits = graph_exits.get_exits(runner)
    if exits is None:
        if compat.server.get_captured_prefills(runner) is not None:
            _report(state, f"closed: {NOT_REPAIRED}", logging.WARNING)
        elif compat.captured_prefills.are_named() and compat.server.runs_prefills_eagerly(runner):
            _report(state, f"closed: {NOT_CAPTURED}", logging.WARNING)
        return
    exits.are_open = True  # what is checked leaves by them
    reason = _find_closed_reason(runner, state, exits)
    exits.are_open = reason is None
    if reason is None:
        _report(state, f"open {exits}", logging.INFO)
    else:
        _report(state, f"closed: {reason}; {_DISABLED}", logging.ERROR)


def _find_closed_reason(runner: Any, state: ModelState, exits: Any) -> str | None:
    """Check exits, which are open; return why they must be closed, the same on every rank."""
    differ = ranks.find_difference(f"exits: {exits}, {exits.are_complete()}")
    if differ is not None:
        return differ
    if not exits.are_complete():
        return NO_POINT
    checked = exit_check.check_exits(runner, state)
    state.report["exits_check"] = checked.to_json()
    # A rank that leaves a graph would wait for one that runs it to its end.
    differ = ranks.find_difference(f"exits agree with stock: {checked.agrees}")
    if checked.agrees:
        return differ
    if checked.worst is None:
        return f"they are not checked: {checked.unchecked}"
    return f"the check found {checked.worst}"


def _report(state: ModelState, fact: str, level: int) -> None:
    state.report["exits"] = fact
    log.log_once(f"Gemma 4 fast prefill: exits from captured prefills are {fact}", level)
