"""On equals off, on SGLang's own Gemma 4, KV pools and attention backend, for random batches.

For every batch the same forward runs twice, off and on, over poisoned cache slots. The fast path
must first be shown to be active, by the rows that each layer's FFN computed; only then do equal
answers mean anything.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from observe import (
    Observed,
    assert_same_answers,
    assert_same_cache,
    assert_same_objects,
    run,
)
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import E2B_TINY, Gemma4Shape, write_checkpoint
from sglang_gemma4_reference.engine import Engine, Prompt

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's interpreter runs a kernel's programs one by one in Python.
LONGEST, REQUESTS = (24, 3) if INTERPRETED else (300, 8)
BATCHES_PER_MODEL = 3 if INTERPRETED else 25
MODELS = 2 if INTERPRETED else int(os.environ.get("YOCO_TEST_MODELS", "14"))
TOLERANCE = 5e-5


def has_one_pool(seed: int) -> bool:
    """Every third model keeps all layers' K/V in one pool, the others one more for the window."""
    return seed % 3 == 2


def random_shape(seed: int) -> Gemma4Shape:
    """A small Gemma 4 with a random layer pattern, drawn so that both kinds of donors exist."""
    draw = random.Random(seed)
    sliding_per_full = draw.choice([1, 2, 3, 4])
    front = draw.randint(sliding_per_full + 1, 2 * sliding_per_full + 3)
    shared = draw.randint(1, 8)
    return dataclasses.replace(
        E2B_TINY,
        layers=front + shared,
        kv_shared_layers=shared,
        sliding_per_full=sliding_per_full,
        heads=draw.choice([4, 8]),
        kv_heads=draw.choice([1, 2, 4]),
        sliding_window=5 if INTERPRETED else draw.choice([5, 16, 40, 512]),
        ple_width=draw.choice([0, 16, 16]),
        double_wide_mlp=draw.random() < 0.5,
        # SGLang's one pool for all layers has one width of heads.
        head_dim=E2B_TINY.global_head_dim if has_one_pool(seed) else E2B_TINY.head_dim,
        seed=seed,
    )


@pytest.fixture(scope="module", params=range(MODELS), ids=lambda seed: f"model{seed}")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    shape = random_shape(request.param)
    path: Path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, shape)
    return Engine(
        path,
        device="cpu",
        dtype="float32",
        max_total_tokens=8192,
        disable_hybrid_swa_memory=has_one_pool(request.param),
    )


def tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(20, 500) for _ in range(count))


@st.composite
def prompts(draw: st.DrawFn, *, logprobs: bool = False, unfinished: bool = False) -> list[Prompt]:
    """1 to 8 requests with 1 to 300 new tokens after 0 to 300 cached ones."""
    content = random.Random(draw(st.integers(0, 2**32)))
    batch = []
    for _ in range(draw(st.integers(1, REQUESTS))):
        cached = draw(st.one_of(st.just(0), st.integers(0, LONGEST)))
        new = draw(st.integers(2 if unfinished else 1, LONGEST))
        wanted = logprobs and draw(st.booleans())
        batch.append(
            Prompt(
                cached=tokens(content, cached),
                new=tokens(content, new),
                logprob_start=draw(st.integers(0, cached + new)) if wanted else -1,
                to_come=tokens(content, draw(st.integers(1, 50))) if unfinished else (),
            )
        )
    return batch


def kept_rows(batch: list[Prompt]) -> int:
    """Rows that the scheduler or the sampler reads, counted from the request's own words."""
    kept = 0
    for prompt in batch:
        wanted = 1
        if prompt.logprob_start >= 0:
            first = max(prompt.logprob_start - len(prompt.cached), 0)
            wanted = max(len(prompt.new) - first, 1)
        kept += wanted
    return kept


def expected_rows(engine: Engine, total: int, kept: int) -> list[int]:
    config = engine.text_model.config
    front = config.num_hidden_layers - config.num_kv_shared_layers - 1
    return [total] * front + [kept] * (config.num_hidden_layers - front)


def both_ways(engine: Engine, batch: list[Prompt]) -> tuple[Observed, Observed]:
    scheduled = engine.schedule(batch)
    stock = run(engine, scheduled, "0")
    fast = run(engine, scheduled, "1")
    layers = engine.text_model.config.num_hidden_layers
    assert stock.rows == [sum(len(p.new) for p in batch)] * layers
    assert_same_objects(stock)
    assert_same_objects(fast)
    assert_same_cache(stock, fast)
    return stock, fast


def last_rows(batch: list[Prompt], hidden: torch.Tensor | None) -> torch.Tensor:
    assert hidden is not None
    ends = torch.tensor([len(p.new) for p in batch]).cumsum(0) - 1
    return hidden[ends]


random_batches = settings(
    max_examples=BATCHES_PER_MODEL,
    deadline=None,
    derandomize=True,
    # In the interpreter a failing example would be shrunk for minutes.
    phases=[Phase.explicit, Phase.generate] if INTERPRETED else list(Phase),
    # The engine is the same for all examples on purpose.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@random_batches
@given(batch=prompts())
def test_last_rows_are_those_of_the_stock_forward(engine: Engine, batch: list[Prompt]) -> None:
    stock, fast = both_ways(engine, batch)
    total = sum(len(p.new) for p in batch)
    if total > len(batch):
        assert fast.rows == expected_rows(engine, total, len(batch))
        # One FFN less over all rows than layers with K/V, and one attention less as well.
        assert fast.attention_rows == fast.rows
    else:
        assert fast.rows == stock.rows
    torch.testing.assert_close(
        last_rows(batch, fast.hidden), last_rows(batch, stock.hidden), atol=TOLERANCE, rtol=1e-4
    )
    assert fast.hidden is not None
    assert fast.hidden.isfinite().all()
    assert_same_answers(stock, fast, TOLERANCE)


@random_batches
@given(batch=prompts(logprobs=True))
def test_input_logprobs_are_those_of_the_stock_forward(engine: Engine, batch: list[Prompt]) -> None:
    stock, fast = both_ways(engine, batch)
    total, kept = sum(len(p.new) for p in batch), kept_rows(batch)
    if kept < total:
        assert fast.rows == expected_rows(engine, total, kept)
    else:
        assert fast.rows == stock.rows
    assert_same_answers(stock, fast, TOLERANCE)


@random_batches
@given(batch=prompts(unfinished=True))
def test_chunks_that_nobody_reads_skip_the_tail(engine: Engine, batch: list[Prompt]) -> None:
    _, fast = both_ways(engine, batch)
    total = sum(len(p.new) for p in batch)
    # Where the forward is not told, each request keeps its last row.
    kept = 0 if releases.tells_unread_chunks() else len(batch)
    assert fast.rows == [rows for rows in expected_rows(engine, total, kept) if rows]
    assert fast.hidden is not None
    assert fast.hidden.isfinite().all()
    assert fast.output.next_token_logits.isfinite().all()


@pytest.fixture(autouse=True)
def _quiet_numbers() -> Iterator[None]:
    with torch.inference_mode():
        yield
