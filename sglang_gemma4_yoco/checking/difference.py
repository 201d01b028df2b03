"""How far two computations of the same rows are apart, and how far rounding alone takes them."""

from __future__ import annotations

import math

import torch

# Stock is compared with itself under one other batch shape; other shapes may round worse.
_MARGIN = 8
_ROOT = 32  # of a thousand


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

    Each of L layers rounds what it adds to the residual, by about eps of its type; and its sums,
    which are made in fp32 whatever the type, of a thousand numbers by about the root of as many eps
    of fp32. Independent errors of layers add up as their root: for 35 layers to 2e-5 in fp32, and
    0.05 in bf16. Where stock itself answers otherwise by more than that when a batch has another
    shape, a margin above that counts.

    Args:
        of_stock: how far stock's answers to the same rows were apart.
        layers: L.
        dtypes: of the weights, and of the KV cache.
    """
    of_types = max(torch.finfo(dtype).eps for dtype in dtypes)
    of_sums = _ROOT * torch.finfo(torch.float32).eps
    return max(_MARGIN * of_stock, math.sqrt(layers) * (of_types + of_sums))
