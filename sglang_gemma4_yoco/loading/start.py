"""What happens when a runner starts: reasons against, the state, the captured tail, the check."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from sglang_gemma4_yoco import __version__, compat, log, settings
from sglang_gemma4_yoco.captured import graphs, proof
from sglang_gemma4_yoco.checking import audit, requests
from sglang_gemma4_yoco.checking import start as check
from sglang_gemma4_yoco.checking.start import Checked
from sglang_gemma4_yoco.core import donor, gate, kept, ranks
from sglang_gemma4_yoco.core.attention import TailBackend
from sglang_gemma4_yoco.core.state import ModelState, find, first_shared_layer
from sglang_gemma4_yoco.loading import classes, limits

try:
    from sglang_gemma4_yoco import prefill_graphs
except ImportError:  # left out, or this SGLang captures prefills differently: they run as stock
    prefill_graphs = None  # type: ignore[assignment]

NO_SHARED_LAYERS = "the model has no KV-shared tail"
NOT_SET_UP = "it could not be set up"
NO_EXITS = "closed: captured prefills run to their end, in this SGLang or without that part"


def model_reason(model: Any) -> str | None:
    """Why no batch of this model, in a server with these arguments, may be cut; or None."""
    first = first_shared_layer(model.config)
    reason = limits.server_reason()
    if reason is not None or first is None:
        return reason or NO_SHARED_LAYERS
    return limits.linear_reason(model, first)


def of(model: Any) -> ModelState:
    """What is known of ``model``; where no runner has started it, by its config alone."""
    return find(model) or ModelState(model, model_reason(model))


# -- SGLang has built its attention backends -------------------------------------------------------


def start(runner: Any, model: Any) -> None:
    """Decide anew whether prefills may be cut; with several ranks, the same on all of them."""
    with _stock_if_it_fails(model):
        _start(runner, model)


def _start(runner: Any, model: Any) -> None:
    previous = find(model)
    if previous is not None:
        previous.close()
    reason, attention = _runner_reason(runner, model), None
    if reason is None:
        attention = _tail_backend(runner)
        if attention is None:
            reason = limits.NO_TAIL
    # Arguments refuse a server on all ranks, so there is nothing to compare. A server on several
    # machines is refused by them, and another machine may not have this package to answer.
    if reason is None or limits.server_reason() is None:
        found = f"{__version__}, refused: {reason}, {settings.current}"
        reason = ranks.reason_ranks_differ(found) or reason
    if reason is not None:
        attention = None
    state = ModelState(model, reason, attention)
    state.attach(gate.plan_batch)
    state.on_close(partial(graphs.drop, state, graphs.NOT_YET))
    if prefill_graphs is not None:
        state.on_close(partial(prefill_graphs.close, runner))
    if reason is None:
        _compile_kernels(state)
    else:
        level = logging.INFO
        if reason == limits.WRONG_REPLAYS:
            level = logging.WARNING
        log.server_refused(reason, level, logged=gate.is_news(reason))


def _runner_reason(runner: Any, model: Any) -> str | None:
    if not runner.is_generation:
        return gate.EMBEDDINGS
    return (
        model_reason(model)
        or classes.why_not(runner)
        or donor.why_not(model)
        or limits.backend_reason(runner.attn_backend)
        or limits.pool_reason(runner.token_to_kv_pool, runner.dtype)
    )


def _tail_backend(runner: Any) -> TailBackend | None:
    """The tail's own backend, or None and a line in the log. Never raises."""
    try:
        tail = compat.build_attn_backend(runner)
        if limits.backend_key(tail) in limits.TAIL_BACKENDS:
            return TailBackend(runner.attn_backend, tail)
        failure = f"what is registered as triton is a {type(tail).__name__}"
    except Exception as raised:  # noqa: BLE001 - whatever it is, stock serves
        failure = repr(raised)
    log.once(
        f"Gemma 4 fast prefill: no attention backend of the tail's own ({failure})",
        logging.WARNING,
    )
    return None


def _compile_kernels(state: ModelState) -> None:
    """Compile what neither stock nor the check runs. Never raises: the first forward can do it."""
    try:
        donor.compile_kernels(state.tail_layers[0].self_attn)
    except Exception as failure:  # noqa: BLE001 - whatever it is, stock serves the batches then
        log.failure("Gemma 4 fast prefill: compiling kernels at start failed", failure)


@contextmanager
def _stock_if_it_fails(model: Any) -> Iterator[None]:
    """Where a part of the start fails, stock serves this model, and the server goes on.

    With several ranks the failure is raised: the others wait for this rank.
    """
    try:
        yield
    except Exception as failure:
        if not compat.is_single_rank():
            raise
        log.failure("Gemma 4 fast prefill: its setup failed", failure)
        state = find(model)
        if state is None:
            state = ModelState(model, NOT_SET_UP)
            state.attach(gate.plan_batch)
        _turn_off(state, NOT_SET_UP, type(failure).__name__)


# -- SGLang captures its own graphs ----------------------------------------------------------------


@contextmanager
def capturing(runner: Any, model: Any) -> Iterator[None]:
    """The span in which SGLang captures this model's graphs; then the fast path is set up."""
    state = find(model)
    repaired = None
    with ExitStack() as span:
        if state is not None and prefill_graphs is not None:
            with _stock_if_it_fails(model):
                repaired = span.enter_context(prefill_graphs.capturing(runner, state))
        yield
    if state is None:
        return
    with _stock_if_it_fails(model):
        if prefill_graphs is not None:
            # Also where the path was turned off meanwhile: else they would answer images as text.
            prefill_graphs.keep_to_text(runner, state, repaired)
        if state.refused is None:
            with unused_generators(runner.device):
                set_up(runner, state)


@contextmanager
def unused_generators(device: str) -> Iterator[None]:
    """PyTorch's random generators are afterwards where they were before.

    Else a layer that draws numbers in a check, as stochastic rounding does, would change what a
    server with ``--random-seed`` samples.
    """
    kind = torch.device(device).type
    on_device = []
    if kind != "cpu":
        on_device.append(torch.get_device_module(kind).current_device())
    with torch.random.fork_rng(on_device, device_type=kind):
        yield


def set_up(runner: Any, state: ModelState) -> None:
    """Capture the tail; and, the first time, compare the model with stock."""
    assert state.attention is not None
    # At a recapture the server serves already. SGLang's scheduler, which captures between two
    # batches, may have launched the last one on another stream: nothing is freed, zeroed or
    # borrowed below before it has run.
    compat.wait_for_device(runner.device)
    first, unshown = "check" not in state.facts, None
    if not first:
        unshown = requests.why_not_borrowed(runner)
    able = limits.backend_key(state.attention.tail) in limits.CAPTURABLE_BACKENDS
    graphs.capture(runner, state, proof.prove, unshown, can_be_captured=able)
    checked = None
    if first:
        checked = _check(runner, state)
    if prefill_graphs is None:
        state.facts["exits"] = NO_EXITS
    elif state.refused is None:
        prefill_graphs.attach(runner, state, unshown)
    if state.refused is not None:
        return
    if checked is not None:
        state.after_cut = audit.auditor(runner, state)
        log.once(f"Gemma 4 fast prefill {__version__} is on: {state.describe()}, {checked}")
    kept.pin_memory(runner.device)


def _check(runner: Any, state: ModelState) -> Checked:
    """Compare with stock, unless the operator wants no check; with several ranks, all or none.

    Where nothing could be compared the path is off as well: it is not known to be right. With
    several ranks a failure is raised: the others wait for this rank.
    """
    checked = Checked(unchecked=check.why_not())
    try:
        if checked.unchecked is None:
            checked = check.check(runner, state)
    except Exception as failure:
        if not compat.is_single_rank():
            raise
        log.failure("Gemma 4 fast prefill: its self-check could not be run", failure)
        checked = Checked(unchecked=f"it failed: {type(failure).__name__}")
    state.facts["check"] = checked.facts()
    differ = ranks.reason_ranks_differ(f"agrees with stock: {checked.agrees}")
    if state.refused is not None:  # a forward of the check could not be cut, and has said why
        return checked
    if checked.worst is None and not checked.agrees:
        _turn_off(state, check.UNCHECKED, checked)
    elif not checked.agrees:
        _turn_off(state, check.FAILED, checked)
    elif differ is not None:
        _turn_off(state, check.FAILED, "another rank's differs")
    return checked


def _turn_off(state: ModelState, reason: str, found: object) -> None:
    state.refuse(reason)
    log.server_refused(reason, logged=False)
    log.error(f"Gemma 4 fast prefill is off for this server: {reason}; {found}")
