"""When a runner starts: find out what there is to know of its model, record its tail, check it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_gemma4_yoco import __version__, report, seams, settings
from sglang_gemma4_yoco.checking import audit, proof, self_check
from sglang_gemma4_yoco.checking.checked import Checked
from sglang_gemma4_yoco.checking.rounding import Finding
from sglang_gemma4_yoco.core import limits, ranks
from sglang_gemma4_yoco.cutting import fallback, forward, gate, served
from sglang_gemma4_yoco.cutting.served import ServedModel
from sglang_gemma4_yoco.loading import repair
from sglang_gemma4_yoco.tail import donor, graphs
from sglang_gemma4_yoco.tail.attention import OwnBackend
from sglang_gemma4_yoco.tail.donor import DonorCut
from sglang_gemma4_yoco.tail.graphs import TailGraphs


def of(model: Any) -> ServedModel:
    """What is known of ``model``; of one that no runner has, what it says of itself."""
    known = served.find(model)
    if known is None:
        known = ServedModel(model, gate.constant_reason(model))
        known.attach(gate.plan_ahead)
    return known


def start(runner: Any, model: Any) -> None:
    """The runner has built its attention backends: find out anew what there is to know."""
    previous = served.find(model)
    if previous is not None:
        previous.close()
    reason = _constant_reason(runner, model)
    attention = _own_backend(runner) if reason is None else None
    if reason is None and attention is None:
        reason = limits.NO_TAIL
    reason = ranks.reason_ranks_differ(_findings(reason)) or reason
    known = ServedModel(model, reason, attention if reason is None else None)
    known.attach(gate.plan_ahead)
    _foretell(runner, model)
    if reason is not None:
        if gate.is_news(reason):
            wrong = reason == limits.WRONG_REPLAYS
            report.steps_aside(reason, logging.WARNING if wrong else logging.INFO)
        return
    _compile_kernels(known)


def record(runner: Any, model: Any, *, from_ids: bool = False) -> None:
    """The runner has recorded its own graphs: record the tail, where batches may be cut.

    The first time, nobody is served yet: then the model is compared with stock.

    Args:
        from_ids: its prefills are recorded from ids alone (``repair``).
    """
    known = served.find(model)
    if known is None:
        return
    known.forget_replays()
    if from_ids and seams.replays_prefills(runner):
        known.recorded_from_ids(runner)
    if known.constant_reason is not None:
        return
    record_tail(known, runner)
    _open_doors(known, runner)
    first = known.checked is None
    checked = known.checked or _check(known, runner)
    defect = _defect_of_doors(known, checked.doors)
    if defect is not None:
        _do_not_reach(known, defect, logging.ERROR)
    if first and known.constant_reason is None:
        known.auditor = audit.auditor(runner, known)
        told = f"{known.attends()}, {checked.describe()}"
        report.once(f"Gemma 4 fast prefill {__version__} is on: {told}")


def _foretell(runner: Any, model: Any) -> None:
    """Say that SGLang cannot record what it is about to: its own error names no remedy."""
    why = seams.prefill_graph_error(multimodal=runner.model_config.is_multimodal)
    if why is not None and repair.needed(runner, model) is None:
        report.once(
            f"Gemma 4 fast prefill: SGLang cannot record prefill CUDA graphs of this model, and "
            f"may stop now ({why}); with --cuda-graph-backend-prefill=disabled it starts",
            logging.WARNING,
        )


# -- prefills that SGLang replays ----------------------------------------------------------------


def _open_doors(known: ServedModel, runner: Any) -> None:
    """Have batches leave SGLang's recorded prefills. With several ranks those of all, or of none.

    Raises:
        Exception: it failed, and other ranks wait for this one.
    """
    if not seams.replays_prefills(runner):
        return
    known.prefills = runner.prefill_cuda_graph_runner
    if seams.RecordedPrefills.why_not(runner) is None:
        known.follow_replays(forward.replayed_prefill)
    reason = repair.doors_refused() or known.doors.find(runner)
    reason = ranks.reason_ranks_differ(f"{reason}, {known.doors.describe()}") or reason
    if reason is not None:
        _do_not_reach(known, reason)
        return
    known.doors.open()
    report.once(f"Gemma 4 fast prefill: prefills that SGLang replays {known.doors.summary()}")


def _defect_of_doors(known: ServedModel, found: Finding | None) -> str | None:
    """Why doors that are open are closed again, on all ranks alike, or None.

    Args:
        found: what the check at start found there.
    """
    if known.doors.closed is not None:
        return None
    wrong = found is not None and not found.is_rounding
    # A rank that leaves a recording would wait for one that runs it to its end.
    others = ranks.reason_ranks_differ(f"doors agree with stock: {not wrong}")
    return f"the check at start found {found}" if wrong else others


def _do_not_reach(known: ServedModel, reason: str, level: int = logging.WARNING) -> None:
    known.doors.close(reason)
    report.once(
        "Gemma 4 fast prefill does not reach prefills that are replayed from a CUDA graph "
        f"(backend {seams.prefill_graph()!r}: {reason}); --cuda-graph-backend-prefill=disabled "
        "runs them through it",
        level,
    )


# -- the recorded tail --------------------------------------------------------------------------


def record_tail(known: ServedModel, runner: Any) -> None:
    """Record the tail, anew if it was recorded. With several ranks all of them do, or none.

    Raises:
        Exception: recording failed, and other ranks wait for this one.
    """
    known.drop_graphs(graphs.NOT_YET)
    recorded: TailGraphs | None = None
    attention = known.attention
    assert attention is not None, "batches may be cut"
    reason = _attempt(lambda: graphs.why_not(runner, known.model, attention))
    reason = ranks.reason_ranks_differ(f"recorded: {reason}") or reason
    if reason is None:
        recorded, reason = _recorded(known, runner)
        # A graph that one rank drops, none may replay: the ranks would add up unlike rows.
        rows = None if recorded is None else recorded.rows
        reason = ranks.reason_ranks_differ(f"replayed: {rows}") or reason
    if recorded is None or reason is not None:
        if recorded is not None:
            recorded.close()
        known.drop_graphs(reason or graphs.NONE_GOOD)
        return
    known.graphs = recorded
    report.once(f"Gemma 4 fast prefill: the tail is recorded {recorded.describe()}")


def _recorded(known: ServedModel, runner: Any) -> tuple[TailGraphs | None, str | None]:
    """The recorded and proven tail, or why there is none."""
    tail: TailGraphs | None = None

    def record() -> None:
        nonlocal tail
        assert known.attention is not None
        tail = TailGraphs(runner, known.model, known.first_cut, known.attention)
        tail.record()
        proof.prove(tail, runner)

    reason = _attempt(record)
    if tail is not None and (reason is not None or not tail.rows):
        tail.close()
        return None, reason or graphs.NONE_GOOD
    return tail, reason


def _attempt(step: Callable[[], str | None]) -> str | None:
    """What ``step`` says; why it failed, if it did and no other rank waits for this one."""
    try:
        return step()
    except Exception as failure:
        if not fallback.is_alone():
            raise
        report.failure("Gemma 4 fast prefill: recording the tail failed", failure)
        return f"recording failed: {type(failure).__name__}"


# -- checked before it serves --------------------------------------------------------------------


def _check(known: ServedModel, runner: Any) -> Checked:
    """Compare with stock, or know why not. With several ranks all of them agree, or none.

    Raises:
        Exception: it failed, and other ranks wait for this one.
    """
    unchecked = self_check.why_not(runner)
    try:
        checked = self_check.check(runner, known) if unchecked is None else None
    except Exception as failure:
        if not fallback.is_alone():
            raise
        report.failure("Gemma 4 fast prefill: its self-check could not be run", failure)
        checked, unchecked = None, f"it could not be run: {type(failure).__name__}"
    known.checked = checked or Checked(unchecked=unchecked)
    others = ranks.reason_ranks_differ(f"agrees with stock: {known.checked.agrees}")
    if others is not None or not known.checked.agrees:
        known.refuse(self_check.FAILED)
        found = "another rank's differs" if known.checked.agrees else known.checked.describe()
        report.error(f"Gemma 4 fast prefill is off for this server: {self_check.FAILED}; {found}")
    return known.checked


# -- what is found out ---------------------------------------------------------------------------


def _constant_reason(runner: Any, model: Any) -> str | None:
    if not runner.is_generation:
        return gate.EMBEDDINGS
    return (
        gate.constant_reason(model)
        or limits.backend_reason(runner.attn_backend)
        or limits.pool_reason(runner.token_to_kv_pool, runner.dtype)
    )


def _findings(reason: str | None) -> str:
    """What must be the same on all ranks for a batch to be cut on all of them."""
    return f"{__version__}, stepping aside: {reason}, {settings.current}"


def _compile_kernels(known: ServedModel) -> None:
    """Compile what no stock layer compiles. Never raises: the first forward would do it as well."""
    try:
        if known.donor_cut is DonorCut.KEYS_AND_VALUES:
            donor.compile_kernels(known.model.layers[known.first_shared - 1].self_attn)
        if known.attention is not None:
            known.attention.compile_kernels([layer.self_attn for layer in known.tail_layers])
    except Exception as failure:  # noqa: BLE001 - whatever it is, stock serves the batches then
        report.failure("Gemma 4 fast prefill: compiling kernels at start failed", failure)


def _own_backend(runner: Any) -> OwnBackend | None:
    """The tail's own backend, or None and a line in the log. Never raises."""
    try:
        tail = seams.build_attn_backend(runner)
        if limits.Ability.TAIL in limits.abilities(type(tail)):
            return OwnBackend(runner.attn_backend, tail)
        failure = f"what is registered as triton is a {type(tail).__name__}"
    except Exception as raised:  # noqa: BLE001 - whatever it is, stock serves
        failure = repr(raised)
    report.once(
        f"Gemma 4 fast prefill: no attention backend of the tail's own ({failure})",
        logging.WARNING,
    )
    return None
