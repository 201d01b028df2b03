"""What layers return, and whether their weights are plain."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase as LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.models import gemma4_causal as gemma4_causal


def get_rows(output: Any) -> torch.Tensor:
    """The hidden states in what a decoder layer returns."""
    if isinstance(output, tuple):
        output = output[0]
    rows: torch.Tensor = output
    return rows


def is_plain_tensor(weight: torch.Tensor) -> bool:
    """Whether these weights are plain, not of a class of their own as torchao's quantised ones.

    ``isinstance(weight, torch.nn.Parameter)`` is true of those, too; their class is not derived.
    """
    kind = type(weight)
    return kind is torch.Tensor or issubclass(kind, torch.nn.Parameter)


def is_plain_linear(projection: Any) -> bool:
    """Whether a linear layer is ``x @ weight.T``, so that its outputs can be sliced."""
    weight = getattr(projection, "weight", None)
    return (
        type(getattr(projection, "quant_method", None)) is UnquantizedLinearMethod
        and isinstance(weight, torch.Tensor)
        and is_plain_tensor(weight)
        and weight.dim() == 2
        and weight.dtype.is_floating_point
        and weight.dtype.itemsize >= 2
        and not getattr(projection, "use_intel_amx_backend", False)  # packed for the CPU
        and projection.bias is None
    )
