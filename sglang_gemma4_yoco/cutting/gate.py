"""May this batch take the fast path, and how? Decided in the order of time.

- *When the server starts*: why no batch of it may (``constant_reason``).
- *When the runner plans a batch's attention*, before the first layer (``plan_ahead``): the batch is
  refused for one reason, or it gets its ``Plan``, and the tail's attention is planned with it.
- *When the model is called* (``at_the_forward``): whether the plan still holds. Between the two
  SGLang runs code of its own.

A wrong yes corrupts answers silently, a wrong no costs time. So everything is refused that is not
known to read only the kept rows, and a batch whose host-side lengths are not plain lists is
refused too. Only host fields that are the same on every rank are looked at.

A field that the installed SGLang does not have counts as unset. Where it should have it (a newer
release may have renamed it) no batch of the server is admitted: ``seams.unseen``, asked once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

from sglang_gemma4_yoco import report, seams, settings
from sglang_gemma4_yoco.core import limits
from sglang_gemma4_yoco.cutting import fallback
from sglang_gemma4_yoco.cutting.served import ServedModel
from sglang_gemma4_yoco.deciding import threshold
from sglang_gemma4_yoco.deciding.rows import KeptRows
from sglang_gemma4_yoco.deciding.threshold import TailCost
from sglang_gemma4_yoco.tail.attention import OwnBackend
from sglang_gemma4_yoco.tail.batch import Tail
from sglang_gemma4_yoco.tail.donor import first_shared_layer
from sglang_gemma4_yoco.tail.graphs import Replay

OFF = f"{settings.SWITCH}=0"
NO_SHARED_LAYERS = "the model has no KV-shared tail"
CAPTURING = "a CUDA graph is being captured"
CAPTURE_IN_TAIL = "hidden states behind the cut are captured"
UNKNOWN_LENGTHS = "the lengths of the batch are not known on the host"
NOTHING_TO_SKIP = "every row of the batch is read"
TOO_LITTLE = "too few rows could be skipped"
IMAGE_LOGPROBS = "input logprobs of a multimodal prompt"
EMBEDDINGS = "embeddings"
NO_MODE = "the batch has no forward mode"
REPLAYED = "SGLang replays it from a recorded prefill to its end"
NOT_RECORDED = "SGLang replays its front, and its tail is not recorded"
REPLAYED_MEDIA = "SGLang replays the front of a multimodal prompt"
NOT_PLANNED = "the tail's attention was not planned for this batch"
_OTHER_MODE = "forward mode "

# What an operator need not hear of: such a batch is no prefill, or has nothing worth skipping; and
# embeddings of these models end SGLang's own server, whose error should be the last line.
_NO_NEWS = frozenset({NOTHING_TO_SKIP, TOO_LITTLE, CAPTURING, EMBEDDINGS, REPLAYED})

# A set field -> the reason. Whoever sets one reads, or lays out, more rows than the last ones.
_REFUSING_FIELDS = {
    "spec_info": limits.SPECULATIVE,
    "return_hidden_states_before_norm": limits.HIDDEN_STATES,
    "return_pooled_hidden_states": "pooled hidden states",
    "dimensions": EMBEDDINGS,
    "token_indices_to_pool": "setwise pooling",
    "decision_layouts": "setwise pooling",
    "multi_item_delimiter_indices": "multi-item scoring",
    "token_type_ids": "token type ids",
    "input_embeds": "input embeddings",
    "replace_embeds": "replaced embeddings",
    "encoder_lens": "an encoder-decoder batch",
    "global_num_tokens_cpu": limits.DP_ATTENTION,
    "_original_forward_mode": limits.DP_ATTENTION,
    "attn_tp_sequence_sharded": limits.SEQUENCE_PARALLEL,
    "attn_cp_metadata": limits.CONTEXT_PARALLEL,
    "attn_dcp_metadata": limits.CONTEXT_PARALLEL,
    "dcp_kv_mask": limits.CONTEXT_PARALLEL,
    "kv_loc_cols": limits.TWO_BATCH_OVERLAP,
    "tbo_split_seq_index": limits.TWO_BATCH_OVERLAP,
    "tbo_parent_token_range": limits.TWO_BATCH_OVERLAP,
    "tbo_children": limits.TWO_BATCH_OVERLAP,
    "full_prefill_cuda_graph_capture": CAPTURING,
    "encoder_swa_replay": "sliding-window replay",
    "engram_history": "n-gram embeddings",
    "ngram_embedding_info": "n-gram embeddings",
}

# NULL captures nothing and LAST the last row of each request; FULL reads every row.
_LAST_ROW_CAPTURES = (seams.CaptureHiddenMode.NULL, seams.CaptureHiddenMode.LAST)


# -- when the server starts ------------------------------------------------------------------------


def constant_reason(model: Any) -> str | None:
    """Why no batch of this process may take the fast path, or None."""
    reason = unseen_reason() or limits.server_reason() or model_reason(model)
    if reason is not None:
        return reason
    first = first_shared_layer(model.config)
    assert first is not None, "a model without a tail has been refused"
    return limits.linear_reason(model, first)


def unseen_reason() -> str | None:
    """Why the fields that are judged here cannot be relied on in this SGLang, or None."""
    return seams.unseen(_REFUSING_FIELDS)


def model_reason(model: Any) -> str | None:
    """Why the layers of this model cannot be cut, or None. Constant for a model."""
    if first_shared_layer(model.config) is None:
        return NO_SHARED_LAYERS
    return None if seams.holds_all_layers(model) else limits.PIPELINE


def is_news(reason: str) -> bool:
    """Whether a reason tells an operator something; it is counted in any case."""
    return reason not in _NO_NEWS and not reason.startswith(_OTHER_MODE)


# -- when the runner plans a batch's attention -----------------------------------------------------


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
        front_replayed: SGLang replays its front.
    """

    batch: Any
    judged: tuple[object, ...]
    tail: Tail
    attention: OwnBackend
    replay: Replay | None = None
    front_replayed: bool = False

    @classmethod
    def of(cls, known: ServedModel, forward_batch: Any, admission: Admission) -> Plan:
        """The plan of an eligible batch, its attention planned. The batch is not changed."""
        attention = known.attention
        assert attention is not None
        tail = Tail.of(forward_batch, admission.kept, admission.unread, attention.tail)
        replay = None
        if not tail.unread:  # else there is nothing to run
            if known.graphs is not None:
                replay = known.graphs.planned(forward_batch, tail)
            if replay is None:
                attention.plan(forward_batch, tail.fields)
        front = known.replaying is forward_batch
        return cls(forward_batch, admission.judged, tail, attention, replay, front)

    def still_holds(self) -> bool:
        """Whether nothing has come about since that this plan does not know of.

        - Each field that was judged, or that the rows come from, must hold the very object that it
          held. SGLang sets one of them in between, context parallelism's, in some releases. A
          multimodal prompt's inputs and embeddings do change on the way; they matter for suffixes
          alone, and are asked for again there.
        - A graph may be recorded or replayed now; on AMD SGLang begins to after planning.
        - The current attention backend must be the one that was planned on.

        The server's arguments, the model and its weights are constant. The count of failures
        decides what is wanted, not what is right, and counts as it was. For the same reason a
        refusal stands: what has changed since can only make it needless, never wrong.
        """
        now = judged(self.batch)
        return (
            all(map(operator.is_, self.judged, now))
            and (self.tail.kept.one_per_request or not is_multimodal(self.batch))
            and (self.front_replayed or not seams.is_capturing())
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
    verdict = judge(known, forward_batch)
    if isinstance(verdict, str):
        return Refusal(forward_batch, verdict)
    return Plan.of(known, forward_batch, verdict)


# -- may it be cut? --------------------------------------------------------------------------------


#: What a reason or the rows may come from. Left out are a multimodal prompt's inputs, which SGLang
#: takes from the batch on the way to the text model, leaving their embeddings there; and tensors on
#: the device, of which the runner's own plan is made as well.
_JUDGED = (
    *_REFUSING_FIELDS,
    "forward_mode",
    "capture_hidden_mode",
    "spec_algorithm",
    "lora_ids",
    "contains_last_prefill_chunk",
    "return_logprob",
    "extend_logprob_start_lens_cpu",
    "extend_seq_lens_cpu",
    "extend_prefix_lens_cpu",
    "extend_num_tokens",
)


class Admission(NamedTuple):
    """What the gate found out about a batch that may be cut.

    Attributes:
        kept: the rows whose logits the sampler and the logprobs read.
        unread: nobody reads any of them.
        judged: what it looked at; see ``judged``.
    """

    kept: KeptRows
    unread: bool
    judged: tuple[object, ...]


def judged(forward_batch: Any) -> tuple[object, ...]:
    """The very objects that a batch holds in those fields."""
    return tuple(map(getattr, repeat(forward_batch), _JUDGED, repeat(None)))


def judge(known: ServedModel, forward_batch: Any) -> str | Admission:
    """May this forward skip rows in the shared layers?

    Args:
        known: what is known of the ``Gemma4TextModel``.
        forward_batch: the batch it is about to run, SGLang's ``ForwardBatch``.

    Returns:
        What was found out of it; or why it must run as stock, in one line, fit for a log and as a
        metric's label.
    """
    # The mode first: it is what refuses an ineligible forward most often.
    replayed = known.replaying is forward_batch
    reason = _mode(forward_batch) or standing_reason(known)
    if reason is None and not replayed:
        reason = _graph()
    if reason is not None:
        return reason
    seen = judged(forward_batch)
    reason = _fields(forward_batch, seen) or _lengths(forward_batch)
    if reason is not None:
        return reason
    kept, unread = kept_rows(forward_batch), is_unread(forward_batch)
    if replayed:
        reason = _replayed(known, kept, unread) or _media(forward_batch)
    return (
        reason
        or _rows(known, forward_batch, kept, unread)
        or _backend(known)
        or Admission(kept, unread, seen)
    )


def ineligible_reason(known: ServedModel, forward_batch: Any) -> str | None:
    """Why this forward must run as stock, or None when it may skip rows in the shared layers."""
    verdict = judge(known, forward_batch)
    return verdict if isinstance(verdict, str) else None


def standing_reason(known: ServedModel) -> str | None:
    """Why every batch would run as stock now, whatever it holds; None if some may be cut."""
    if not settings.current.enabled:
        return OFF
    return _failures() or known.constant_reason or _captures(known)


def _mode(forward_batch: Any) -> str | None:
    mode = forward_batch.forward_mode
    if mode is None:
        return NO_MODE
    known = isinstance(mode, seams.ForwardMode)
    if known and mode not in (seams.ForwardMode.EXTEND, seams.ForwardMode.MIXED):
        return f"{_OTHER_MODE}{mode.name}"
    # Whatever is not SGLang's own enum must at least answer SGLang's own question.
    if not known and not mode.is_extend_without_speculative():
        return "the batch is no plain extend"
    return None


def _failures() -> str | None:
    return fallback.GIVEN_UP if fallback.given_up() else None


def _captures(known: ServedModel) -> str | None:
    # Index i captures the input of layer i, which is all rows' before the cut alone.
    captured = known.model.layers_to_capture
    if captured and max(captured) >= known.first_shared - 1:
        return CAPTURE_IN_TAIL
    return None


def _graph() -> str | None:
    return CAPTURING if seams.is_capturing() else None


def _replayed(known: ServedModel, kept: KeptRows, unread: bool) -> str | None:
    """Why a prefill that SGLang replays cannot leave its recording by the door, or None."""
    if known.doors.closed is not None:
        return REPLAYED
    recorded = known.graphs is not None and known.graphs.size_for(kept) is not None
    return None if unread or recorded else NOT_RECORDED


def _fields(forward_batch: Any, values: tuple[object, ...]) -> str | None:
    # What is judged begins with the refusing fields.
    for value, reason in zip(values, _REFUSING_FIELDS.values(), strict=False):
        if value is not None and value is not False:
            return reason
    algorithm = getattr(forward_batch, "spec_algorithm", None)
    speculates = algorithm is not None and not algorithm.is_none()
    if speculates and getattr(algorithm, "name", None) not in limits.LAST_ROW_DRAFTS:
        return limits.SPECULATIVE
    capture = getattr(forward_batch, "capture_hidden_mode", None)
    if capture is not None and capture not in _LAST_ROW_CAPTURES and not speculates:
        return limits.HIDDEN_STATES
    if any(adapter is not None for adapter in getattr(forward_batch, "lora_ids", None) or ()):
        return limits.LORA
    return None


def _lengths(forward_batch: Any) -> str | None:
    lens = forward_batch.extend_seq_lens_cpu
    prefixes = forward_batch.extend_prefix_lens_cpu
    if type(lens) is not list or type(prefixes) is not list:
        return UNKNOWN_LENGTHS
    total = sum(lens)
    input_ids = getattr(forward_batch, "input_ids", None)
    if (
        len(lens) != len(prefixes)
        or len(lens) != len(forward_batch.seq_lens)
        or min(lens, default=0) < 1
        or total != forward_batch.extend_num_tokens
        or (input_ids is not None and total != len(input_ids))
    ):
        return UNKNOWN_LENGTHS
    if forward_batch.return_logprob:
        starts = forward_batch.extend_logprob_start_lens_cpu
        if type(starts) is not list or len(starts) != len(lens):
            return UNKNOWN_LENGTHS
    return None


def kept_rows(forward_batch: Any) -> KeptRows:
    """The rows of an extend batch whose logits the sampler and the logprobs read."""
    return KeptRows.suffixes(
        forward_batch.extend_seq_lens_cpu,
        forward_batch.extend_prefix_lens_cpu,
        forward_batch.extend_logprob_start_lens_cpu if forward_batch.return_logprob else None,
    )


def is_unread(forward_batch: Any) -> bool:
    """Whether nobody reads any row of an eligible batch: it only fills the cache.

    SGLang throws away what it samples from an unfinished chunk. It counts running requests that
    decode along in a mixed batch as unfinished as well, though their rows are read; those have one
    new token each, so a batch with such a request counts as read.
    """
    capture = getattr(forward_batch, "capture_hidden_mode", None)
    return (
        not getattr(forward_batch, "contains_last_prefill_chunk", True)
        and min(forward_batch.extend_seq_lens_cpu) > 1
        and (capture is None or capture == seams.CaptureHiddenMode.NULL)
        and not _wants_input_logprobs(forward_batch)
    )


def _wants_input_logprobs(forward_batch: Any) -> bool:
    if not forward_batch.return_logprob:
        return False
    return any(
        start < n
        for start, n in zip(
            forward_batch.extend_logprob_start_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
            strict=True,
        )
    )


def _rows(known: ServedModel, forward_batch: Any, kept: KeptRows, unread: bool) -> str | None:
    total, rows = kept.total, kept.count
    if rows == total:
        return NOTHING_TO_SKIP
    read = 0 if unread else rows
    minimum = settings.current.min_skipped_rows
    if not threshold.pays(total, read, minimum, tail_cost(known, kept, read)):
        return TOO_LITTLE
    # An image's rows attend in both directions, which the suffix's attention does not know of.
    # The last row of a request has nothing after it, so for it that makes no difference.
    spread = not kept.one_per_request
    return IMAGE_LOGPROBS if spread and is_multimodal(forward_batch) else None


def tail_cost(known: ServedModel, kept: KeptRows, read: int) -> TailCost:
    """What the tail of a batch would cost besides its rows.

    Args:
        kept: the rows that it would run on.
        read: how many of them somebody reads.
    """
    if read == 0:
        return TailCost.NOTHING
    if known.graphs is not None and known.graphs.size_for(kept) is not None:
        beside_replays = known.on_gpu and known.replaying is not None
        return TailCost.PLANNED if beside_replays else TailCost.NOTHING
    return TailCost.LAUNCHES if known.on_gpu else TailCost.ARITHMETIC


def is_multimodal(forward_batch: Any) -> bool:
    """Whether some request brings images, video or audio.

    SGLang puts their embeddings in place of the inputs once the batch has been planned.
    """
    return getattr(forward_batch, "mm_input_embeds", None) is not None or any(
        inputs is not None for inputs in getattr(forward_batch, "mm_inputs", None) or ()
    )


def _media(forward_batch: Any) -> str | None:
    # The tail's per-layer inputs are made anew there, from ids.
    return REPLAYED_MEDIA if is_multimodal(forward_batch) else None


def _backend(known: ServedModel) -> str | None:
    """Why the tail cannot run in a forward on the current attention backend, or None."""
    current = seams.current_attn_backend()
    # Outside of a forward there is none, and nothing is computed; the runner's own was looked at
    # when it was built.
    if current is None or current is known.backend:
        return None
    return limits.tail_backend_reason(current)


# -- when the model is called ----------------------------------------------------------------------


def at_the_forward(known: ServedModel, forward_batch: Any) -> Plan | Refusal:
    """What was decided ahead, or what can still be decided when the model is called."""
    planned: Plan | Refusal | None = known.planned
    if (
        planned is not None
        and planned.batch is forward_batch
        and (isinstance(planned, Refusal) or planned.still_holds())
    ):
        return planned
    verdict = judge(known, forward_batch)
    return Refusal(forward_batch, verdict if isinstance(verdict, str) else NOT_PLANNED)
