"""Hugging Face's Gemma 4 in fp32, the reference for answers.

It computes every row in every layer. Loaded from a checkpoint in bf16, it has the same weights as a
server in bf16, since every bf16 number is also an fp32 number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Gemma4ForConditionalGeneration

from harness.server import Server
from sglang_gemma4_reference.checkpoint import E2B_TINY


def load(checkpoint: Path) -> Gemma4ForConditionalGeneration:
    """Return the model of ``checkpoint``, in fp32 whatever its type."""
    return Gemma4ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs(model: Gemma4ForConditionalGeneration, prompt: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities of the token after ``prompt``: [vocab]."""
    logits = model(input_ids=torch.tensor([prompt])).logits
    return torch.log_softmax(logits[0, -1], -1)


def continuation(
    model: Gemma4ForConditionalGeneration, prompt: Sequence[int], count: int
) -> list[int]:
    """Return the ``count`` tokens after ``prompt``, each the most likely one.

    ``generate`` of transformers 5.23 and later also skips rows of the KV-shared layers, unless it
    keeps all logits.
    """
    rows = []
    last = model.model.language_model.layers[-1]
    with last.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[1])):
        answer = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            logits_to_keep=0,
        )
    assert rows == [len(prompt)] + [1] * (count - 1), "the reference has skipped rows"
    found: list[int] = answer[0, len(prompt) :].tolist()
    return found


def server_logprobs(server: Server, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return log-probabilities after each prompt of one /generate: [prompts, vocab]."""
    replies = server.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        top_logprobs_num=E2B_TINY.vocab_size,
    )
    whole = torch.full((len(prompts), E2B_TINY.vocab_size), torch.nan)
    for found, reply in zip(whole, replies, strict=True):
        [best] = reply["meta_info"]["output_top_logprobs"]
        for logprob, token, _ in best:
            found[token] = logprob
    return whole


@dataclass(frozen=True)
class Error:
    """Errors of log-probabilities: root mean square, and maximum."""

    rms: float
    largest: float

    @classmethod
    def of(cls, got: torch.Tensor, want: torch.Tensor) -> Error:
        """Return the error of all values together; those that are not finite are infinitely far."""
        difference = (got - want).abs().double().nan_to_num(nan=torch.inf)
        return cls(float(difference.square().mean().sqrt()), float(difference.max()))


# Root mean square of bf16's error against fp32. bf16 rounds by 2**-9 at most, by 2**-9 / 3**0.5 in
# root mean square. In a layer about ten results are rounded that are as large as the stream itself
# or what is added to it (norms, projections, attention, FFN and per-layer input, three sums):
# over 8 layers (8 * 10)**0.5 * 2**-9 / 3**0.5 = 0.010 of a logit, whose scale is 2.3 here. So 0.023
# is expected; four times as much is not bf16, but another model.
_BF16_RMS = 0.1
# Far less than any rounding to 8 bits of mantissa, far more than fp32's.
_NOT_FP32 = 1e-3
# Log-probabilities of one prompt depend on the 64 numbers of its last hidden state.
_INDEPENDENT = 60
# The largest error is a single draw, and varies more than the mean.
_LARGEST = 1.3


def assert_no_further(
    fast: torch.Tensor, stock: torch.Tensor, truth: torch.Tensor, *, at_most: float = _BF16_RMS
) -> None:
    """Assert that fast is as near to fp32 as stock, and as near to stock as rounding allows.

    Fast and stock round the same sums in another order, for kept rows of the tail alone. Even if
    all their errors were independent, the root mean squares of two sets of n draws would be within
    3 / n**0.5 of each other: 3 standard deviations of their ratio.

    Args:
        fast: log-probabilities of the fast path: [prompts, vocab].
        stock: of the stock forward, in the same type.
        truth: in fp32, of the same weights.
        at_most: the largest root mean square of stock's error; more means another model.
    """
    of_fast, of_stock, apart = Error.of(fast, truth), Error.of(stock, truth), Error.of(fast, stock)
    assert _NOT_FP32 < of_stock.rms < at_most, of_stock
    no_further = 1 + 3 / (_INDEPENDENT * len(truth)) ** 0.5
    assert of_fast.rms <= no_further * of_stock.rms, (of_fast, of_stock)
    assert of_fast.largest <= _LARGEST * of_stock.largest, (of_fast, of_stock)
    # Two independent errors of one size are 2**0.5 of it apart; these share the front's.
    assert apart.rms <= 2**0.5 * of_stock.rms, (apart, of_stock)
    assert apart.largest <= 2 * of_stock.largest, (apart, of_stock)


def assert_as_near_as_rounding(
    fast: torch.Tensor, stock: torch.Tensor, rounded: Sequence[torch.Tensor]
) -> None:
    """Assert that fast is no further from stock than stock with perturbed rounding.

    For models that multiply rounding errors: bf16 is so far from fp32 there that fp32 says nothing
    about the fast path, which shares the front's errors with stock.

    Args:
        fast: log-probabilities of the fast path: [prompts, vocab].
        stock: of the stock forward.
        rounded: of stock forwards whose tail rounds otherwise.
    """
    apart = Error.of(fast, stock)
    rms, largest = [], []
    for other in rounded:
        noise = Error.of(other, stock)
        rms.append(noise.rms)
        largest.append(noise.largest)
    assert min(rms) > _NOT_FP32, rms
    assert apart.rms <= max(rms), (apart, rms)
    assert apart.largest <= max(largest), (apart, largest)
