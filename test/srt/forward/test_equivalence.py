"""Equality of on and off for random batches of random models, on the CPU's attention backend."""

from __future__ import annotations

import pytest

from harness.fixtures import Checkpoints
from harness.forwards import ENGINE
from harness.random_batches import KINDS, assert_cut, has_one_pool, random_shape
from sglang_gemma4_reference.engine import Engine

MODELS = 14
# A quick run tries two of them, a default one four: all windows, and E2B's and E4B's layers.
SEEDS = [
    pytest.param(seed, marks=[pytest.mark.slow] * (seed > 1) + [pytest.mark.release] * (seed > 3))
    for seed in range(MODELS)
]


@pytest.fixture(scope="module", params=SEEDS, ids=lambda seed: f"model{seed}")
def engine(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Engine:
    return Engine(
        checkpoints(random_shape(request.param)),
        **ENGINE | {"max_total_tokens": 8192},
        disable_hybrid_swa_memory=has_one_pool(request.param),
    )


@pytest.mark.parametrize("name", KINDS)
def test_on_equals_off(engine: Engine, name: str) -> None:
    assert_cut(engine, name, longest=300, most=6, examples=6)
