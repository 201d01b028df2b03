"""SGLang's batch, its modes, and the construction of decode steps."""

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode as CaptureHiddenMode
from sglang.srt.model_executor.forward_batch_info import ForwardBatch as ForwardBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode as ForwardMode
from sglang.srt.model_executor.forward_batch_info import (
    compute_position_torch as compute_position_torch,
)
from sglang.srt.model_executor.forward_batch_info import (
    get_server_return_hidden_states_mode as get_server_return_hidden_states_mode,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as SpeculativeAlgorithm

#: The field that is False for a batch in which no prompt ends, and whether SGLang has it, as 0.5.23
#: does. Unnecessary without 0.5.22.
CHUNK_MARK = "contains_last_prefill_chunk"
MARKS_CHUNKS = hasattr(ForwardBatch, CHUNK_MARK)
#: None, for what may be None although SGLang's annotations do not say so.
ABSENT: Any = None


def make_decode_step(
    requests: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor
) -> ForwardBatch:
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
        out_cache_loc=ABSENT,
        positions=positions,
    )
