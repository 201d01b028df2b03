"""The decision on each batch, made once, right after SGLang has planned its attention.

An eligible batch gets a ``Plan``: its kept rows and the runner of the tail, whose attention is
planned here. Any other batch gets the reason. The model's forward takes either from the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.core.interfaces import Plan, TailRunner
from sglang_gemma4_yoco.core.per_layer import Buffers
from sglang_gemma4_yoco.core.state import STATE_ENTRY, ModelState
from sglang_gemma4_yoco.core.tail import TailBackend
from sglang_gemma4_yoco.core.tail_batch import TailBatch
from sglang_gemma4_yoco.refusal import Refusal


@dataclass(frozen=True)
class EagerTail:
    """A ``TailRunner`` that launches each layer; ``metadata`` is the plan of ``attention``."""

    state: ModelState
    batch: Any
    tail: TailBatch
    attention: TailBackend
    metadata: Any
    buffers: Buffers | None = None

    def run(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        get_inputs: Callable[[], torch.Tensor | None],
    ) -> torch.Tensor:
        """Return the kept rows [B, hidden], normed, from all rows [T, ...] at the cut."""
        state, index = self.state, self.tail.index
        kept, kept_positions = rows.index_select(0, index), positions.index_select(0, index)
        fields = {**self.tail.fields, "positions": kept_positions}
        inputs = get_inputs()
        with self.attention.running(self.batch, fields, self.metadata):
            return state.adapter.run_tail(
                state.model, state.tail_layers, self.batch, kept, kept_positions, inputs
            )


#: The attribute of a batch with its plan, or the reason why it has none, until its forward.
PLAN_ENTRY = "_yoco_plan"
NOT_PLANNED = Refusal("the tail's attention was not planned for this batch")


# -- once for each batch ---------------------------------------------------------------------------


def plan_batch(model: Any, forward_batch: Any) -> None:
    """Decide on a batch whose attention SGLang has planned, and store the decision on it.

    On failure the exception is stored, and the batch's forward counts it like any other.
    """
    state: ModelState = model.__dict__[STATE_ENTRY]  # the attached one, or a check's own
    planned_again = getattr(forward_batch, PLAN_ENTRY, None) is not None
    try:
        if state.planned_rows is not None and not planned_again:
            state.counters.count_unseen(state.planned_rows)
        decided: Plan | Refusal | Exception = make_plan(state, forward_batch)
    except Exception as failure:
        if not compat.server.is_single_rank():
            raise  # the other ranks run the tail
        decided = failure
    state.planned_rows = None
    if isinstance(decided, Plan):
        state.planned_rows = decided.tail.kept.total
    setattr(forward_batch, PLAN_ENTRY, decided)


def make_plan(state: ModelState, forward_batch: Any) -> Plan | Refusal:
    """Return the plan of a batch, with attention planned, or the reason why it runs as stock."""
    eligible = eligibility.check_eligibility(state, forward_batch)
    if isinstance(eligible, Refusal):
        return eligible
    attention = state.attention
    assert attention is not None, "without a backend of the tail's own no batch is eligible"
    tail = TailBatch.of(forward_batch, eligible.kept, decodes=attention.decodes)
    runner: TailRunner | None = None
    outcome = counters.TAIL_SKIPPED
    if eligible.bucket is not None:
        runner = eligible.bucket.plan(forward_batch, tail.index)
        outcome = counters.TAIL_CAPTURED
    elif not eligible.is_intermediate_chunk:
        runner = make_eager_tail(state, forward_batch, tail)
        outcome = counters.TAIL_EAGER
    if state.replayed_batch is not None:
        outcome = counters.AT_EXITS[outcome]
    return Plan(forward_batch, tail, attention, runner, outcome)


def make_eager_tail(state: ModelState, forward_batch: Any, tail: TailBatch) -> EagerTail:
    """Return a runner that launches the tail layer by layer, with attention planned."""
    attention = state.attention
    assert attention is not None
    metadata = attention.plan(forward_batch, tail.fields)
    return EagerTail(state, forward_batch, tail, attention, metadata)


def take_plan(state: ModelState, forward_batch: Any) -> Plan | Refusal:
    """Pop the decision stored on the batch, or return why there is none.

    Two things can change between planning and the forward: a graph is being captured (on AMD SGLang
    begins the capture after planning), or another attention backend is current. In the supported
    releases nothing else on which the decision depends changes in between.

    Raises:
        Exception: the error that the batch's planning raised.
    """
    decided: Plan | Refusal | Exception | None = getattr(forward_batch, PLAN_ENTRY, None)
    if decided is None:
        return eligibility.find_ineligible_reason(state, forward_batch) or NOT_PLANNED
    setattr(forward_batch, PLAN_ENTRY, None)  # breaks the reference cycle of batch and plan
    if isinstance(decided, Refusal):
        return decided
    if isinstance(decided, Exception):
        raise decided
    if state.replayed_batch is None and compat.attention.is_capturing():
        return eligibility.CAPTURING
    if compat.attention.get_current_backend() is not decided.attention.main:
        return NOT_PLANNED
    return decided
