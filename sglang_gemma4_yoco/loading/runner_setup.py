"""Setup of a model when SGLang's runner starts: eligibility, state, captured tail, check."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from sglang_gemma4_yoco import __version__, compat, log, settings
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.checking import audit, tail_graphs
from sglang_gemma4_yoco.checking import self_check as check
from sglang_gemma4_yoco.checking.self_check import CheckResult
from sglang_gemma4_yoco.core import eligibility, plan, ranks, tail_batch
from sglang_gemma4_yoco.core.state import ModelState, find_state, first_shared_layer
from sglang_gemma4_yoco.core.tail import TailBackend
from sglang_gemma4_yoco.loading import third_party, unsupported
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.prefill_exits import exit_setup
from sglang_gemma4_yoco.refusal import ServerRefusal

NO_SHARED_LAYERS = ServerRefusal("the model has no KV-shared tail")
NOT_SET_UP = ServerRefusal("it could not be set up", is_logged=False)
#: The kernel of the K/V norm is compiled once for few rows and once for many.
_FEW, _MANY = 2, 257


def find_model_reason(model: Any) -> ServerRefusal | None:
    """Return why no batch of this model may be cut with these server arguments, or None."""
    reason = unsupported.find_server_reason()
    if reason is not None:
        return reason
    first = first_shared_layer(model.config)
    if first is None:
        return NO_SHARED_LAYERS
    return unsupported.find_linear_reason(model, first)


# -- SGLang has built its attention backends -------------------------------------------------------


@contextmanager
def start_model(runner: Any, model: Any) -> Iterator[None]:
    """Wrap the construction of SGLang's attention backends, then decide whether to cut prefills.

    With several ranks all of them decide the same.
    """
    yield
    previous = find_state(model)
    if previous is not None:
        previous.close()
    refusal, attention = _find_runner_reason(runner, model), None
    if refusal is None:
        attention = _build_tail_backend(runner, model)
        if attention is None:
            refusal = unsupported.NO_TAIL
    # Arguments refuse a server on all ranks, so there is nothing to compare. They refuse servers on
    # several machines too, where another machine may lack this package and never answer.
    if refusal is None or unsupported.find_server_reason() is None:
        found = f"{__version__}, unsupported: {refusal}, {settings.current}"
        difference = ranks.find_difference(found)
        if difference is not None:
            refusal = ServerRefusal(difference)
    if refusal is not None:
        attention = None
    state = ModelState(model, registry.find_adapter(model), refusal, attention)
    state.attach(plan.plan_batch)
    state.on_close(partial(lifecycle.drop_tail, state))
    if refusal is not None:
        state.turn_off(refusal)
        return
    _note_untested()
    _compile_kernels(runner, state)


def _note_untested() -> None:
    if compat.release.is_newer_than_tested():
        log.log_once(
            f"Gemma 4 fast prefill: SGLang {compat.release.INSTALLED} was not tested, and "
            f"{settings.name_of('untested')}=1: {unsupported.RUNS_UNTESTED}",
            logging.WARNING,
        )


def _find_runner_reason(runner: Any, model: Any) -> ServerRefusal | None:
    if not runner.is_generation:
        return unsupported.EMBEDDINGS
    if getattr(model, "layers_to_capture", None):  # for as long as the server runs
        return ServerRefusal(eligibility.CAPTURED_LAYERS.text)
    adapter = registry.find_adapter(model)
    return (
        find_model_reason(model)
        or compat.names.find_missing(adapter.SGLANG)
        or third_party.find_third_party_code(type(runner.model), runner)
        or adapter.find_unsupported_reason(model)
        or unsupported.find_backend_reason(runner.attn_backend, adapter.ATTENTION)
        or unsupported.find_pool_reason(runner.token_to_kv_pool, runner.dtype)
    )


def _build_tail_backend(runner: Any, model: Any) -> TailBackend | None:
    """Return the tail's own backend; if it cannot be built, log a line and return None."""
    try:
        tail = compat.attention.build_backend(runner, model.layers)
        if compat.backends.may_run_tail(registry.find_adapter(model).ATTENTION, tail):
            return TailBackend(runner.attn_backend, tail)
        failure = f"the backend registered as triton is a {type(tail).__name__}"
    except Exception as raised:  # noqa: BLE001 - any failure falls back to stock
        failure = repr(raised)
    log.log_once(
        f"Gemma 4 fast prefill: the tail's attention backend could not be built ({failure})",
        logging.WARNING,
    )
    return None


@torch.no_grad()
def _compile_kernels(runner: Any, state: ModelState) -> None:
    """Compile the kernels for K and V without queries, which stock never runs.

    Otherwise the first request would wait for the compiler. Never raises: that request can retry.
    """
    device = runner.device
    try:
        for number in _FEW, _MANY:
            shape = state.adapter.get_row_shape(state.model)
            rows = torch.zeros(number, *shape, dtype=runner.dtype, device=device)
            positions = torch.zeros(number, dtype=torch.int64, device=device)
            state.adapter.compute_keys_and_values(state.tail_layers[0], rows, positions)
    except Exception as failure:  # noqa: BLE001 - any failure falls back to stock later
        log.log_failure("Gemma 4 fast prefill: compiling kernels at start failed", failure)


@contextmanager
def guarded(failed: str, models: Sequence[Any] = ()) -> Iterator[None]:
    """If the block fails, log one line and let SGLang continue.

    With several ranks and ``models`` the failure is raised: the other ranks wait for this one.

    Args:
        failed: the line.
        models: the text models that are set up in the block; on failure they fall back to stock.
    """
    try:
        yield
    except Exception as failure:
        if models and not compat.server.is_single_rank():
            raise
        log.log_failure(failed, failure)
        for model in models:
            state = find_state(model)
            if state is None:
                state = ModelState(model, registry.find_adapter(model), NOT_SET_UP)
                state.attach(plan.plan_batch)
            _turn_off(state, NOT_SET_UP, type(failure).__name__)


# -- SGLang captures its own graphs ----------------------------------------------------------------


@contextmanager
def set_up_after_capture(runner: Any, model: Any) -> Iterator[None]:
    """Wrap SGLang's graph capture, then set up the fast path."""
    state = find_state(model)
    if state is None:
        yield
        return
    # The tail's graphs keep SGLang's decode graphs alive. SGLang drops these before it captures
    # again: the device may not have room for both.
    compat.server.wait_for_device(runner.device)
    lifecycle.drop_tail(state)
    with ExitStack() as stack:
        if state.adapter.LEAVES_CAPTURED_PREFILLS:
            stack.enter_context(exit_setup.repair_capture(runner, state))
        yield
    if state.unsupported is None:
        with restore_generators(runner.device):
            set_up(runner, state)


@contextmanager
def restore_generators(device: str) -> Iterator[None]:
    """Restore the state of PyTorch's random generators after the block.

    Otherwise a check of layers that draw random numbers, as stochastic rounding does, would change
    what a server with ``--random-seed`` samples.
    """
    kind = torch.device(device).type
    on_device = []
    if kind != "cpu":
        on_device.append(torch.get_device_module(kind).current_device())
    with torch.random.fork_rng(on_device, device_type=kind):
        yield


def set_up(runner: Any, state: ModelState) -> None:
    """Capture the tail; the first time, run the checks too."""
    # At a recapture the server is already serving. SGLang's scheduler captures between two batches
    # and may have launched the last one on another stream. Synchronize before anything is freed,
    # zeroed or used.
    compat.server.wait_for_device(runner.device)
    lifecycle.capture_tail(runner, state, tail_graphs.check_graphs)
    checked = None
    if not state.serves:
        checked = _check_start(runner, state)
        if state.unsupported is None:
            exit_setup.open_exits(runner, state)
    state.serves = True
    if state.unsupported is not None:
        return
    if checked is not None:
        state.after_cut = audit.make_auditor(runner, state)
        log.log_once(f"Gemma 4 fast prefill {__version__} is on: {state.describe()}, {checked}")
    tail_batch.pin_memory(runner.device)


def _check_start(runner: Any, state: ModelState) -> CheckResult:
    """Compare with stock, unless the self-check is disabled; one failing rank turns all off.

    The path is also off if nothing could be compared. With several ranks an exception is raised:
    the others wait for this rank.
    """
    checked = check.NOT_WANTED
    try:
        if settings.current.self_check:
            checked = check.check_model(runner, state)
    except Exception as failure:
        if not compat.server.is_single_rank():
            raise
        log.log_failure("Gemma 4 fast prefill: its self-check could not be run", failure)
        checked = CheckResult(unchecked=f"it failed: {type(failure).__name__}")
    state.report.check = checked.to_json()
    differ = ranks.find_difference(f"agrees with stock: {checked.agrees}")
    if state.unsupported is not None:  # a forward of the check turned it off, and logged why
        return checked
    if checked.worst is None and not checked.agrees:
        reason = f"{check.UNCHECKED}: {checked.unchecked}"
        _turn_off(state, ServerRefusal(reason, is_logged=False), "nothing was compared")
    elif not checked.agrees:
        _turn_off(state, check.CHECK_FAILED, checked)
    elif differ is not None:
        _turn_off(state, check.CHECK_FAILED, "another rank's result differs")
    return checked


def _turn_off(state: ModelState, refusal: ServerRefusal, found: object) -> None:
    state.turn_off(refusal)
    log.log_error(f"Gemma 4 fast prefill is off for this server: {refusal}; {found}")
