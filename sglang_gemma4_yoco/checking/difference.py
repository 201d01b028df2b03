"""How far two computations of the same rows are apart, and how far rounding alone takes them."""

from __future__ import annotations

import math

import torch

# Stock is compared with itself under one other batch shape; other shapes may round worse.
_MARGIN = 8


def relative_error(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest error of a row, in the L2 norm, relative to the expected row's.

    Args:
        expected, found: [rows, ...], of one shape.

    Returns:
        0 for equal tensors, zeros and no rows among them; infinity where one of the two is not
        finite, or where an expected row of zeros was not found.
    """
    if torch.equal(expected, found):
        return 0.0
    expected, found = expected.flatten(1).double(), found.flatten(1).double()
    errors, sizes = (expected - found).norm(dim=-1), expected.norm(dim=-1)
    # A row of zeros that was found as one is 0 / 0.
    largest = float(torch.where(errors == 0, errors, errors / sizes).max())
    return largest if math.isfinite(largest) else math.inf


def allowed(of_stock: float, layers: int, *dtypes: torch.dtype) -> float:
    """The largest relative error of a row that is rounding.

    Each of L layers rounds what it adds to the residual, by about eps; independent errors add up as
    their root, to eps * sqrt(L): 7e-7 in fp32 and 0.05 in bf16 for 35 layers. Where stock itself
    answers otherwise by more than that when a batch has another shape, kernels sum in another
    order, and a margin above that counts.

    Args:
        of_stock: how far stock's answers to the same rows were apart.
        layers: L.
        dtypes: of the weights, and of the KV cache.
    """
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes) * math.sqrt(layers)
    return max(_MARGIN * of_stock, rounding)
