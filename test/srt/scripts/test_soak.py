"""``bench/soak.py``: its verdict on what grows, without a server."""

from __future__ import annotations

import pytest

from scripts.bench import soak

FLAT = [100.0 + i % 2 for i in range(200)]
STEP = [100.0] * 10 + [107.0] * 190  # allocated once, in the first tenth
LATE_STEP = [100.0] * 60 + [107.0] * 140
LEAK = [100.0 + i / 10 for i in range(200)]
SMALL_LEAK = [100.0 + i / 60 for i in range(200)]
MORE_LINES = [101.0 + i / 9.8 for i in range(200)]  # of a log


@pytest.mark.parametrize(
    ("stock", "fast", "passes"),
    [
        (FLAT, FLAT, True),
        (FLAT, SMALL_LEAK, False),
        (FLAT, LATE_STEP, False),
        (STEP, STEP, True),
        (STEP, LATE_STEP, True),
        (STEP, LEAK, False),
        (LEAK, LEAK, True),
        (LEAK, MORE_LINES, True),
        ([100.0], [101.0], True),  # a run of one block cannot show growth
        ([0.0] * 200, STEP, True),  # a process that stock does not have
        ([0.0] * 200, LEAK, False),
    ],
)
def test_growth_beyond_the_stock_servers_is_found(
    stock: list[float], fast: list[float], passes: bool
) -> None:
    _, grows, allowed = soak.judge(stock, fast)
    assert (grows <= allowed) == passes
