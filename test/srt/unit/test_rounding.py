"""The bound on rounding: computations that only round, and some with larger errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_gemma4_yoco.checking import layerwise, rounding
from sglang_gemma4_yoco.checking.rounding import Difference, Tolerance

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


ROWS_OF_THREE_ROUNDINGS = Tolerance(0.75)
OF_ROWS = Tolerance(over=-1)


def compared(
    expected: torch.Tensor,
    found: torch.Tensor,
    tolerance: Tolerance = ROWS_OF_THREE_ROUNDINGS,
    **others: Any,
) -> Difference:
    return rounding.compare_rows("rows", expected, found, tolerance, **others)


def exact(seed: int, rows: int = 18, width: int = 64, *, outliers: float = 1.0) -> torch.Tensor:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).double()
    values[:, :2] *= outliers
    return values


def rounded_three_times(values: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return the output rounded three times: each time to another random grid, so independently."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(3):
        shift = torch.rand(values.shape, generator=draw).double() + 0.5
        values = (values * shift).to(dtype).double() / shift
    return values


# The drift is held to three standard deviations. None of 3,000 draws exceeded that, but another one
# may: so these are the same draws each time.
@settings(derandomize=True, deadline=None)
@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 10**6), outliers=st.sampled_from([1.0, 50.0]))
def test_three_roundings_each_are_allowed(dtype: torch.dtype, seed: int, outliers: float) -> None:
    """They are within the tolerance, which is not much larger than they need."""
    values = exact(seed, outliers=outliers)
    one, other = (rounded_three_times(values, dtype, seed + i).to(dtype) for i in (1, 2))
    found = compared(one, other)
    assert found.is_rounding
    if dtype != torch.float32:  # whose sums are most of what is allowed
        assert found.excess > 0.2


@pytest.mark.parametrize(("in_tf32", "error"), [(False, 3e-5), (True, 4e-3)])
def test_ten_times_a_unit_would_miss_what_it_finds(
    monkeypatch: pytest.MonkeyPatch, in_tf32: bool, error: float
) -> None:
    """Errors in fp32 are those of its sums and, on a GPU, those of products in TF32."""
    monkeypatch.setattr(rounding, "_multiplies_in_tf32", lambda _: in_tf32)
    values = exact(0).float()
    assert 1 < compared(values, values * (1 + error * exact(1).float())).excess < 10


def test_a_rounding_that_all_channels_of_a_row_share() -> None:
    """A key's weight has such a rounding: each of 12 heads may be off by half an ulp.

    If they were independent, so many of them would sometimes exceed the bound.
    """
    scores = 1e-9  # a negligible error
    excess = {scores: 0.0, 0.0: 0.0}
    for seed in range(300):
        values = exact(seed, rows=12, width=256)
        draw = torch.Generator().manual_seed(seed)
        shares = 2 * torch.rand(12, 1, generator=draw).double() - 1
        found = values * (1 + 2.0**-9 * shares)
        values, found = values.bfloat16(), found.bfloat16()
        for score_error, worst in excess.items():
            one = compared(values, found, OF_ROWS, score_error=score_error)
            excess[score_error] = max(worst, one.excess)
    assert excess[scores] < 0.6
    assert excess[0.0] > 1
    assert compared(values, values * 1.05, OF_ROWS, score_error=scores).excess > 4


def test_one_row_among_many() -> None:
    values = exact(0, rows=1000).bfloat16()
    other = values.clone()
    other[7] = other[8]
    assert compared(values, other).excess > 4
    assert compared(values, values).error == 0
    other = values.clone()
    other[7] *= 1.1  # within the bound of all rows, and beyond that of one
    found = compared(values, other)
    assert found.error == pytest.approx(0.1, rel=0.3)
    assert not found.is_rounding


def test_a_channel_near_zero_rounds_as_its_parts_do() -> None:
    """It is the difference of two others, each off by a rounding of its own."""
    values = exact(0).bfloat16()
    other = values.clone()
    values[:, 0] = torch.randn(18, generator=torch.Generator().manual_seed(1)) * 1e-6
    other[:, 0] = values[:, 0] + 2**-9
    assert compared(values, other).is_rounding


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("seed", range(5))
def test_a_row_that_cancels_rounds_as_its_parts_do(seed: int, dtype: torch.dtype) -> None:
    """A head's values may nearly cancel; by its own size alone the row would be a defect."""
    draw = torch.Generator().manual_seed(seed)
    weights = torch.softmax(torch.randn(20, 40, generator=draw), dim=-1).double()
    values = torch.randn(20, 40, 16, generator=draw).double()
    weights[3, 20:] = weights[3, :20]
    values[3, 20:] = 1e-3 * values[3, 20:] - values[3, :20]
    one, other = (
        torch.einsum("rk,rkc->rc", (weights * grid).to(dtype).double() / grid, values).to(dtype)
        for grid in (1.0, 1 + torch.rand(weights.shape, generator=draw).double())
    )
    assert compared(one, other, OF_ROWS).is_rounding
    assert not compared(one[3:4], other[3:4], OF_ROWS).is_rounding  # by its own size alone


@pytest.mark.parametrize("seed", range(5))
def test_values_of_fp32_that_cancel_in_many_heads(seed: int) -> None:
    """A sum of values of size 1 has their roundings; here the sizes of other heads are no help.

    Two kernels differ by the order in which they sum up. A request of 42 tokens has been seen whose
    values cancelled to a thousandth, and whose error was twice what was allowed.
    """
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(42, 8, 64, generator=draw).double()
    values[21:] = 1e-3 * values[21:] - values[:21]
    values = values.float()
    one = values.mean(dim=0)
    other = (values[0::2].sum(dim=0) + values[1::2].sum(dim=0)) / 42
    a_key_less = values[1:].mean(dim=0)
    assert one.square().mean().sqrt() < 2e-3
    tolerance = layerwise._TOLERANCES[layerwise._MEAN]

    def mean_differs(found: torch.Tensor) -> Difference:
        return compared(one[None], found[None], tolerance)

    assert mean_differs(other).is_rounding
    assert mean_differs(a_key_less).excess > 1000
    assert 1 < mean_differs(one + 2e-6).excess < 10  # ten times the floor would miss it
    assert not compared(one, other, OF_ROWS).is_rounding


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nan_and_infinity_are_defects(wrong: float) -> None:
    values = exact(0).bfloat16()
    other = values.clone()
    other[1, 0] = wrong
    for one, another in ((values, other), (other, values)):
        found = compared(one, another)
        assert found.error == math.inf
        assert not found.is_rounding


def test_zeros() -> None:
    zeros = torch.zeros(3, 8)
    assert compared(zeros, zeros).error == 0
    assert not compared(zeros, zeros + 1).is_rounding
