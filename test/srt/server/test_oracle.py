"""The server with the fast path on against Hugging Face's Gemma 4, same checkpoint, both in fp32.

Of every prompt is proven first that the fast path was active, then that the log-probabilities of
its next token agree over the whole vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma4ForConditionalGeneration

import truth
from ask import TOLERANCE, tokens
from layer_rows import assert_all_fast, cut
from server import Server
from sglang_gemma4_reference.checkpoint import E2B_TINY

WINDOW = E2B_TINY.sliding_window


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Gemma4ForConditionalGeneration:
    return truth.load(tiny_checkpoint)


@pytest.mark.parametrize("length", [2, WINDOW - 1, WINDOW, WINDOW + 1, 100, 500])
def test_prompt(on_server: Server, oracle: Gemma4ForConditionalGeneration, length: int) -> None:
    """Prompts shorter and longer than the window, in one chunk and in several."""
    prompt = tokens(length, seed=length)
    on_server.forget_prefixes()
    mark = on_server.mark()
    [got] = truth.server_logprobs(on_server, [prompt])
    assert_all_fast(on_server.prefills(since=mark))
    torch.testing.assert_close(got, truth.logprobs(oracle, prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("cached", "new"), [(10, 5), (WINDOW, 2), (90, 20), (90, WINDOW + 20)])
def test_cached_prefix(
    on_server: Server, oracle: Gemma4ForConditionalGeneration, cached: int, new: int
) -> None:
    """Prompts whose beginning is in the cache: the skipped rows of two forwards lie behind them."""
    prompt = tokens(cached + new, seed=cached)
    on_server.forget_prefixes()
    truth.server_logprobs(on_server, [prompt[:cached]])
    mark = on_server.mark()
    [got] = truth.server_logprobs(on_server, [prompt])
    [prefill] = on_server.prefills(since=mark)
    assert prefill.prefix_lens == [cached]
    assert prefill.rows == cut(new, 1)
    torch.testing.assert_close(got, truth.logprobs(oracle, prompt), atol=TOLERANCE, rtol=0)


def test_batch(on_server: Server, oracle: Gemma4ForConditionalGeneration) -> None:
    """Several prompts in one forward, one of them with a cached prefix."""
    prompts = [tokens(n, seed=n) for n in (300, 12, 1, 50, WINDOW, 5)]
    on_server.forget_prefixes()
    truth.server_logprobs(on_server, [prompts[3][:40]])
    mark = on_server.mark()
    got = truth.server_logprobs(on_server, prompts)
    prefills = on_server.prefills(since=mark)
    assert_all_fast(prefills)
    assert any(len(prefill.extend_lens) > 1 for prefill in prefills)
    assert any(40 in prefill.prefix_lens for prefill in prefills)
    want = torch.stack([truth.logprobs(oracle, prompt) for prompt in prompts])
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_greedy_continuation(on_server: Server, oracle: Gemma4ForConditionalGeneration) -> None:
    """Decoding goes on from what the fast path left in the cache, past the window."""
    prompt, count = tokens(60, seed=1), WINDOW + 8
    on_server.forget_prefixes()
    mark = on_server.mark()
    reply = on_server.generate(
        input_ids=prompt,
        sampling_params={"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
    )
    [prefill] = on_server.prefills(since=mark)
    assert prefill.rows == cut(60, 1)
    want = oracle.generate(
        torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    assert reply["output_ids"] == want[0, 60:].tolist()
