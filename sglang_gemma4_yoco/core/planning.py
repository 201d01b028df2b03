"""The decision on each batch, made once, right after SGLang's backend has its metadata.

An eligible batch gets a ``Plan``: its kept rows and the runner of the tail, whose attention
metadata is made here. Any other batch gets the reason. The model's forward takes either from the
batch.
"""

from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.compat.batch import ForwardBatch
from sglang_gemma4_yoco.compat.text_model import TextModel
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.core.eager_tail import EagerTail
from sglang_gemma4_yoco.core.kept_batch import KeptBatch
from sglang_gemma4_yoco.core.plan import Plan, TailRunner
from sglang_gemma4_yoco.core.state import STATE_ENTRY, ModelState
from sglang_gemma4_yoco.refusal import Refusal

#: The attribute of a batch with its plan, or the reason why it has none, until its forward. A plan
#: refers to its batch weakly, so a batch that is planned and never run is freed with its plan.
PLAN_ENTRY = "_yoco_plan"
NOT_PLANNED = Refusal("the tail's attention was not planned for this batch")


def plan_batch(model: TextModel, forward_batch: ForwardBatch) -> None:
    """Decide on a batch whose attention metadata SGLang has made, and store the decision on it.

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
        state.planned_rows = decided.kept_batch.kept.total
    setattr(forward_batch, PLAN_ENTRY, decided)


def make_plan(state: ModelState, forward_batch: ForwardBatch) -> Plan | Refusal:
    """Return the plan of a batch, or the reason why it runs as stock."""
    eligible = eligibility.check_eligibility(state, forward_batch)
    if isinstance(eligible, Refusal):
        return eligible
    backends = state.backends
    assert backends, "without a backend of the tail's own no batch is eligible"
    kept_batch = KeptBatch.of(forward_batch, eligible.kept, decodes=backends.decodes)
    runner: TailRunner | None = None
    outcome = counters.TAIL_SKIPPED
    if eligible.bucket:
        runner = eligible.bucket.fill(forward_batch, kept_batch.index)
        outcome = counters.TAIL_CAPTURED
    elif not eligible.is_intermediate_chunk:
        runner = EagerTail.of(state, backends, kept_batch)
        outcome = counters.TAIL_EAGER
    if state.front:
        outcome = counters.AT_EXIT[outcome]
    return Plan(kept_batch, backends, runner, outcome)


def take_plan(state: ModelState, forward_batch: ForwardBatch) -> Plan | Refusal:
    """Pop the decision stored on the batch, or return why there is none.

    Two things can change between planning and the forward: a graph is being captured (on AMD SGLang
    begins the capture after planning), or another attention backend is current. In the supported
    releases nothing else on which the decision depends changes in between.

    Raises:
        Exception: the error that the batch's planning raised.
    """
    decided: Plan | Refusal | Exception | None = getattr(forward_batch, PLAN_ENTRY, None)
    if decided is None:
        eligible = eligibility.check_eligibility(state, forward_batch)
        if isinstance(eligible, Refusal):
            return eligible
        return NOT_PLANNED
    setattr(forward_batch, PLAN_ENTRY, None)
    if isinstance(decided, Refusal):
        return decided
    if isinstance(decided, Exception):
        raise decided
    if not state.front and compat.attention.is_capturing():
        return eligibility.CAPTURING
    if compat.attention.get_current_backend() is not decided.backends.main_backend:
        return NOT_PLANNED
    return decided
