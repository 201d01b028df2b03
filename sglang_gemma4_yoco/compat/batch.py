"""SGLang's batch: its modes, decode steps made here, the residual stream that it carries."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.models import gemma4_causal as gemma4_causal
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as SpeculativeAlgorithm

CaptureHiddenMode = forward_batch_info.CaptureHiddenMode
ForwardBatch, ForwardMode = forward_batch_info.ForwardBatch, forward_batch_info.ForwardMode

# From 0.5.22 on Gemma 4's layers pass a residual stream on in the batch. In 0.5.21 only other
# models' layers do.
residual_batch: Any = getattr(gemma4_causal, "residual_batch", None)
HAS_RESIDUAL_STREAM = residual_batch is not None


def get_captured_hidden_states(runner: Any) -> Any:
    """Which hidden states every batch of this server returns, whatever its requests want."""
    of_server = forward_batch_info.get_server_return_hidden_states_mode
    if inspect.signature(of_server).parameters:  # until 0.5.17
        return of_server(runner.server_args)
    return of_server()


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
