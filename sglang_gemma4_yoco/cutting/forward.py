"""One prefill forward: cut if its plan says so, served by stock if not, or if the cut fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_gemma4_yoco import report, seams
from sglang_gemma4_yoco.cutting import fallback, gate
from sglang_gemma4_yoco.cutting.cut import Cut, LateRefusalError
from sglang_gemma4_yoco.cutting.gate import Plan, at_the_forward
from sglang_gemma4_yoco.cutting.served import ServedModel
from sglang_gemma4_yoco.tail.graphs import ReplayError


@dataclass(frozen=True)
class Forwards:
    """How a forward is run again, all as it was before it ran.

    Attributes:
        stock: runs it as stock; returns what the model does, [T, hidden] or a tuple that begins so.
        cut: runs it on the fast path, by a plan; returns the rows alone, [T, hidden].
    """

    stock: Callable[[], Any]
    cut: Callable[[Plan], torch.Tensor]


def prefill(
    known: ServedModel,
    forward_batch: Any,
    positions: torch.Tensor,
    embeds: torch.Tensor | None,
    run: Callable[[], Any],
) -> Any:
    """Run one forward that is no decode step.

    Args:
        known: what is known of the model.
        positions: [T], what the model was called with.
        embeds: [T, hidden], the input embeddings that the model was called with, or None.
        run: the stock forward, which the cut makes fast.
    """
    rows = getattr(forward_batch, "extend_num_tokens", None) or 0  # some modes have no new tokens
    copy = None
    try:
        decided = at_the_forward(known, forward_batch)
        if isinstance(decided, Plan):
            plan = decided
            copy = fallback.copy_of(embeds)
            output = _cut(known, plan, positions, run)
            if known.auditor is not None and known.auditor.is_due():
                forwards = Forwards(
                    stock=partial(_again, embeds, copy, run),
                    cut=partial(_cut_again, known, positions, embeds, copy, run),
                )
                return known.auditor.audit(plan, output, forwards)
            return output
        known.release()
        reason = decided.reason
    except LateRefusalError as late:
        reason = str(late)  # on all ranks alike, as any refusal
    except Exception as failure:
        if not fallback.is_alone():
            raise
        fallback.failed(failure, rows)
        fallback.put_back(embeds, copy)
        if isinstance(failure, ReplayError):
            known.drop_graphs(f"a replay failed: {type(failure.__cause__).__name__}")
        return run()
    report.stepped_aside(reason, rows, tell=gate.is_news(reason))
    fallback.put_back(embeds, copy)
    return run()


def _again(embeds: torch.Tensor | None, copy: torch.Tensor | None, run: Callable[[], Any]) -> Any:
    fallback.put_back(embeds, copy)
    return run()


def _cut_again(
    known: ServedModel,
    positions: torch.Tensor,
    embeds: torch.Tensor | None,
    copy: torch.Tensor | None,
    run: Callable[[], Any],
    plan: Plan,
) -> torch.Tensor:
    """The rows [T, hidden] of a forward that is cut once more, which nobody counts."""
    fallback.put_back(embeds, copy)
    try:
        with Cut(known, plan, positions):
            # The embeddings are the residual, and with it the output, where a layer behind the
            # first one is the first to run.
            return seams.layer_rows(run()).clone()
    finally:
        known.release()
        fallback.put_back(embeds, copy)


def _cut(known: ServedModel, plan: Plan, positions: torch.Tensor, run: Callable[[], Any]) -> Any:
    """The output of one forward that is cut."""
    try:
        with Cut(known, plan, positions):
            output = run()
    finally:
        known.release()
    kept = plan.tail.kept
    computed = 0 if plan.tail.unread else kept.count
    report.active(
        known.model,
        lambda: _description(known),
        _outcome(plan),
        computed=computed,
        skipped=kept.total - computed,
    )
    fallback.succeeded()
    return output


def _outcome(plan: Plan) -> str:
    if plan.tail.unread:
        return report.TAIL_SKIPPED
    return report.ACTIVE if plan.replay is None else report.TAIL_REPLAYED


def _description(known: ServedModel) -> str:
    model = known.model
    return (
        f"{type(model).__name__} with hidden size {model.config.hidden_size}, "
        f"{known.attends()}, tail {known.runs_its_tail()}"
    )
