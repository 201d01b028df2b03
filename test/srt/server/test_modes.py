"""Serving modes on real servers: each is shown to be active, and on equals off.

The modes that need nothing but a request run on the session's servers; the others have a pair of
their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest

from harness.ask import (
    GREEDY,
    TOLERANCE,
    Compared,
    assert_alike,
    assert_ranks_alike,
    at_once,
    compare,
    drafted,
    generate,
    one_by_one,
    outputs,
    prompts_of,
    tokens,
)
from harness.layer_rows import assert_all_fast, assert_all_stock, cut
from harness.server import CAPTURED_ROWS, CHUNK, Pair, Server, pair
from sglang_gemma4_reference.checkpoint import E2B_TINY, write_assistant

LABELS = [40, 300, 511]
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})


# -- requests that generate nothing ----------------------------------------------------------


def score(server: Server, query: list[int], items: list[list[int]]) -> list[list[float]]:
    """Return log-probabilities of ``LABELS`` after the query and each item."""
    body = {"query": query, "items": items, "label_token_ids": LABELS, "model": "default"}
    scores: list[list[float]] = server.post("/v1/score", body).json()["scores"]
    return scores


def test_score(servers: Pair) -> None:
    """/v1/score reads the last row of each request, whose prompt may span several chunks."""
    query, items = tokens(30, seed=1), prompts_of(5, 12, 2 * CHUNK + 9)
    both = compare(servers, lambda server: score(server, query, items))
    assert_all_fast(both.prefills)
    numpy.testing.assert_allclose(both.on, both.off, atol=TOLERANCE, rtol=0)
    # Each item has its own scores: they are of its last row.
    assert len(set(chain.from_iterable(both.on))) == len(items) * len(LABELS)


def test_input_logprobs_without_generation(servers: Pair) -> None:
    """Requests that want log-probabilities of a prompt's last tokens alone keep these rows."""
    # SGLang gives the likeliest tokens of a position that was not generated.
    body = {"logprob_start_len": 60, "new_tokens": 0, "top_logprobs_num": 0}
    ask = one_by_one(tokens(70, seed=3), **body)
    both = assert_alike(servers, ask, rows=[cut(70, 10)])
    assert len(both.on[0].input_logprobs) == 9


# -- drafts of a multi-token-prediction assistant --------------------------------------------


@pytest.fixture(
    scope="module",
    params=[(1, 3), pytest.param((2, 5), marks=pytest.mark.release)],
    ids=["one rank", "two ranks, five drafts"],
)
def drafting(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Yield servers on one or two tensor-parallel ranks, with an assistant that drafts ahead.

    The fast one replays what verifies drafts, and the tails of its prefills.
    """
    directory = tmp_path_factory.mktemp("drafting")
    write_assistant(directory / "assistant", E2B_TINY)
    ranks, ahead = request.param
    arguments = (
        *("--speculative-algorithm", "NEXTN"),
        *("--speculative-draft-model-path", str(directory / "assistant")),
        *("--speculative-num-steps", str(ahead)),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(ahead + 1)),
        *("--decode-log-interval", "1"),
        *("--tp-size", str(ranks)),
    )
    with pair(tiny_checkpoint, directory, *arguments, captured=True) as both:
        yield both


def compare_drafts(servers: Pair, ask: Callable[[Server], list[Any]]) -> Compared[Any]:
    """Assert equal tokens and accepted lengths, of prompts cut on all ranks."""
    both = compare(servers, ask)
    assert_all_fast(both.prefills, captured=CAPTURED_ROWS)
    assert any(prefill.replays for prefill in both.prefills)
    assert_ranks_alike(both.prefills, servers[0].resolved("tp_size"))
    assert both.on == both.off
    return both


def test_drafts(drafting: Pair, off_server: Server) -> None:
    """Tokens and accepted lengths are equal; the assistant starts from the prompt's last row.

    A server without drafts gives the same tokens.
    """
    prompts = prompts_of(50, 7, 300)
    both = compare_drafts(drafting, lambda server: drafted(server, prompts))
    right = wrong = 0
    for prompt, (answer, histogram, _) in zip(prompts, both.on, strict=True):
        wrong += histogram[0]
        right += sum(histogram[1:])
        assert outputs(off_server, prompt, max_new_tokens=24) == [answer]
    assert right, "no draft was accepted"
    assert wrong, "no draft was rejected"
    # Drafts are verified by the stock forward: of every one of them a row is read.
    for server in drafting:
        assert server.verifications()
        assert_all_stock(server.verifications())
    fast, _ = drafting
    assert any("accept len" in line for line in fast.log_lines("cpu graph: True"))
    for line in ("YOCO fast prefill is active", "the tail is captured for up to "):
        assert len(fast.log_lines(line)) == fast.resolved("tp_size")


def test_drafts_beside_a_grammar(drafting: Pair, off_server: Server) -> None:
    """Two of four concurrent answers must match a schema, and none reaches its end."""
    prompts = prompts_of(150, 20, 60, 33)
    bodies = []
    for number, prompt in enumerate(prompts):
        sampling: dict[str, Any] = GREEDY | {"max_new_tokens": 40}
        if number % 2:
            sampling["json_schema"] = SCHEMA
        bodies.append({"input_ids": prompt, "sampling_params": sampling})

    def ask(server: Server) -> list[Any]:
        return at_once(lambda body: server.generate(**body)["output_ids"], bodies)

    both = compare_drafts(drafting, ask)
    assert both.on == ask(off_server)
    free = [outputs(off_server, prompt, max_new_tokens=40)[0] for prompt in prompts]
    assert both.on[::2] == free[::2]
    assert both.on[1] != free[1]


@pytest.mark.release
def test_drafts_that_fill_the_pool(drafting: Pair) -> None:
    """Cached prompts must be evicted, with the K and V of their windows."""
    prompts = prompts_of(*range(520, 540))

    def ask(server: Server) -> list[tuple[Any, ...]]:
        return at_once(lambda prompt: drafted(server, [prompt])[0], prompts)

    both = compare_drafts(drafting, ask)
    size = drafting[0].resolved("max_total_tokens")
    assert sum(sum(prefill.extend_lens) for prefill in both.prefills) > size


def test_drafts_overlap_scheduling(drafting: Pair) -> None:
    """On a CPU SGLang overlaps only the drafts of an assistant without K/V of its own."""
    for server in drafting:
        assert server.resolved("disable_overlap_schedule") is False


def test_drafts_after_a_cached_prompt(drafting: Pair) -> None:
    """A second turn starts from the first one's K/V, that of accepted drafts included."""

    def ask(server: Server) -> list[tuple[Any, ...]]:
        prompt = tokens(60, seed=4)
        [first] = drafted(server, [prompt])
        return [first, *drafted(server, [[*prompt, *first[0], *tokens(9, seed=5)]])]

    both = compare_drafts(drafting, ask)
    assert max(max(prefill.prefix_lens) for prefill in both.prefills) >= 60


def test_drafts_beside_input_logprobs(drafting: Pair) -> None:
    """A draft starts from the last row where the suffix of a prompt is kept too."""
    both = assert_alike(
        drafting,
        lambda server: generate(server, tokens(70, seed=6), logprob_start_len=60),
        rows=[cut(70, 10)] * drafting[0].resolved("tp_size"),
    )
    assert len(both.on[0].input_logprobs) == 9
