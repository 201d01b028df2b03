"""Which linear layers may be given fewer rows: those whose rows do not hang on each other.

A layer that scales its inputs by the largest number in the whole batch computes a row otherwise
when other rows are gone. So every linear layer of the tail must be of a kind that is known to keep
rows apart: the ways in which it may round (a scale for each row, or for each block of a row, or one
that the checkpoint names) are those of the row alone.

A kind is the class of SGLang's that computes it and, where that one asks a scheme, the scheme's.
They were read in SGLang 0.5.17 to 0.5.23. Not known, hence refused: GGUF, which rounds inputs of
few rows otherwise than of many; 8 bits of bitsandbytes, which picks columns by all rows; what
other packages and platforms bring along.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_gemma4_yoco import seams

_SGLANG = "sglang.srt."  # its image models' classes have the same names

_APART = frozenset(
    {
        "BlockInt8LinearMethod",
        "Fp8LinearMethod",
        "ModelOptFp4LinearMethod",
        "ModelOptFp8LinearMethod",
        "ModelOptNvFp4A16LinearMethod",
        "PetitNvFp4LinearMethod",
        "W8A8Fp8LinearMethod",
        "W8A8Int8LinearMethod",
    }
)
_SCHEMES_APART = {
    "AWQLinearMethod": {
        "AWQIntelAMXLinearScheme",
        "AWQLinearScheme",
        "AWQMarlinLinearScheme",
        "AWQXPULinearScheme",
    },
    "CompressedTensorsLinearMethod": {
        "CompressedTensorsW4A16Fp4",
        "CompressedTensorsW4A4Fp4",
        "CompressedTensorsW8A16Fp8",
        "CompressedTensorsW8A8Fp8",
        "CompressedTensorsW8A8Int8",
        "CompressedTensorsWNA16",
        "XPUCompressedTensorsWNA16",
    },
    "GPTQLinearMethod": {"GPTQIntelAMXLinearScheme", "GPTQLinearScheme", "GPTQXPULinearScheme"},
    "GPTQMarlinLinearMethod": {"GPTQMarlinLinearScheme"},
    "QuarkLinearMethod": {"QuarkW4A4MXFP4", "QuarkW8A8Fp8"},
}


def coupled_reason(model: Any, first_shared: int) -> str | None:
    """Why the rows of this model's tail may hang on rows that would be dropped, or None.

    Asked once its weights are loaded, which is when a layer's kind is settled.

    Args:
        model: a ``Gemma4TextModel`` with a tail.
        first_shared: index K of its first layer that reads an earlier layer's K/V.
    """
    for layer in list(getattr(model, "layers", ()))[first_shared - 1 :]:
        for part in layer.modules():
            if isinstance(part, seams.LinearBase) and not keeps_rows_apart(part):
                return f"rows of {_kind(part)} may depend on each other"
    return None


def keeps_rows_apart(layer: Any) -> bool:
    """Whether each row that a linear layer returns is known to depend on its own input alone."""
    method = type(layer.quant_method)
    if not method.__module__.startswith(_SGLANG):
        return False
    name = method.__name__
    if name == "UnquantizedLinearMethod":
        return seams.is_plain_tensor(layer.weight)
    if name == "BitsAndBytesLinearMethod":
        return not layer.quant_method.quant_config.load_in_8bit
    if name not in _APART and _scheme(layer) not in _SCHEMES_APART.get(name, ()):
        return False
    return not _is_scaled_by_the_batch(layer) and not _is_converted_for_few_rows(layer)


def _scheme(layer: Any) -> str:
    return type(getattr(layer, "scheme", None)).__name__


def _kind(layer: Any) -> str:
    scheme = getattr(layer, "scheme", None)
    return type(layer.quant_method if scheme is None else scheme).__name__


def _is_scaled_by_the_batch(layer: Any) -> bool:
    """Whether AMD's fp8 takes one scale for all rows: it does for weights with one scale.

    There it is the default of ``--quantization fp8``. Elsewhere each row has its own.
    """
    scale = getattr(layer, "weight_scale", None)
    by_row = getattr(layer.quant_method, "use_per_token_if_dynamic", False) or getattr(
        getattr(layer, "scheme", None), "per_token", False
    )
    return (
        torch.version.hip is not None
        and scale is not None
        and scale.numel() == 1
        and getattr(layer, "input_scale", None) is None
        and not by_row
    )


def _is_converted_for_few_rows(layer: Any) -> bool:
    """Whether AMD's mxfp8 keeps a second copy of the weights, rounded otherwise, for few rows."""
    return hasattr(getattr(layer, "weight", None), "_ptpc_weight")
