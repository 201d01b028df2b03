"""A pair of servers in bf16, against each other and both against fp32 (``truth``).

Rows are exact; answers are close, for stock and fast round the same sums in another order. Every
prompt's next token is compared over the whole vocabulary. Then ``verify`` judges the same servers,
for a release.

One model is well-conditioned; in the other rounding errors multiply, as in trained ones. There
bf16 is far from fp32 either way, and what stock differs from itself is the measure.
"""

from __future__ import annotations

import dataclasses
import statistics
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import truth
from harness.ask import compare, tokens
from harness.layer_rows import assert_all_fast, cut
from harness.server import Pair, Server, pair
from sglang_gemma4_reference.checkpoint import E2B_TINY, E2B_TINY_SHARP, write_checkpoint
from sglang_gemma4_yoco.commands import prompts, verify

WINDOW = E2B_TINY.sliding_window
LENGTHS = (300, 12, 50, WINDOW - 1, WINDOW, WINDOW + 1, 5, 2, 100, 20, 40, 70, 90, 15)
BATCH = [tokens(length, seed=length) for length in LENGTHS]
# Prompts, and how many of their first tokens are in the cache.
PREFIXED = [
    (tokens(cached + new, seed=1000 + cached), cached)
    for cached, new in ((10, 5), (WINDOW, 2), (90, 20), (60, WINDOW + 20))
]


MODELS = {"mild": dataclasses.replace(E2B_TINY, dtype="bfloat16"), "sharp": E2B_TINY_SHARP}
# Stock in bf16 from fp32, root of the mean square: truth's own, and a third of what prompts differ.
FROM_FP32: dict[str, dict[str, float]] = {"mild": {}, "sharp": {"at_most": 1.0}}


@pytest.fixture(scope="module", params=[pytest.param("mild", marks=pytest.mark.release), "sharp"])
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / model, MODELS[model])


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(checkpoint, tmp_path_factory.mktemp("servers"), "--dtype", "bfloat16") as both:
        yield both


def in_one_batch(server: Server) -> list[torch.Tensor]:
    """Of prompts in one request, which the server forwards together and in chunks."""
    return list(truth.server_logprobs(server, BATCH))


def after_prefixes(server: Server) -> list[torch.Tensor]:
    """Of prompts one by one: first a prefix, then all, the prefix in the cache."""
    return [
        truth.server_logprobs(server, [part])[0]
        for prompt, cached in PREFIXED
        for part in (prompt[:cached], prompt)
    ]


def once_more(server: Server) -> list[torch.Tensor]:
    """Of each prompt, when all but its last token is in the cache."""
    return [truth.server_logprobs(server, [prompt])[0] for prompt in BATCH for _ in "12"][1::2]


def test_answers(servers: Pair, checkpoint: Path, model: str) -> None:
    """All prompts together: of a few alone the errors vary too much."""
    batch = compare(servers, in_one_batch)
    assert_all_fast(batch.prefills)
    assert any(len(prefill.extend_lens) > 1 for prefill in batch.prefills)
    prefixed = compare(servers, after_prefixes)
    expected = [
        part
        for prompt, cached in PREFIXED
        for part in (([0], cut(cached, 1)), ([cached], cut(len(prompt) - cached, 1)))
    ]
    assert [(prefill.prefix_lens, prefill.rows) for prefill in prefixed.prefills] == expected
    sent = [*BATCH, *(part for prompt, n in PREFIXED for part in (prompt[:n], prompt))]
    oracle = truth.load(checkpoint)
    truth.assert_no_further(
        fast=torch.stack([*batch.on, *prefixed.on]),
        stock=torch.stack([*batch.off, *prefixed.off]),
        truth=torch.stack([truth.logprobs(oracle, prompt) for prompt in sent]),
        **FROM_FP32[model],
    )
    # The last row by itself: in stock all its layers are rounded otherwise then, in the fast path
    # only the tail.
    servers[1].forget_prefixes()
    truth.assert_as_near_as_rounding(
        fast=torch.stack(batch.on),
        stock=torch.stack(batch.off),
        rounded=[torch.stack(once_more(servers[1]))],
    )


@pytest.mark.release
def test_verify_finds_nothing(servers: Pair, checkpoint: Path) -> None:
    fast, stock = servers
    tokenizer = prompts.tokenizer_of(str(checkpoint))
    texts = prompts.read_file(prompts.BUNDLED)[:8]
    args = Namespace(prompt_tokens=[64], repeats=2, texts=texts, device="cpu")
    document: dict[str, Any] = {}
    sent = verify.fit_prompts(document, args, tokenizer, stock)
    assert document["rule"] == "noise floor"
    assert not document["left_out"]
    found = verify.examine([stock, fast], sent)
    _, noise = verify.conclude(document, found[False], found[True])
    assert document["problems"] == []
    assert max(statistics.fmean(one.prefilled) for one in noise.values()) > 1e-3
