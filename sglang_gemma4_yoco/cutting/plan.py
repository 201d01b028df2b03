"""One batch, decided once: refused for a reason, or which rows are kept and how its tail runs.

That is when the runner plans its attention, before the first layer; the tail's is planned with it.
The gate is asked there and not again.

Between that and the model's call SGLang runs code of its own, so this is looked at when the model
is called:

- the object itself: a batch that was planned by another way, or is a copy, is not this one;
- the fields that the gate judged or the rows come from: each must still hold the very object that
  it held. Of these SGLang sets one in between, context parallelism's, in some releases. A
  multimodal prompt's inputs and embeddings do change on the way; they matter for suffixes alone,
  and are asked for again there;
- whether a graph is being recorded or replayed, which is a span and no property of the batch: on
  AMD SGLang enters one after planning;
- the current attention backend, which must be the one that was planned on.

If anything is different the gate is asked once more, and an admitted batch counts as not planned.

The server's arguments, the model and its weights are constant. The switch, the threshold and the
count of failures decide what is wanted, not what is right, and count as they were when the batch
was planned. For the same reason a refusal stands: what has changed since then can only make it
needless, never wrong.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.attending.attention import OwnBackend
from sglang_gemma4_yoco.attending.graphs import Replay
from sglang_gemma4_yoco.cutting import fallback
from sglang_gemma4_yoco.cutting.tail import Tail
from sglang_gemma4_yoco.deciding import gate
from sglang_gemma4_yoco.deciding.gate import Admission
from sglang_gemma4_yoco.served import ServedModel
from sglang_gemma4_yoco.telling import report

NOT_PLANNED = "the tail's attention was not planned for this batch"


@dataclass(frozen=True)
class Refusal:
    """A batch that runs as stock.

    Attributes:
        batch: the batch.
        reason: why, in one line.
    """

    batch: Any
    reason: str


@dataclass(frozen=True)
class Plan:
    """A batch that is cut.

    Attributes:
        batch: the batch.
        judged: what the gate saw of it.
        tail: its kept rows, and the batch as the tail sees it.
        attention: what the tail attends on.
        replay: its recorded tail, planned; None if its layers are launched.
    """

    batch: Any
    judged: tuple[object, ...]
    tail: Tail
    attention: OwnBackend
    replay: Replay | None = None

    @classmethod
    def of(cls, known: ServedModel, forward_batch: Any, admission: Admission) -> Plan:
        """The plan of an eligible batch, its attention planned. The batch is not changed."""
        attention = known.attention
        assert attention is not None
        tail = Tail.of(forward_batch, admission.kept, admission.unread, attention.tail)
        replay = None if known.graphs is None else known.graphs.planned(forward_batch, tail)
        if replay is None and not tail.unread:
            attention.plan(forward_batch, tail.fields)
        return cls(forward_batch, admission.judged, tail, attention, replay)

    def still_holds(self) -> bool:
        """Whether nothing has come about since that this plan does not know of."""
        now = gate.judged(self.batch)
        return (
            all(map(operator.is_, self.judged, now))
            and (self.tail.kept.one_per_request or not gate.is_multimodal(self.batch))
            and not seams.is_capturing()
            and seams.current_attn_backend() is self.attention.main
        )


def plan_ahead(known: ServedModel, forward_batch: Any) -> None:
    """The runner has planned this batch's attention: decide, and remember what was decided."""
    known.planned = None
    try:
        planned = ahead(known, forward_batch)
    except Exception as failure:
        if not fallback.is_alone():
            raise  # the other ranks go on with a tail
        report.failure("Gemma 4 fast prefill: planning the tail's attention failed", failure)
    else:
        known.planned = planned


def plan_of(known: ServedModel, forward_batch: Any) -> Plan | None:
    """The plan that was made ahead for this very batch object, if it was not refused."""
    planned = known.planned
    if isinstance(planned, Plan) and planned.batch is forward_batch:
        return planned
    return None


def ahead(known: ServedModel, forward_batch: Any) -> Plan | Refusal:
    """Decide before the first layer, and plan the tail on the backend of its own."""
    verdict = gate.judge(known, forward_batch)
    if isinstance(verdict, str):
        return Refusal(forward_batch, verdict)
    return Plan.of(known, forward_batch, verdict)


def at_the_forward(known: ServedModel, forward_batch: Any) -> Plan | Refusal:
    """What was decided ahead, or what can still be decided when the model is called."""
    planned: Plan | Refusal | None = known.planned
    if (
        planned is not None
        and planned.batch is forward_batch
        and (isinstance(planned, Refusal) or planned.still_holds())
    ):
        return planned
    verdict = gate.judge(known, forward_batch)
    return Refusal(forward_batch, verdict if isinstance(verdict, str) else NOT_PLANNED)
