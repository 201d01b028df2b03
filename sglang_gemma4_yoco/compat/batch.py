"""Everything that depends on the installed SGLang, and the check that it is there.

Supported is SGLang 0.5.17 and later; ``plugin`` checks that before it imports this module. Where
these releases differ, the difference is handled here.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.debug_utils.dumper import dumper as dumper
from sglang.srt.kv_canary.runner.canary_manager import CanaryManager as CanaryManager
from sglang.srt.layers.linear import LinearBase as LinearBase
from sglang.srt.managers.scheduler import Scheduler as Scheduler
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.model_runner import ModelRunner as ModelRunner
from sglang.srt.models import gemma4_causal as gemma4_causal

CaptureHiddenMode = forward_batch_info.CaptureHiddenMode
ForwardBatch, ForwardMode = forward_batch_info.ForwardBatch, forward_batch_info.ForwardMode

# From 0.5.22 on Gemma 4's layers pass a residual stream on in the batch. In 0.5.21 only other
# models' layers do.
residual_batch: Any = getattr(gemma4_causal, "residual_batch", None)
HAS_RESIDUAL_STREAM = residual_batch is not None


def make_decode_batch(**fields: Any) -> Any:
    """A decode step whose layers write no K and V; its residual is not started."""
    size = fields["req_pool_indices"].shape[0]
    fields |= {"batch_size": size, "seq_lens_sum": size, "out_cache_loc": None}
    return ForwardBatch(forward_mode=ForwardMode.DECODE, **fields)


def residual_is_written(forward_batch: Any, hidden_states: torch.Tensor) -> bool:
    """Whether ``hidden_states`` is the whole residual: no update is pending."""
    stream = getattr(forward_batch, "residual_stream", None)
    if stream is None:
        return True  # up to 0.5.21, and stand-ins: layers pass plain tensors
    if stream.pending is not None:
        return False
    return stream.residual is None or stream.residual is hidden_states


def start_residual(forward_batch: Any, hidden_states: torch.Tensor) -> None:
    """Begin the batch's residual stream with ``hidden_states``, where it has streams."""
    if HAS_RESIDUAL_STREAM:
        residual_batch.start(forward_batch)
        residual_batch.set_written(hidden_states, forward_batch)


def write_residual(forward_batch: Any, hidden_states: torch.Tensor) -> None:
    """Put ``hidden_states`` into the batch's residual stream, if it has one."""
    if getattr(forward_batch, "residual_stream", None) is not None:
        residual_batch.set_written(hidden_states, forward_batch)


def end_residual(forward_batch: Any) -> None:
    """Free the residual's memory."""
    if HAS_RESIDUAL_STREAM:
        forward_batch.residual_stream = None
