"""Eligibility of a batch, decided once, right after SGLang has made its attention metadata.

A false positive silently corrupts answers, a false negative costs time. So a batch is cut only if
it is known that only its kept rows are read, and if its lengths are plain lists on the host. The
decision depends only on host fields, which are the same on every rank. Server-wide reasons are in
``admission/``.
"""

from sglang_gemma4_yoco import compat, settings
from sglang_gemma4_yoco.compat.batch import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang_gemma4_yoco.core import worth
from sglang_gemma4_yoco.core.interfaces import Eligible as Eligible
from sglang_gemma4_yoco.core.kept_batch import REWRITTEN, KeptRows
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.refusal import Refusal

# Frequent reasons are not logged: the batch is not a prefill, or has too few rows to skip.
SPECULATIVE = Refusal("speculative decoding")
HIDDEN_STATES = Refusal("hidden states of all rows are returned")
LORA = Refusal("LoRA")
CAPTURING = Refusal("a CUDA graph is being captured", is_logged=False)
CAPTURED_LAYERS = Refusal("hidden states of layers are captured")
UNKNOWN_LENGTHS = Refusal("the lengths of the batch are not known on the host")
NOTHING_TO_SKIP = Refusal("every row of the batch is read", is_logged=False)
TOO_LITTLE = Refusal("too few rows could be skipped", is_logged=False)
IMAGE_LOGPROBS = Refusal("input logprobs of a multimodal prompt")
MEDIA = Refusal("a multimodal prompt of this model")

# Speculative decoding whose drafts read only the last row of a prompt. NGRAM drafts from the text.
# A STANDALONE draft model runs on the prompt's ids. Frozen-KV MTP attends to the target's K and V;
# it captures every row (FULL), and reads the last one of each prompt.
_CAPTURES_FULL = "FROZEN_KV_MTP"
LAST_ROW_DRAFTS = (_CAPTURES_FULL, "NGRAM", "STANDALONE")

# Field -> the reason if it is set: more rows than the last ones are then read or moved. All other
# fields are set only on servers that are refused at start, or for other models.
INELIGIBLE_FIELDS = {
    "spec_info": SPECULATIVE,
    "return_hidden_states_before_norm": HIDDEN_STATES,
    "multi_item_delimiter_indices": Refusal("multi-item scoring"),
    "token_indices_to_pool": Refusal("setwise scoring"),
    "input_embeds": Refusal("input embeddings"),
    "replace_embeds": Refusal("replaced embeddings"),
    "full_prefill_cuda_graph_capture": CAPTURING,
}

#: Fields that are read or written by a string with their name; a missing one is found at load.
FIELDS_BY_NAME = {*INELIGIBLE_FIELDS, *REWRITTEN}


def is_prefill(mode: object) -> bool:
    """Return True for a prefill's mode; by identity, because SGLang's modes equal integers."""
    return mode is ForwardMode.EXTEND or mode is ForwardMode.MIXED


def check_eligibility(state: ModelState, forward_batch: ForwardBatch) -> Eligible | Refusal:
    """Decide whether this batch may be cut.

    Args:
        forward_batch: SGLang's ``ForwardBatch``, before the model's forward.

    Returns:
        The rows to keep, or the reason why it must run as stock.
    """
    mode = forward_batch.forward_mode
    if not is_prefill(mode):
        return Refusal(f"forward mode {getattr(mode, 'name', mode)}", is_logged=False)
    if state.off_because:
        return state.off_because
    if not state.front and compat.attention.is_capturing():
        return CAPTURING
    reason = _check_fields(state, forward_batch) or _check_lengths(forward_batch)
    if reason:
        return reason
    # The rows follow from the lengths, which are known now.
    kept = find_kept_rows(forward_batch)
    intermediate = not state.chunk_readers and is_intermediate_chunk(forward_batch)
    bucket = None
    if state.captured and not intermediate:
        bucket = state.captured.bucket_for(kept)
    eligible = Eligible(kept, intermediate, bucket)
    reason = _check_rows(state, forward_batch, eligible)
    if not reason and state.front:
        reason = state.front.find_refusal(eligible, on_gpu=state.on_gpu)
    return reason or eligible


def _check_fields(state: ModelState, forward_batch: ForwardBatch) -> Refusal | None:
    for name, reason in INELIGIBLE_FIELDS.items():
        value = getattr(forward_batch, name)
        if value is not None and value is not False:  # ``in`` would compare tensors elementwise
            return reason
    # Index i captures the input of layer i, which has all rows only up to the cut layer.
    if max(getattr(state.model, "layers_to_capture", None) or (0,)) >= state.cut_layer:
        return CAPTURED_LAYERS
    drafts = _find_drafts(forward_batch)
    if drafts not in (None, *LAST_ROW_DRAFTS):
        return SPECULATIVE
    # NULL captures no row, LAST the last one of each request, FULL every row.
    last_rows = (None, CaptureHiddenMode.NULL, CaptureHiddenMode.LAST)
    if forward_batch.capture_hidden_mode not in last_rows and drafts != _CAPTURES_FULL:
        return HIDDEN_STATES
    if any(adapter is not None for adapter in forward_batch.lora_ids or ()):
        return LORA
    return None


def _find_drafts(forward_batch: ForwardBatch) -> str | None:
    """Return the server's speculative decoding algorithm, or None."""
    algorithm = forward_batch.spec_algorithm
    if algorithm is None or algorithm.is_none():
        return None
    return str(getattr(algorithm, "name", algorithm))


def _check_lengths(forward_batch: ForwardBatch) -> Refusal | None:
    lens = forward_batch.extend_seq_lens_cpu
    prefixes = forward_batch.extend_prefix_lens_cpu
    if type(lens) is not list or type(prefixes) is not list:
        return UNKNOWN_LENGTHS
    total = sum(lens)
    input_ids = forward_batch.input_ids
    if (
        not len(lens) == len(prefixes) == len(forward_batch.seq_lens)
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


def find_kept_rows(forward_batch: ForwardBatch) -> KeptRows:
    """Return the rows of an extend batch whose logits the sampler and the logprobs read."""
    lens = forward_batch.extend_seq_lens_cpu
    prefix_lens = forward_batch.extend_prefix_lens_cpu
    assert lens is not None, "the batch is eligible"
    assert prefix_lens is not None, "the batch is eligible"
    starts = None
    if forward_batch.return_logprob:
        starts = forward_batch.extend_logprob_start_lens_cpu
    return KeptRows.suffixes(lens, prefix_lens, starts)


def is_intermediate_chunk(forward_batch: ForwardBatch) -> bool:
    """Return True if no row of an eligible batch is read, because it only fills the KV cache.

    SGLang discards the token sampled from an unfinished chunk. It also counts the decoding requests
    of a mixed batch as unfinished, though their rows are read. These have one new token each, so a
    batch with a one-token request does not qualify. Speculative decoding does not qualify either: a
    draft may continue from the token sampled from a chunk. Nor does a custom logit processor:
    SGLang calls it on the logits of each chunk, and it may remember them. Third-party code may,
    too: ``ModelState.chunk_readers``.
    """
    if getattr(forward_batch, compat.batch.CHUNK_MARK, True):
        return False
    sampling = forward_batch.sampling_info
    if sampling is not None and sampling.has_custom_logit_processor:
        return False
    capture = forward_batch.capture_hidden_mode
    if capture not in (None, CaptureHiddenMode.NULL) or _find_drafts(forward_batch):
        return False
    lens = forward_batch.extend_seq_lens_cpu or ()
    if 1 in lens:
        return False
    # SGLang limits the starts to the lengths.
    return not forward_batch.return_logprob or forward_batch.extend_logprob_start_lens_cpu == lens


def _check_rows(
    state: ModelState, forward_batch: ForwardBatch, eligible: Eligible
) -> Refusal | None:
    kept = eligible.kept
    if kept.count == kept.total:
        return NOTHING_TO_SKIP
    read = kept.count
    if eligible.is_intermediate_chunk:
        read = 0

    if not worth.is_worth_cutting(
        kept.total,
        read,
        settings.current.min_skipped_rows,
        eager=eligible.bucket is None and read > 0,
        on_gpu=state.on_gpu,
    ):
        return TOO_LITTLE
    if not is_multimodal(forward_batch):
        return None
    if not state.adapter.CUTS_MEDIA:
        return MEDIA
    # Image rows attend bidirectionally, a suffix's attention is causal. Both agree for the last row
    # of a request: no row follows it.
    if not kept.one_per_request:
        return IMAGE_LOGPROBS
    return None


def is_multimodal(forward_batch: ForwardBatch) -> bool:
    """Return True if some request has images, video or audio.

    Before its forward a batch has ``mm_inputs``; then SGLang sets ``mm_input_embeds`` instead.
    """
    if forward_batch.mm_input_embeds is not None:
        return True
    return any(request is not None for request in forward_batch.mm_inputs or ())
