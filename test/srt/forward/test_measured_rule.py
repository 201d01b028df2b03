"""The measured rule at its edges, on the ModelRunner: three rows, and one of sixteen.

All other engines skip whatever they can. ``server/test_defaults`` asks a server that has the rule.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from batches import batch_of
from forwards import assert_fast, assert_stock
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.core import gate

pytestmark = pytest.mark.usefixtures("forgotten_reports")


@pytest.fixture(autouse=True)
def _nothing_set(setting: Callable[..., None]) -> None:
    setting(min_skipped_rows=None)


@pytest.mark.parametrize(
    ("total", "kept", "pays"),
    [
        (3, 1, False),  # two rows are too few, whatever their share
        (4, 1, True),
        (48, 45, True),
        (49, 46, False),
        (64, 60, True),
        (65, 61, False),
        (68, 64, False),
    ],
)
def test_rows_that_are_worth_skipping(engine: Engine, total: int, kept: int, pays: bool) -> None:
    prompts = batch_of((0, total), logprob_start=total - kept)
    if pays:
        assert_fast(engine, prompts)
        assert log.forwards[gate.TOO_LITTLE] == 0
    else:
        assert_stock(engine, gate.TOO_LITTLE, prompts)


@pytest.mark.parametrize(("kept", "pays"), [(1, True), (2, False)])
def test_an_operators_own_number(
    engine: Engine, setting: Callable[..., None], kept: int, pays: bool
) -> None:
    """In the place of the rule, which leaves three rows alone whoever reads them."""
    setting(min_skipped_rows=2)
    prompts = batch_of((0, 3), logprob_start=3 - kept)
    if pays:
        assert_fast(engine, prompts)
    else:
        assert_stock(engine, gate.TOO_LITTLE, prompts)
