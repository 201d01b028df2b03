"""The server with the fast path on against Hugging Face's Gemma 4, same checkpoint, both in fp32.

For every prompt it is asserted first that the fast path was active, then that the log-probabilities
of its next token agree over the whole vocabulary.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Gemma4ForConditionalGeneration

from harness import truth
from harness.ask import TOLERANCE, outputs, prompts_of, tokens
from harness.layer_rows import assert_all_fast, cut
from harness.server import Server
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.row_trace import Prefill

WINDOW = E2B_TINY.sliding_window
close = partial(torch.testing.assert_close, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Gemma4ForConditionalGeneration:
    return truth.load(tiny_checkpoint)


def answers(server: Server, *prompts: list[int]) -> tuple[torch.Tensor, list[Prefill]]:
    """Return log-probabilities after prompts of one request, and the forwards that ran."""
    mark = server.mark()
    return truth.server_logprobs(server, prompts), server.prefills(since=mark)


@pytest.fixture(autouse=True)
def _nothing_is_cached(on_server: Server) -> None:
    on_server.forget_prefixes()


@pytest.mark.parametrize(("cached", "new"), [(10, 5), (WINDOW, 2), (90, 20), (90, WINDOW + 20)])
def test_cached_prefix(
    on_server: Server, oracle: Gemma4ForConditionalGeneration, cached: int, new: int
) -> None:
    """The first part is cached by an earlier request; the rest is cut after that prefix."""
    prompt = tokens(cached + new, seed=cached)
    answers(on_server, prompt[:cached])
    [got], [prefill] = answers(on_server, prompt)
    assert (prefill.prefix_lens, prefill.rows) == ([cached], cut(new, 1))
    close(got, truth.logprobs(oracle, prompt))


def test_batch(on_server: Server, oracle: Gemma4ForConditionalGeneration) -> None:
    """Several prompts share a forward, one of them with a cached prefix.

    They are shorter and longer than the window, in one chunk and in several.
    """
    around_the_window = (WINDOW - 1, WINDOW, WINDOW + 1)
    prompts = prompts_of(300, 12, 1, 50, *around_the_window, 5, 2, 100, 500)
    answers(on_server, prompts[3][:40])
    got, prefills = answers(on_server, *prompts)
    assert_all_fast(prefills)
    assert any(len(prefill.extend_lens) > 1 for prefill in prefills)
    assert any(40 in prefill.prefix_lens for prefill in prefills)
    close(got, torch.stack([truth.logprobs(oracle, prompt) for prompt in prompts]))


def test_greedy_continuation(on_server: Server, oracle: Gemma4ForConditionalGeneration) -> None:
    """Decoding continues from the K and V that the fast path left, past the window."""
    prompt, count = tokens(60, seed=1), WINDOW + 8
    mark = on_server.mark()
    [answer] = outputs(on_server, prompt, max_new_tokens=count)
    [prefill] = on_server.prefills(since=mark)
    assert prefill.rows == cut(60, 1)
    assert answer == truth.continuation(oracle, prompt, count)
