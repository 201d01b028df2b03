"""Layers: their outputs, the residual stream, and checks for plain weights."""

from typing import Any, TypeGuard

import torch
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.linear import LinearBase as LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

from sglang_gemma4_yoco.compat.batch import ForwardBatch
from sglang_gemma4_yoco.compat.text_model import ModelOutput


def get_rows(output: ModelOutput) -> Tensor:
    """Return the hidden states [T, hidden] of a text model's output, which may be a tuple."""
    if isinstance(output, tuple):
        return output[0]
    return output


def is_plain_tensor(weight: object) -> bool:
    """Return True for plain weights: not of a tensor subclass, as torchao's quantised ones are.

    ``isinstance(weight, torch.nn.Parameter)`` is True for those too, but ``issubclass`` is not.
    """
    kind = type(weight)
    return kind is Tensor or issubclass(kind, torch.nn.Parameter)


def is_plain_linear(projection: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True if a linear layer is ``x @ weight.T``, so that its outputs can be sliced."""
    weight: Any = getattr(projection, "weight", None)
    return (
        type(getattr(projection, "quant_method", None)) is UnquantizedLinearMethod
        and is_plain_tensor(weight)
        and weight.dim() == 2
        and weight.dtype.is_floating_point
        and weight.dtype.itemsize >= 2
        and not getattr(projection, "use_intel_amx_backend", False)  # packed for the CPU
        and projection.bias is None
    )


def get_residual(forward_batch: ForwardBatch) -> Tensor:
    """Return the residual [T, hidden] at the attention of a layer of this batch."""
    residual: Tensor = residual_batch.written_residual(forward_batch)
    return residual


def start_residual(forward_batch: ForwardBatch, hidden_states: Tensor) -> None:
    """Give the batch a new residual stream that begins with ``hidden_states``."""
    residual_batch.start(forward_batch)
    residual_batch.set_written(hidden_states, forward_batch)
