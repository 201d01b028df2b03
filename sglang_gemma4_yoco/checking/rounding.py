"""How far apart two computations of one step on the very same inputs are, counted in roundings.

A number in [1, 2) is off by up to eps / 2 (eps is 2**-7 in bf16). Over evenly spread numbers that
is a root mean square of eps / sqrt(12 * 7/3) = 0.19 eps of their own, and 0.27 eps between two
sides that round independently. r roundings on each side come to 0.27 * sqrt(r) eps: 0.46 eps for
keys, which are projected, normed and turned. Most numbers are rounded alike on both.

An error is relative to the size of its channel. In trained models some channels are fifty times as
large as the others, and a norm over all of them would see those alone.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

_EPS = torch.finfo(torch.float32).eps
# Sums are in fp32 whatever the type: one of 4096 numbers is off by about sqrt(4096) = 64 eps.
_OF_SUMS = 64 * _EPS
_TF32 = 2.0**-10  # to which Triton's products round fp32 on a GPU
# Bound of one row, in bounds of all rows: it has few numbers, so the error of one weighs more.
_ONE_ROW = 6.0
# Bounds of the part of N errors that makes all numbers larger or smaller. Roundings go up and down,
# which leaves one in sqrt(N); three times that, for large ones weigh more, and some run is the
# worst. It is relative to ``size`` too: rounding may be a large part of a sum that cancels.
_DRIFT, _OF_FEW = 1 / 16, 3.0
# What is near 0 still has the roundings of what was added up to it; see ``measure_sizes``.
_FLOOR = 0.25
_TINY = torch.finfo(torch.float32).tiny  # instead of 0, to divide by


def _multiplies_in_tf32(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype == torch.float32


def get_unit(tensor: torch.Tensor) -> float:
    """The relative size of one rounding: eps of the type, and that of sums in fp32."""
    eps = torch.finfo(tensor.dtype).eps
    if _multiplies_in_tf32(tensor):
        eps = _TF32
    return eps + _OF_SUMS


def get_eps_of_scores(queries: torch.Tensor) -> float:
    """How far products of queries [..., head_dim] and keys, summed up in fp32, may be off."""
    if _multiplies_in_tf32(queries):
        return _TF32 / math.sqrt(queries.shape[-1])
    return _EPS


@dataclass(frozen=True)
class Tolerance:
    """How much of the errors of a step may be rounding.

    Attributes:
        roundings: how large their root mean square may be, in units of the type.
        of_rows: they are relative to the size of their row, that of one head for example, and not
            to that of their channel.
        floor: the size that a row has at least, in eps of fp32.
    """

    roundings: float = 1.0
    of_rows: bool = False
    floor: float = 0.0


@dataclass(frozen=True)
class Difference:
    """The largest error of a comparison, and how much of it may be rounding; both relative."""

    what: str  # was compared, for the log
    error: float  # infinite where a number is not finite, and of a ``defect``
    allowed: float  # 0 of a ``defect``

    @property
    def excess(self) -> float:
        """The error in multiples of what is allowed."""
        if self.allowed == 0:
            return math.inf
        return self.error / self.allowed

    @property
    def is_rounding(self) -> bool:
        """True if it is not a defect."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        if self.allowed == 0:
            return self.what
        return f"error {self.error:.1e} ({self.what}), tolerance {self.allowed:.1e}"


def make_defect(what: str) -> Difference:
    """A finding that no rounding explains."""
    return Difference(what, math.inf, 0.0)


def compare_rows(
    what: str,
    expected: torch.Tensor,
    found: torch.Tensor,
    tolerance: Tolerance,
    *,
    of_scores: float = 0.0,
    given: torch.Tensor | None = None,
    rounded: torch.Tensor | None = None,
) -> Difference:
    """The worst error of ``found``: of all its numbers, of one row, and what they share.

    It is read from the device. Both are [..., channels], of one type.

    Args:
        of_scores: of a step that weights rows with a softmax of scores the relative error that
            comes of the scores' errors. Each weight is rounded for all channels of a row alike.
        given: [..., channels], the input that the step adds to, whose size the errors have too.
        rounded: what was rounded, if that is of another type: SGLang makes logits of fp32 from rows
            of bf16. None for ``expected``.
    """
    if rounded is None:
        rounded = expected
    unit = get_unit(rounded)
    size = _measure(expected, given, tolerance, unit)
    right = expected.float().flatten(0, -2)
    error = (found.float().flatten(0, -2) - right) / size
    right = right / size
    of_rows = error.square().mean(dim=-1)
    drift = (error * right).mean() / right.square().mean().sqrt().clamp_min(_TINY)
    errors = torch.stack([of_rows.mean().sqrt(), of_rows.max().sqrt(), drift.abs()])
    independent = error.numel()
    if of_scores > 0:
        independent = len(error)
    bound = tolerance.roundings * unit
    bounds = (bound, _ONE_ROW * bound, (_DRIFT + _OF_FEW / math.sqrt(independent)) * bound)
    numbers = errors.nan_to_num(math.inf, posinf=math.inf).tolist()
    both = zip(numbers, bounds, strict=True)
    return find_worst(Difference(what, error, allowed + of_scores) for error, allowed in both)


def _measure(
    expected: torch.Tensor, given: torch.Tensor | None, tolerance: Tolerance, unit: float
) -> torch.Tensor:
    """Return what errors of [..., channels] are relative to: [rows, 1] or [1, channels]."""
    over = 0
    if tolerance.of_rows:
        over = -1
    size = measure_sizes(expected, dim=over)
    if given is not None:
        # Scaled as the layer scales its output.
        scale = expected.float().abs().median() / given.float().abs().median().clamp_min(_TINY)
        size = torch.hypot(size, scale * measure_sizes(given))
    return size.clamp_min(max(tolerance.floor * _EPS / unit, _TINY))


def measure_sizes(values: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Root mean squares of ``values`` [..., channels] over ``dim`` of [rows, channels], in fp32.

    Small ones count as a quarter of the typical one: a sum that cancels still has the roundings of
    its terms. Where a head averages values of size 1 to 0.01, its roundings are those of the
    values, a hundred times as large as its own.
    """
    squares = values.float().flatten(0, -2).square().mean(dim=dim, keepdim=True)
    return (squares + _FLOOR**2 * squares.median()).sqrt()


def find_worst(found: Iterable[Difference]) -> Difference:
    """The one that is farthest beyond its bound, or nearest to it."""
    return max(found, key=lambda finding: finding.excess)
