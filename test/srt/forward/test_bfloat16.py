"""The fast path in bf16, against stock in bf16 and both against fp32 (``truth``).

Stock and fast round the same sums in another order, so they are close and not equal. What must be
exact are the rows and the cache: K and V of a row depend on no other row's rounding.

Two models: a well-conditioned one, and one that amplifies rounding errors as a trained one may, so
that it is measured against stock with perturbed rounding (``rounding``). ``test_checked_models``
tests that each layer's output is as close as rounding allows: the self-check compares it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import truth
from harness.batches import BATCHES, batch_of
from harness.forwards import assert_fast
from harness.observe import Observed, run
from harness.rounding import (
    rounded_otherwise,
)
from sglang_gemma4_reference.checkpoint import E2B_TINY, E2B_TINY_SHARP, write_checkpoint
from sglang_gemma4_reference.engine import SWITCHED_OFF, Engine, reset_log
from sglang_gemma4_yoco import counters

WINDOW = E2B_TINY.sliding_window
ALL = {
    **BATCHES,
    "at the window's edge": batch_of((0, WINDOW - 1), (0, WINDOW), (0, WINDOW + 1), (WINDOW, 2)),
    "eight": batch_of(
        *((0, 5), (3, 50), (0, 100), (40, 9)), *((0, 64), (8, 20), (0, 2), (100, 30))
    ),
    "long ones": batch_of((20, 10), (10, 20), (5, 100), (0, 200)),
}


MODELS = {"mild": dataclasses.replace(E2B_TINY, dtype="bfloat16"), "sharp": E2B_TINY_SHARP}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / model, MODELS[model])


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return truth.load(checkpoint)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    made = Engine(checkpoint, device="cpu", dtype="bfloat16", max_total_tokens=4096)
    assert made.text_model.layers[0].mlp.gate_up_proj.weight.dtype is torch.bfloat16
    return made


@pytest.fixture(autouse=True)
def _nothing_else_fell_back() -> Iterator[None]:
    reset_log()
    yield
    assert {*counters.served.forwards} <= {counters.TAIL_EAGER, counters.TAIL_SKIPPED, SWITCHED_OFF}


def answers(seen: Observed) -> torch.Tensor:
    """Return log-probabilities of the token after each prompt: [prompts, vocab]."""
    assert seen.hidden is not None
    assert seen.hidden.dtype is torch.bfloat16
    logprobs: torch.Tensor = seen.output.next_token_logits.float().log_softmax(-1)
    return logprobs


def both_ways(engine: Engine, name: str) -> tuple[Observed, Observed]:
    """Return the stock forward and the fast one, whose rows are asserted."""
    stock, fast = assert_fast(engine, ALL[name], tolerance=math.inf)
    assert {k.dtype for k, _ in fast.kv} == {torch.bfloat16}
    return stock, fast


def all_answers(engine: Engine, rounding: int) -> torch.Tensor:
    """Return all answers of stock with perturbed rounding, [prompts, vocab]."""
    found = []
    for prompts in ALL.values():
        scheduled = engine.schedule(prompts)
        with rounded_otherwise(engine, rounding):
            found.append(answers(run(engine, scheduled, "0")))
    return torch.cat(found)


@pytest.fixture(scope="module")
def rounded(engine: Engine) -> list[torch.Tensor]:
    """Return stock's answers to all prompts, under four perturbations of its rounding."""
    found: list[torch.Tensor] = []
    for rounding in range(4):
        found.append(all_answers(engine, rounding))
    return found


def test_answers(engine: Engine, oracle: Any, model: str, rounded: list[torch.Tensor]) -> None:
    """All prompts are judged together: the errors of a few vary too much."""
    stock, fast, want = [], [], []
    for name, prompts in ALL.items():
        one, other = both_ways(engine, name)
        stock.append(answers(one))
        fast.append(answers(other))
        want += [truth.logprobs(oracle, prompt.cached + prompt.new) for prompt in prompts]
    by_stock, by_fast = torch.cat(stock), torch.cat(fast)
    # In bf16 a sharp model's answers are as far from fp32's as those of two prompts are apart.
    limit = {"at_most": 1.0}
    if model == "mild":
        limit = {}
    truth.assert_no_further(by_fast, by_stock, torch.stack(want), **limit)
    truth.assert_as_near_as_rounding(by_fast, by_stock, rounded)
