"""A pair of servers in bf16, against each other and both against fp32 (``truth``).

Rows are exact; answers are close, for stock and fast round the same sums in another order. Every
prompt's next token is compared over the whole vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import truth
from ask import compare, tokens
from layer_rows import assert_all_fast, cut
from server import Server, pair
from sglang_gemma4_reference.checkpoint import E2B_TINY, write_checkpoint

WINDOW = E2B_TINY.sliding_window
LENGTHS = (300, 12, 50, WINDOW - 1, WINDOW, WINDOW + 1, 5, 2, 100, 20, 40, 70, 90, 15)
BATCH = [tokens(length, seed=length) for length in LENGTHS]
# Prompts, and how many of their first tokens are in the cache.
PREFIXED = [
    (tokens(cached + new, seed=1000 + cached), cached)
    for cached, new in ((10, 5), (WINDOW, 2), (90, 20), (60, WINDOW + 20))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = dataclasses.replace(E2B_TINY, dtype="bfloat16")
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "bfloat16", shape)


@pytest.fixture(scope="module")
def servers(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    with pair(checkpoint, tmp_path_factory.mktemp("servers"), "--dtype", "bfloat16") as both:
        yield both


def in_one_batch(server: Server) -> list[torch.Tensor]:
    """Of prompts in one request, which the server forwards together and in chunks."""
    return list(truth.server_logprobs(server, BATCH))


def behind_prefixes(server: Server) -> list[torch.Tensor]:
    """Of prompts one by one: first a prefix, then all, the prefix in the cache."""
    return [
        truth.server_logprobs(server, [part])[0]
        for prompt, cached in PREFIXED
        for part in (prompt[:cached], prompt)
    ]


def test_answers(servers: tuple[Server, Server], checkpoint: Path) -> None:
    """All prompts together: of a few alone the errors vary too much."""
    batch = compare(servers, in_one_batch)
    assert_all_fast(batch.prefills)
    assert any(len(prefill.extend_lens) > 1 for prefill in batch.prefills)
    prefixed = compare(servers, behind_prefixes)
    expected = [
        part
        for prompt, cached in PREFIXED
        for part in (([0], cut(cached, 1)), ([cached], cut(len(prompt) - cached, 1)))
    ]
    assert [(prefill.prefix_lens, prefill.rows) for prefill in prefixed.prefills] == expected
    prompts = [*BATCH, *(part for prompt, n in PREFIXED for part in (prompt[:n], prompt))]
    oracle = truth.load(checkpoint)
    truth.assert_no_further(
        fast=torch.stack([*batch.on, *prefixed.on]),
        stock=torch.stack([*batch.off, *prefixed.off]),
        truth=torch.stack([truth.logprobs(oracle, prompt) for prompt in prompts]),
    )
