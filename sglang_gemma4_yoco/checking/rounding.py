"""Tolerances of two computations of one step on identical inputs, in units of rounding.

The rounding error of a number in [1, 2) is at most eps / 2 (eps is 2**-7 in bf16). For uniformly
distributed numbers the root mean square is eps / sqrt(12 * 7/3) = 0.19 eps relative to theirs, and
0.27 eps between two sides that round independently. r roundings on each side add up to
0.27 * sqrt(r) eps: 0.46 eps for keys, which are projected, normed and rotated. Most numbers round
alike on both sides.

Errors are relative to the size of their channel. In trained models some channels are fifty times as
large as the others, and would dominate a norm over all channels.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_EPS = torch.finfo(torch.float32).eps
# Sums are always in fp32: the error of one over 4096 numbers is about sqrt(4096) = 64 eps.
_OF_SUMS = 64 * _EPS
_TF32 = 2.0**-10  # Triton's products round fp32 to it on a GPU
# Bound of one row relative to that of all rows: with fewer numbers, one error weighs more.
_ONE_ROW = 6.0
# Bounds of the drift, the common part of N errors, which makes all numbers larger or smaller.
# Roundings go up and down, which leaves 1 / sqrt(N); three times that, since large ones weigh more
# and the bound must hold in every run. Relative to ``size`` too: rounding may dominate a sum that
# cancels.
_DRIFT = 1 / 16
_OF_FEW = 3.0
# A number near 0 still has the rounding errors of its terms; see ``measure_sizes``.
_FLOOR = 0.25
_TINY = torch.finfo(torch.float32).tiny  # avoids division by 0


def _multiplies_in_tf32(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype == torch.float32


def get_unit(tensor: Tensor) -> float:
    """Return the relative size of one rounding: eps of the type plus that of fp32 sums."""
    eps = torch.finfo(tensor.dtype).eps
    if _multiplies_in_tf32(tensor):
        eps = _TF32
    return eps + _OF_SUMS


def get_score_unit(queries: Tensor) -> float:
    """Return the error of fp32 sums of products of queries [..., head_dim] and keys.

    It is relative to the norm of a query times the root mean square of a key.
    """
    if _multiplies_in_tf32(queries):
        return _TF32
    return _EPS * math.sqrt(queries.shape[-1])


class Tolerance(NamedTuple):
    """The rounding error that is allowed for a step.

    Attributes:
        roundings: the largest root mean square of the errors, in units of the type.
        over: the dimension over which the sizes are measured that errors are relative to: 0 for the
            size of their channel, -1 for that of their row, for example of one head.
        floor: the minimum error that is allowed, in eps of fp32 (times ``roundings``).
    """

    roundings: float = 1.0
    over: int = 0
    floor: float = 0.0


class Difference(NamedTuple):
    """The worst error of a comparison, and its tolerance; both relative."""

    what: str  # what was compared, for the log
    error: float  # infinite for non-finite numbers and defects
    allowed: float  # 0 for defects

    @property
    def excess(self) -> float:
        """The error in multiples of the tolerance."""
        if self.allowed == 0:
            return math.inf
        return self.error / self.allowed

    @property
    def is_rounding(self) -> bool:
        """True if the error is within the tolerance."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        if self.allowed == 0:
            return self.what
        return f"error {self.error:.1e} ({self.what}), tolerance {self.allowed:.1e}"


def make_defect(what: str) -> Difference:
    """Return a finding that rounding cannot explain."""
    return Difference(what, math.inf, 0.0)


def compare_rows(
    what: str,
    expected: Tensor,
    found: Tensor,
    tolerance: Tolerance,
    *,
    score_error: float = 0.0,
    given: Tensor | None = None,
    rounded: Tensor | None = None,
) -> Difference:
    """Return the worst error of ``found``: of all numbers, of one row, or the drift.

    Synchronizes with the device. Both are [..., channels], of one type.

    Args:
        score_error: for a softmax over scores, the relative error due to the scores' errors; all
            channels of a row share it.
        given: [..., channels], the input that the step adds to; errors also scale with its size.
        rounded: the tensor that was rounded, if of another type: SGLang computes fp32 logits from
            bf16 rows. None for ``expected``.
    """
    if rounded is None:
        rounded = expected
    unit = get_unit(rounded)
    size = _measure(expected, given, tolerance, unit)
    right = expected.float().flatten(0, -2)
    error = (found.float().flatten(0, -2) - right) / size
    right = right / size
    row_errors = error.square().mean(dim=-1)
    drift = (error * right).mean() / right.square().mean().sqrt().clamp_min(_TINY)
    errors = torch.stack([row_errors.mean().sqrt(), row_errors.max().sqrt(), drift.abs()])
    independent = error.numel()
    if score_error > 0:
        independent = len(error)
    bound = tolerance.roundings * unit
    bounds = (bound, _ONE_ROW * bound, (_DRIFT + _OF_FEW / math.sqrt(independent)) * bound)
    numbers = errors.nan_to_num(math.inf, posinf=math.inf).tolist()
    both = zip(numbers, bounds, strict=True)
    return find_worst(Difference(what, error, allowed + score_error) for error, allowed in both)


def _measure(expected: Tensor, given: Tensor | None, tolerance: Tolerance, unit: float) -> Tensor:
    """Return the sizes for relative errors of [..., channels]: [rows, 1] or [1, channels]."""
    size = measure_sizes(expected, dim=tolerance.over)
    if given is not None:
        # Scaled as the layer scales its output.
        scale = expected.float().abs().median() / given.float().abs().median().clamp_min(_TINY)
        size = torch.hypot(size, scale * measure_sizes(given))
    return size.clamp_min(max(tolerance.floor * _EPS / unit, _TINY))


def measure_sizes(values: Tensor, dim: int = 0) -> Tensor:
    """Return root mean squares of ``values`` [..., channels] over ``dim`` of [rows, channels].

    They are at least about a quarter of the median: a sum that cancels still has the rounding
    errors of its terms. If a head averages values of size 1 to a result of 0.01, the errors are
    those of the values, a hundred times what the size of the result suggests.
    """
    squares = values.float().flatten(0, -2).square().mean(dim=dim, keepdim=True)
    return (squares + _FLOOR**2 * squares.median()).sqrt()


def find_worst(found: Iterable[Difference]) -> Difference:
    """Return the difference with the largest excess."""
    return max(found, key=lambda finding: finding.excess)
