"""Inputs of the eligibility check: SGLang's batches and server arguments, and a mock model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_gemma4_reference import releases
from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.admission import order
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.core.kept_batch import KeptBatch
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.refusal import Refusal


def skip_on_older(what: str, absent: Iterable[str]) -> None:
    """Skip the test if SGLang does not have these names yet; the last tested release has all."""
    names = ", ".join(sorted(absent))
    if names:
        assert Version(version("sglang")) < compat.release.LAST_TESTED, f"{what} lacks {names}"
        pytest.skip(f"{what} of this SGLang has no {names}")


def server_args(**arguments: Any) -> ServerArgs:
    """Return SGLang's server arguments. Skips the test if an older release refuses them."""
    skip_on_older("ServerArgs", releases.unknown_arguments(arguments))
    try:
        return ServerArgs(**arguments)
    except ValueError as refusal:
        if Version(version("sglang")) >= compat.release.LAST_TESTED:
            raise
        pytest.skip(f"this SGLang refuses {', '.join(arguments)}: {refusal}")


@contextmanager
def prefill_graphs(backend: str, **sizes: Any) -> Iterator[None]:
    """Give the server prefill graphs of this backend in the ``with`` block.

    Args:
        sizes: other fields of its ``PhaseConfig``.
    """
    config = CudaGraphConfig(prefill=PhaseConfig(backend=backend, **sizes))
    arguments = SimpleNamespace(cuda_graph_config=config)
    with mock.patch.object(compat.server, "get_server_args", return_value=arguments):
        yield


def eligible_batch(**changes: Any) -> ForwardBatch:
    """Return a batch of three prompts with these fields changed. May skip: ``skip_on_older``."""
    skip_on_older("ForwardBatch", changes.keys() - ForwardBatch.__dataclass_fields__)
    fields = {
        "forward_mode": ForwardMode.EXTEND,
        "batch_size": 3,
        "input_ids": torch.arange(9),
        "req_pool_indices": torch.arange(3),
        "seq_lens": torch.tensor([3, 14, 2]),
        "out_cache_loc": torch.arange(9),
        "seq_lens_sum": 19,
        "positions": torch.arange(9),
        "extend_num_tokens": 9,
        "extend_seq_lens": torch.tensor([3, 4, 2], dtype=torch.int32),
        "extend_prefix_lens": torch.tensor([0, 10, 0], dtype=torch.int32),
        "extend_start_loc": torch.tensor([0, 3, 7], dtype=torch.int32),
        "extend_seq_lens_cpu": [3, 4, 2],
        "extend_prefix_lens_cpu": [0, 10, 0],
        "capture_hidden_mode": CaptureHiddenMode.NULL,
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "lora_ids": [None, None, None],
    }
    return ForwardBatch(**(fields | changes))


def model(*, shared: int = 20, captured: Sequence[int] = ()) -> SimpleNamespace:
    """Return a stand-in for E2B's text model.

    Args:
        shared: the number of its KV-shared layers.
        captured: the layers whose inputs are captured.
    """
    config = SimpleNamespace(num_hidden_layers=35, num_kv_shared_layers=shared)
    return SimpleNamespace(config=config, layers=[], layers_to_capture=[*captured])


def state_of(served: Any) -> ModelState:
    """Return the model's state, from its config."""
    return ModelState(served, gemma4, order.find_model_reason(served))


def reason_of(served: Any, forward_batch: Any) -> Refusal | None:
    """Return why a batch of this model is ineligible, or None."""
    return refusal_of(state_of(served), forward_batch)


def refusal_of(state: ModelState, forward_batch: Any) -> Refusal | None:
    """Return why a batch is ineligible in this state of its model, or None."""
    found = eligibility.check_eligibility(state, forward_batch)
    if isinstance(found, Refusal):
        return found
    return None


class Doubled(UnquantizedLinearMethod):
    """Linear method for weights stored at half their value, as quantised ones are stored scaled."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return super().apply(layer, x, bias) * 2


class Packed(torch.Tensor):
    """Weights of a tensor subclass, as torchao's quantised ones are."""


@contextmanager
def halved_weights(projection: Any) -> Iterator[None]:
    """Halve a linear layer's weights but not its results."""
    method, weight = projection.quant_method, projection.weight.data
    projection.quant_method, projection.weight.data = Doubled(), weight * 0.5
    try:
        yield
    finally:
        projection.quant_method, projection.weight.data = method, weight


def tail_of(forward_batch: Any) -> KeptBatch:
    """Return the tail of a batch, as it is planned for an eligible batch."""
    return KeptBatch.of(forward_batch, eligibility.find_kept_rows(forward_batch), decodes=True)
