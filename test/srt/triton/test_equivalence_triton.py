"""On equals off for random batches of random models, on SGLang's own Triton backend.

All windows are shorter than most prompts. ``test_hard_batches`` chooses; this draws.
"""

from __future__ import annotations

import pytest
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from random_batches import (
    HARD_LAST_ROWS,
    HARD_LOGPROBS,
    HARD_UNREAD,
    batches,
    has_one_pool,
    holds,
    input_logprobs,
    last_rows,
    random_shape,
    unread_chunks,
)
from sglang_gemma4_reference import interpreter, releases
from sglang_gemma4_reference.checkpoint import write_checkpoint
from sglang_gemma4_reference.engine import Engine

interpreter.make_quick()

# The interpreter runs a kernel's programs one by one, and a failing example would be shrunk for
# minutes.
LONGEST, REQUESTS, EXAMPLES = 24, 4, 2


@pytest.fixture(scope="module", params=range(3), ids=lambda seed: f"model{seed}")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The last of the three has one pool."""
    shape = random_shape(request.param, small=True)
    engine = Engine(
        write_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape),
        device="cpu",
        dtype="float32",
        max_total_tokens=512,
        max_running_requests=8,
        triton_attention_num_kv_splits=2,  # each part of a request's keys is a program
        disable_hybrid_swa_memory=has_one_pool(request.param),
    )
    assert type(engine.runner.attn_backend) is TritonAttnBackend
    return engine


def test_last_rows_are_those_of_the_stock_forward(engine: Engine) -> None:
    drawn = batches(LONGEST, REQUESTS)
    holds(engine, last_rows, drawn, HARD_LAST_ROWS[::2], examples=EXAMPLES, floor=3, shrink=False)


def test_input_logprobs_are_those_of_the_stock_forward(engine: Engine) -> None:
    drawn = batches(LONGEST, REQUESTS, logprobs=True)
    hard = HARD_LOGPROBS[:1]
    holds(engine, input_logprobs, drawn, hard, examples=EXAMPLES, floor=2, shrink=False)


def test_intermediate_chunks_skip_the_tail(engine: Engine) -> None:
    drawn = batches(LONGEST, REQUESTS, unfinished=True)
    floor = 2 if releases.tells_unread_chunks() else 0
    hard = HARD_UNREAD[:1]
    holds(engine, unread_chunks, drawn, hard, examples=EXAMPLES, floor=floor, shrink=False)
