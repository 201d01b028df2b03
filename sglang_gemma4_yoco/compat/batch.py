"""SGLang's batch: its modes, and decode steps that are made here."""

from __future__ import annotations

import inspect
from typing import Any

from sglang.srt.model_executor import forward_batch_info
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as SpeculativeAlgorithm

CaptureHiddenMode = forward_batch_info.CaptureHiddenMode
ForwardBatch, ForwardMode = forward_batch_info.ForwardBatch, forward_batch_info.ForwardMode


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
