"""On equals off for random batches of random models, on the CPU's own attention backend."""

from __future__ import annotations

import pytest

from harness.random_batches import (
    HARD_CHUNKS,
    HARD_LAST_ROWS,
    HARD_LOGPROBS,
    batches,
    has_one_pool,
    holds,
    input_logprobs,
    intermediate_chunks,
    last_rows,
    random_shape,
)
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import write_checkpoint
from sglang_gemma4_reference.engine import Engine

MODELS = 14
LONGEST, REQUESTS, EXAMPLES, FLOOR = 300, 6, 6, 6
# A quick run tries two of them, a default one four: all windows, and E2B's and E4B's layers.
SEEDS = [
    pytest.param(seed, marks=[pytest.mark.slow] * (seed > 1) + [pytest.mark.release] * (seed > 3))
    for seed in range(MODELS)
]


@pytest.fixture(scope="module", params=SEEDS, ids=lambda seed: f"model{seed}")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(
        write_checkpoint(tmp_path_factory.mktemp("checkpoint"), random_shape(request.param)),
        device="cpu",
        dtype="float32",
        max_total_tokens=8192,
        disable_hybrid_swa_memory=has_one_pool(request.param),
    )


def test_last_rows_are_those_of_the_stock_forward(engine: Engine) -> None:
    drawn = batches(LONGEST, REQUESTS)
    holds(engine, last_rows, drawn, HARD_LAST_ROWS, examples=EXAMPLES, floor=FLOOR)


def test_input_logprobs_are_those_of_the_stock_forward(engine: Engine) -> None:
    drawn = batches(LONGEST, REQUESTS, logprobs=True)
    holds(engine, input_logprobs, drawn, HARD_LOGPROBS, examples=EXAMPLES, floor=FLOOR)


def test_chunks_that_nobody_reads_skip_the_tail(engine: Engine) -> None:
    drawn = batches(LONGEST, REQUESTS, unfinished=True)
    floor = 0
    if releases.marks_intermediate():
        floor = FLOOR
    holds(engine, intermediate_chunks, drawn, HARD_CHUNKS, examples=EXAMPLES, floor=floor)
