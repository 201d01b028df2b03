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

import pytest
import torch

from harness import truth
from harness.batches import BATCHES, batch_of
from harness.fixtures import Checkpoints
from harness.forwards import ENGINE, assert_fast, outcomes
from harness.observe import Observed, run
from harness.rounding import rounded_otherwise
from sglang_gemma4_reference.checkpoint import E2B_TINY, E2B_TINY_SHARP
from sglang_gemma4_reference.engine import Engine
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


def answers(seen: Observed) -> torch.Tensor:
    """Return log-probabilities of the token after each prompt: [prompts, vocab]."""
    assert seen.hidden.dtype is torch.bfloat16
    return torch.log_softmax(seen.output.next_token_logits.float(), -1)


def all_answers(engine: Engine, rounding: int) -> torch.Tensor:
    """Return all answers of stock with perturbed rounding, [prompts, vocab]."""
    found = []
    for prompts in ALL.values():
        scheduled = engine.schedule(prompts)
        with rounded_otherwise(engine, rounding):
            found.append(answers(run(engine, scheduled, "0")))
    return torch.cat(found)


@pytest.mark.usefixtures("forgotten_reports")
@pytest.mark.parametrize("model", MODELS)
def test_answers(model: str, checkpoints: Checkpoints) -> None:
    """All prompts are judged together: the errors of a few vary too much."""
    checkpoint = checkpoints(MODELS[model])
    engine = Engine(checkpoint, **ENGINE | {"dtype": "bfloat16"})
    assert engine.text_model.layers[0].mlp.gate_up_proj.weight.dtype is torch.bfloat16
    oracle, stock, fast, want = truth.load(checkpoint), [], [], []
    for prompts in ALL.values():
        seen = assert_fast(engine, prompts, tolerance=math.inf)
        assert {keys.dtype for keys, _ in seen[1].kv} == {torch.bfloat16}
        stock.append(answers(seen[0]))
        fast.append(answers(seen[1]))
        want += [truth.logprobs(oracle, prompt.cached + prompt.new) for prompt in prompts]
    assert outcomes().keys() <= {counters.TAIL_EAGER, counters.TAIL_SKIPPED}
    by_stock, by_fast = torch.cat(stock), torch.cat(fast)
    # In bf16 a sharp model's answers are as far from fp32's as those of two prompts are apart.
    limit = {"at_most": 1.0}
    if model == "mild":
        limit = {}
    truth.assert_no_further(by_fast, by_stock, torch.stack(want), **limit)
    rounded = [all_answers(engine, rounding) for rounding in range(4)]
    truth.assert_as_near_as_rounding(by_fast, by_stock, rounded)
