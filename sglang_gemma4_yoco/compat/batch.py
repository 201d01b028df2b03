"""SGLang's batch, its modes, and the construction of decode steps."""

from typing import Any

import torch
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as SpeculativeAlgorithm

CaptureHiddenMode = forward_batch_info.CaptureHiddenMode
ForwardBatch, ForwardMode = forward_batch_info.ForwardBatch, forward_batch_info.ForwardMode
#: True if SGLang marks batches in which no prompt ends, as 0.5.23 does. Unnecessary without 0.5.22.
MARKS_CHUNKS = hasattr(ForwardBatch, "contains_last_prefill_chunk")


def mark_chunk(batch: Any, *, finishes: bool) -> None:
    """Mark whether some prompt ends in a batch, if this SGLang marks batches."""
    if MARKS_CHUNKS:
        batch.contains_last_prefill_chunk = finishes


def get_hidden_state_mode() -> Any:
    """Return the ``CaptureHiddenMode`` of every batch of this server."""
    return forward_batch_info.get_server_return_hidden_states_mode()


def make_decode_step(requests: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor) -> Any:
    """Return a decode step of these rows, one per request, that writes no K and V.

    It has no attention metadata.

    Args:
        requests: [n], their indices into ``req_to_token``.
        lengths: [n], tokens of each request.
        positions: [n].
    """
    size = requests.shape[0]
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        input_ids=positions,  # only its shape is read
        req_pool_indices=requests,
        seq_lens=lengths,
        seq_lens_sum=size,
        out_cache_loc=None,
        positions=positions,
    )
