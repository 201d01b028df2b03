"""Refusals by the tail's layers: each output row must depend on its own input row alone."""

from typing import Any

import torch
from torch import nn

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.compat.text_model import TextModel
from sglang_gemma4_yoco.refusal import ServerRefusal

# SGLang's classes, with the scheme if a class has schemes. All others are refused, including those
# of other packages and platforms. The activation scales of the listed ones are per row, per block,
# or from the checkpoint: a scale from the batch's maximum would change when other rows are missing.
# GGUF is not listed because it rounds few rows differently from many.
_INDEPENDENT_ROWS = {
    "AWQLinearMethod.AWQIntelAMXLinearScheme",
    "AWQLinearMethod.AWQLinearScheme",
    "AWQLinearMethod.AWQMarlinLinearScheme",
    "AWQLinearMethod.AWQXPULinearScheme",
    "BlockInt8LinearMethod",
    "CompressedTensorsLinearMethod.CompressedTensorsW4A16Fp4",
    "CompressedTensorsLinearMethod.CompressedTensorsW4A4Fp4",
    "CompressedTensorsLinearMethod.CompressedTensorsW8A16Fp8",
    "CompressedTensorsLinearMethod.CompressedTensorsW8A8Fp8",
    "CompressedTensorsLinearMethod.CompressedTensorsW8A8Int8",
    "CompressedTensorsLinearMethod.CompressedTensorsWNA16",
    "CompressedTensorsLinearMethod.XPUCompressedTensorsWNA16",
    "Fp8LinearMethod",
    "GPTQLinearMethod.GPTQIntelAMXLinearScheme",
    "GPTQLinearMethod.GPTQLinearScheme",
    "GPTQLinearMethod.GPTQXPULinearScheme",
    "GPTQMarlinLinearMethod.GPTQMarlinLinearScheme",
    "ModelOptFp4LinearMethod",
    "ModelOptFp8LinearMethod",
    "ModelOptNvFp4A16LinearMethod",
    "PetitNvFp4LinearMethod",
    "QuarkLinearMethod.QuarkW4A4MXFP4",
    "QuarkLinearMethod.QuarkW8A8Fp8",
    "W8A8Fp8LinearMethod",
    "W8A8Int8LinearMethod",
}


def find_linear_reason(model: TextModel, first: int) -> ServerRefusal | None:
    """Return why rows of this model's tail may depend on rows that would be dropped, or None.

    Args:
        model: a text model with a tail and loaded weights.
        first: S, the index of its first KV-shared layer.
    """
    for layer in model.layers[first - 1 :]:
        for part in layer.modules():
            if _computes_rows(part) and not has_independent_rows(part):
                return ServerRefusal(f"rows of {get_linear_kind(part)} may depend on each other")
    return None


def _computes_rows(part: nn.Module) -> bool:
    """Return True for linear layers, experts, and other modules with a quantisation method."""
    if type(part) is compat.text_model.RadixAttention:
        return False  # its method quantises the cache, which ``find_pool_reason`` checks
    return (
        isinstance(part, compat.layers.LinearBase)
        or getattr(part, "quant_method", None) is not None
    )


def get_linear_kind(layer: nn.Module) -> str:
    """Return the class names of a layer's method and, if it has one, its scheme."""
    method = type(layer.quant_method).__name__
    scheme = getattr(layer, "scheme", None)
    if scheme is None:
        return method
    return f"{method}.{type(scheme).__name__}"


def has_independent_rows(layer: nn.Module) -> bool:
    """Return True if each output row of a layer is known to depend on its own input row alone.

    Never True for a mixture of experts: experts may be chosen, or rounded, for a whole batch.
    """
    method: Any = layer.quant_method
    kind = get_linear_kind(layer)
    is_sglangs = type(method).__module__.startswith("sglang.srt.")
    if not (isinstance(layer, compat.layers.LinearBase) and is_sglangs):
        return False
    if kind == "UnquantizedLinearMethod":
        return compat.layers.is_plain_tensor(layer.weight)
    if kind == "BitsAndBytesLinearMethod":  # in 8 bits, columns are selected by all rows together
        return not method.quant_config.load_in_8bit
    # On AMD fp8 often has one scale for the whole batch, and mxfp8 other weights for few rows.
    on_amd = torch.version.hip is not None
    return kind in _INDEPENDENT_ROWS and not (on_amd and "Fp8" in kind)
