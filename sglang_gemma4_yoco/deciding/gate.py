"""May this batch take the fast path? One reason for every refusal.

A wrong yes corrupts answers silently, a wrong no costs time. So everything is refused that is not
known to read only the kept rows, and a batch whose host-side lengths are not plain lists is
refused too. Only host fields that are the same on every rank are looked at.

A field or argument that the installed SGLang does not have counts as unset. Where it should have
it (a newer release may have renamed it) no batch of the server is admitted: ``seams.unseen``, asked
once.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any, NamedTuple

from sglang_gemma4_yoco import seams, settings
from sglang_gemma4_yoco.cutting import fallback
from sglang_gemma4_yoco.cutting.donor import first_shared_layer
from sglang_gemma4_yoco.deciding import arguments, backends, quantised, threshold
from sglang_gemma4_yoco.deciding.rows import KeptRows
from sglang_gemma4_yoco.deciding.threshold import TailCost
from sglang_gemma4_yoco.served import ServedModel

OFF = f"{settings.SWITCH}=0"
NO_SHARED_LAYERS = "the model has no KV-shared tail"
CAPTURING = "a CUDA graph is being captured"
PIPELINE = "pipeline parallelism (--pp-size) is not supported"
CAPTURE_IN_TAIL = "hidden states behind the cut are captured"
UNKNOWN_LENGTHS = "the lengths of the batch are not known on the host"
NOTHING_TO_SKIP = "every row of the batch is read"
TOO_LITTLE = "too few rows could be skipped"
IMAGE_LOGPROBS = "input logprobs of a multimodal prompt"
HIDDEN_STATES = "hidden states of all rows are returned"
SPECULATIVE = "speculative decoding"
DP_ATTENTION = "data-parallel attention"
SEQUENCE_PARALLEL = "sequence parallelism"
CONTEXT_PARALLEL = "context parallelism"
EXPERT_PARALLEL = "expert parallelism"
TWO_BATCH_OVERLAP = "two-batch overlap"
LORA = "LoRA"
EMBEDDINGS = "embeddings"
HOOKS = "forward hooks, which may read any row"
OFFLOADED = "weights that come to the device for their layer's own forward only"
FOREIGN_CACHE = "a cache that may load K and V while layers run"
ONE_KERNEL = "one kernel in the place of the model's layers"
NO_MODE = "the batch has no forward mode"
# Not the package's affair, but it would be taken for one: what stock answers there is the measure.
WRONG_REPLAYS = (
    f"{seams.POSITIONS_VARIABLE} beside prefill CUDA graphs makes SGLang's own answers wrong: "
    "unset it"
)
_OTHER_MODE = "forward mode "

# What an operator need not hear of: such a batch is no prefill, or has nothing worth skipping; and
# embeddings of these models end SGLang's own server, whose error should be the last line.
_NO_NEWS = frozenset({NOTHING_TO_SKIP, TOO_LITTLE, CAPTURING, EMBEDDINGS})

# A set field -> the reason. Whoever sets one reads, or lays out, more rows than the last ones.
_REFUSING_FIELDS = {
    "spec_info": SPECULATIVE,
    "return_hidden_states_before_norm": HIDDEN_STATES,
    "return_pooled_hidden_states": "pooled hidden states",
    "dimensions": EMBEDDINGS,
    "token_indices_to_pool": "setwise pooling",
    "decision_layouts": "setwise pooling",
    "multi_item_delimiter_indices": "multi-item scoring",
    "token_type_ids": "token type ids",
    "input_embeds": "input embeddings",
    "replace_embeds": "replaced embeddings",
    "encoder_lens": "an encoder-decoder batch",
    "global_num_tokens_cpu": DP_ATTENTION,
    "_original_forward_mode": DP_ATTENTION,
    "attn_tp_sequence_sharded": SEQUENCE_PARALLEL,
    "attn_cp_metadata": CONTEXT_PARALLEL,
    "attn_dcp_metadata": CONTEXT_PARALLEL,
    "dcp_kv_mask": CONTEXT_PARALLEL,
    "kv_loc_cols": TWO_BATCH_OVERLAP,
    "tbo_split_seq_index": TWO_BATCH_OVERLAP,
    "tbo_parent_token_range": TWO_BATCH_OVERLAP,
    "tbo_children": TWO_BATCH_OVERLAP,
    "full_prefill_cuda_graph_capture": CAPTURING,
    "encoder_swa_replay": "sliding-window replay",
    "engram_history": "n-gram embeddings",
    "ngram_embedding_info": "n-gram embeddings",
}

# NULL captures nothing and LAST the last row of each request; FULL reads every row.
_LAST_ROW_CAPTURES = (seams.CaptureHiddenMode.NULL, seams.CaptureHiddenMode.LAST)

# Frozen-KV MTP captures FULL, and of it reads the last row of each prompt: its draft model has no
# K/V of its own that prompt rows would have to fill, and attends to the target's.
_LAST_ROW_DRAFTS = ("FROZEN_KV_MTP",)

# With one of these set, a FULL capture may be a request's wish to see every row.
_HIDDEN_STATE_ARGUMENTS = (
    "enable_return_hidden_states",
    "enable_return_aux_hidden_states",
    "return_hidden_states_mode",
)

# A server argument that is set -> the reason.
_REFUSING_ARGUMENTS = {
    "enable_deterministic_inference": "deterministic inference",
    "enable_dp_attention": DP_ATTENTION,
    "enable_dp_lm_head": DP_ATTENTION,
    "enable_dense_mlp_attn_tp": DP_ATTENTION,
    "moe_dense_tp_size": DP_ATTENTION,
    "enable_layernorm_sp": SEQUENCE_PARALLEL,
    "enable_attn_tp_input_scattered": SEQUENCE_PARALLEL,
    "disable_attn_tp_gather": SEQUENCE_PARALLEL,
    "enable_prefill_cp": CONTEXT_PARALLEL,
    "enable_kv_cache_sharding": CONTEXT_PARALLEL,
    "enable_quant_communications": "all-reduces that round prefill otherwise than decode",
    "elastic_ep_backend": EXPERT_PARALLEL,
    "enable_two_batch_overlap": TWO_BATCH_OVERLAP,
    "enable_single_batch_overlap": "single-batch overlap",
    "enable_pdmux": "PD multiplexing",
    "forward_hooks": HOOKS,
    "debug_tensor_dump_output_folder": HOOKS,
    "msprobe_dump_config": HOOKS,
    "enable_lora": LORA,
    "cpu_offload_gb": OFFLOADED,
    "enable_unified_memory": "pools of K and V that share and move their memory",
    "enable_page_major_kv_layout": "K and V that lie page by page",
    "enable_lmcache": FOREIGN_CACHE,
    "enable_flexkv": FOREIGN_CACHE,
    "enable_unified_cache_external_linker": FOREIGN_CACHE,
    "radix_cache_backend": FOREIGN_CACHE,
    "dllm_algorithm": "a diffusion language model's forward modes",
    "enable_nvidia_megakernel": ONE_KERNEL,
    "enable_amd_monokernel": ONE_KERNEL,
    "use_ray": "ranks that Ray places, on several machines it may be",
}
# A server argument above one -> the reason.
_REFUSING_SIZES = {
    "pp_size": PIPELINE,
    "attn_dp_size": DP_ATTENTION,
    "attn_cp_size": CONTEXT_PARALLEL,
    "dcp_size": CONTEXT_PARALLEL,
    "ep_size": EXPERT_PARALLEL,
    "moe_dp_size": EXPERT_PARALLEL,
    "dwdp_size": EXPERT_PARALLEL,
    # A batch is cut by all ranks or by none; on one machine they share one installation.
    "nnodes": "ranks on several machines",
}
# Those that ``server_reason`` asks for by name.
_OTHER_ARGUMENTS = (
    "speculative_algorithm",
    "disaggregation_mode",
    "offload_group_size",
)


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


def server_reason() -> str | None:
    """Why no batch of this server may take the fast path, or None. Constant for a server."""
    argument = seams.server_arguments()
    if argument is None:
        return None
    if seams.prefill_graph() is not None and seams.copies_positions():
        return WRONG_REPLAYS
    if argument("speculative_algorithm") not in (None, *_LAST_ROW_DRAFTS):
        return SPECULATIVE
    if argument("speculative_algorithm") and any(map(argument, _HIDDEN_STATE_ARGUMENTS)):
        return f"{HIDDEN_STATES}, beside speculative decoding"
    if argument("speculative_algorithm") and argument("disaggregation_mode") not in (None, "null"):
        return f"{SPECULATIVE} beside prefill-decode disaggregation"  # not shown
    for name, reason in _REFUSING_ARGUMENTS.items():
        if argument(name):
            return reason
    for name, reason in _REFUSING_SIZES.items():
        if (argument(name) or 1) > 1:
            return reason
    if (argument("offload_group_size") or 0) > 0:  # -1 is none, and one layer a group
        return OFFLOADED
    try:
        unjudged = seams.set_arguments(but_for=arguments.JUDGED | _judged_arguments())
    except seams.SeamError as unlisted:
        return str(unlisted)
    if unjudged:
        return f"{unjudged[0]} is set, an argument that this version has not judged"
    return None


def _judged_arguments() -> frozenset[str]:
    """The server arguments that are judged here."""
    return frozenset(
        (*_OTHER_ARGUMENTS, *_HIDDEN_STATE_ARGUMENTS, *_REFUSING_ARGUMENTS, *_REFUSING_SIZES)
    )


def model_reason(model: Any) -> str | None:
    """Why the layers of this model cannot be cut, or None. Constant for a model."""
    if first_shared_layer(model.config) is None:
        return NO_SHARED_LAYERS
    return None if seams.holds_all_layers(model) else PIPELINE


def unseen_reason() -> str | None:
    """Why nothing that is judged here can be relied on in this SGLang, or None."""
    return seams.unseen(sorted(_judged_arguments()), _REFUSING_FIELDS)


def constant_reason(model: Any) -> str | None:
    """Why no batch of this process may take the fast path, or None."""
    reason = unseen_reason() or server_reason() or model_reason(model)
    if reason is not None:
        return reason
    first = first_shared_layer(model.config)
    assert first is not None, "a model without a tail has been refused"
    return quantised.coupled_reason(model, first)


def is_news(reason: str) -> bool:
    """Whether a reason tells an operator something; it is counted in any case."""
    return reason not in _NO_NEWS and not reason.startswith(_OTHER_MODE)


def is_multimodal(forward_batch: Any) -> bool:
    """Whether some request brings images, video or audio.

    SGLang puts their embeddings in place of the inputs once the batch has been planned.
    """
    return getattr(forward_batch, "mm_input_embeds", None) is not None or any(
        inputs is not None for inputs in getattr(forward_batch, "mm_inputs", None) or ()
    )


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


def _fields(forward_batch: Any, values: tuple[object, ...]) -> str | None:
    # What is judged begins with the refusing fields.
    for value, reason in zip(values, _REFUSING_FIELDS.values(), strict=False):
        if value is not None and value is not False:
            return reason
    algorithm = getattr(forward_batch, "spec_algorithm", None)
    speculates = algorithm is not None and not algorithm.is_none()
    if speculates and getattr(algorithm, "name", None) not in _LAST_ROW_DRAFTS:
        return SPECULATIVE
    capture = getattr(forward_batch, "capture_hidden_mode", None)
    if capture is not None and capture not in _LAST_ROW_CAPTURES and not speculates:
        return HIDDEN_STATES
    if any(adapter is not None for adapter in getattr(forward_batch, "lora_ids", None) or ()):
        return LORA
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


def _rows(known: ServedModel, forward_batch: Any, kept: KeptRows, unread: bool) -> str | None:
    total, rows = kept.total, kept.kept
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
    if read == 0 or (known.graphs is not None and known.graphs.size_for(kept) is not None):
        return TailCost.NOTHING
    return TailCost.LAUNCHES if known.on_gpu else TailCost.ARITHMETIC


def _backend(known: ServedModel) -> str | None:
    """Why the tail cannot run in a forward on the current attention backend, or None."""
    current = seams.current_attn_backend()
    # Outside of a forward there is none, and nothing is computed; the runner's own was looked at
    # when it was built.
    if current is None or current is known.backend:
        return None
    return backends.why_not_tail(current)


def standing_reason(known: ServedModel) -> str | None:
    """Why every batch would run as stock now, whatever it holds; None if some may be cut."""
    if not settings.current.enabled:
        return OFF
    return _failures() or known.constant_reason or _captures(known)


def ineligible_reason(known: ServedModel, forward_batch: Any) -> str | None:
    """Why this forward must run as stock, or None when it may skip rows in the shared layers."""
    verdict = judge(known, forward_batch)
    return verdict if isinstance(verdict, str) else None


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
    reason = _mode(forward_batch) or standing_reason(known) or _graph()
    if reason is not None:
        return reason
    seen = judged(forward_batch)
    reason = _fields(forward_batch, seen) or _lengths(forward_batch)
    if reason is not None:
        return reason
    kept, unread = kept_rows(forward_batch), is_unread(forward_batch)
    return (
        _rows(known, forward_batch, kept, unread)
        or _backend(known)
        or Admission(kept, unread, seen)
    )
