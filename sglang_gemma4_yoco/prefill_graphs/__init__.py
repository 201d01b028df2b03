"""Exits from prefills that SGLang has captured in CUDA graphs; it hooks on to ``loading.start``.

Without this folder such prefills run to their end, as stock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.core.state import ENTRY, ModelState
from sglang_gemma4_yoco.prefill_graphs import check, repair, sglang
from sglang_gemma4_yoco.prefill_graphs.exits import NO_POINT, PrefillGraphExits, noting


@contextmanager
def capturing(runner: Any, state: ModelState) -> Iterator[None]:
    """The span in which SGLang captures graphs of this model.

    Its capture of prefills is repaired where the operator has asked for them, but not on a server
    of which no batch may be cut: its setup was never tried with a repair.
    """
    _detach(runner)
    multimodal, why = runner.model_config.is_multimodal, None
    with ExitStack() as span:
        if state.refused is None:
            why = repair.needed(multimodal=multimodal)
            if sglang.has_breaks():
                span.enter_context(noting(state.tail_layers[0]))
        if why is not None:
            span.enter_context(repair.repaired(state.model, why))
        else:
            repair.warn_that_capture_fails(multimodal=multimodal)
        yield
    prefills = sglang.captured_prefills(runner)
    if why is not None and prefills is not None:
        repair.keep_media_out(prefills)
        # Without this package they would serve media as well: then prefills run eagerly.
        state.on_close(lambda: setattr(runner, "prefill_cuda_graph_runner", None))


def attach(runner: Any, state: ModelState) -> None:
    """Open the exits of what SGLang has captured. With several ranks those of all, or of none.

    Raises:
        Exception: it failed, and other ranks wait for this one.
    """
    prefills, exits, level = sglang.captured_prefills(runner), None, logging.WARNING
    if prefills is None:
        return
    reason = repair.exits_refused()
    if sglang.has_breaks():
        try:
            exits = PrefillGraphExits(state, prefills)
            state.on_close(lambda: _detach(runner))
            reason = reason or (None if all(exits.segments.values()) else NO_POINT)
        except AttributeError as missing:
            reason = str(missing)
    reason = ranks.reason_ranks_differ(f"exits: {reason}, {exits and exits.segments}") or reason
    if exits is not None and reason is None:
        exits.closed = None
        checked = check.at_start(runner, state, max(exits.segments))
        state.facts["exits_check"] = checked.facts()
        # A rank that leaves a graph would wait for one that runs it to its end.
        reason = ranks.reason_ranks_differ(f"exits agree with stock: {checked.agrees}")
        if not checked.agrees:
            reason, level = f"the check found {checked.worst}", logging.ERROR
    if reason is None:
        state.facts["exits"] = f"open {exits}"
        log.once(f"Gemma 4 fast prefill: exits from captured prefills are open {exits}")
        return
    if exits is not None:
        exits.closed = reason
    state.facts["exits"] = f"closed: {reason}"
    log.once(
        f"Gemma 4 fast prefill: exits from captured prefills are closed: {reason}; "
        "--cuda-graph-backend-prefill=disabled shortens prefills",
        level,
    )


def _detach(runner: Any) -> None:
    exits = getattr(sglang.captured_prefills(runner), ENTRY, None)
    if exits is not None:
        exits.hooks.close()
