"""SGLang's batch: its modes, and decode steps that are made here."""

from typing import Any

import torch
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as SpeculativeAlgorithm

CaptureHiddenMode = forward_batch_info.CaptureHiddenMode
ForwardBatch, ForwardMode = forward_batch_info.ForwardBatch, forward_batch_info.ForwardMode
#: Whether batches say that they finish no prompt, as in SGLang 0.5.23.
MARKS_CHUNKS = hasattr(ForwardBatch, "contains_last_prefill_chunk")


def mark_chunk(batch: Any, *, finishes: bool) -> None:
    """Mark a batch with whether some prompt ends in it, where SGLang marks its own."""
    if MARKS_CHUNKS:
        batch.contains_last_prefill_chunk = finishes


def get_captured_hidden_states() -> Any:
    """Return which hidden states every batch of this server returns, whatever its requests want."""
    return forward_batch_info.get_server_return_hidden_states_mode()


def make_decode_step(requests: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor) -> Any:
    """A decode step of these rows, one per request, whose layers write no K and V; not planned.

    Args:
        requests: [n], their rows in SGLang's table of tokens.
        lengths: [n], tokens of each.
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
