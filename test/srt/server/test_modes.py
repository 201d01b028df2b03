"""Serving modes on real servers: on equals off, and each mode is shown to be what it says it is.

The modes that need nothing but a request run on the session's servers; the others have a pair of
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.ask import (
    TOLERANCE,
    Compared,
    assert_alike,
    compare,
    drafted,
    drafted_twice,
    generate,
    outputs,
    prompts_of,
    tokens,
)
from harness.layer_rows import assert_all_fast, assert_all_stock, cut
from harness.server import (
    CAPTURED_ARGUMENTS,
    CAPTURED_GRAPHS,
    CAPTURED_ROWS,
    CHUNK,
    Pair,
    Server,
    drafting_with,
    running,
)
from sglang_gemma4_reference.checkpoint import E2B_TINY, write_assistant
from sglang_gemma4_reference.row_trace import Prefill

LABELS = [40, 300, 511]


# -- requests that generate nothing ----------------------------------------------------------


def score(server: Server, query: list[int], items: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of ``LABELS`` after the query and each item."""
    body = {"query": query, "items": items, "label_token_ids": LABELS, "model": "default"}
    scores: list[list[float]] = server.post("/v1/score", body).json()["scores"]
    return scores


def assert_same_scores(both: Compared[list[float]]) -> None:
    assert len(both.on) == len(both.off) > 0
    for on, off in zip(both.on, both.off, strict=True):
        assert on == pytest.approx(off, abs=TOLERANCE, rel=0)
        assert len(set(on)) == len(LABELS)


def test_score(servers: Pair) -> None:
    """/v1/score reads the last row of each request, whose prompt may span several chunks."""
    query, items = tokens(30, seed=1), [tokens(n, seed=n) for n in (5, 12, 2 * CHUNK + 9)]
    both = compare(servers, lambda server: score(server, query, items))
    assert_all_fast(both.prefills)
    assert_same_scores(both)
    # Each item has its own scores: they are of its last row.
    assert len({tuple(scores) for scores in both.on}) == len(items)


def test_input_logprobs_without_generation(servers: Pair) -> None:
    """A request for the log-probabilities of its prompt's last tokens alone keeps these rows."""

    def ask(server: Server) -> list[list[float]]:
        reply = server.generate(
            input_ids=tokens(70, seed=3),
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=60,
        )
        # The first of them has nothing before it in the answer.
        return [[p for p, _, _ in reply["meta_info"]["input_token_logprobs"] if p is not None]]

    both = compare(servers, ask)
    assert both.rows == [cut(70, 10)]
    assert both.on[0] == pytest.approx(both.off[0], abs=TOLERANCE, rel=0)
    assert len(both.on[0]) == 9


# -- drafts of a multi-token-prediction assistant --------------------------------------------


@dataclass(frozen=True)
class Drafts:
    """What starts a server with an assistant that drafts three tokens ahead."""

    directory: Path
    checkpoint: Path

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*drafting_with(self.directory / "assistant"), "--decode-log-interval", "1")


@pytest.fixture(scope="module")
def drafts(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    directory = tmp_path_factory.mktemp("drafting")
    write_assistant(directory / "assistant", E2B_TINY)
    return Drafts(directory, tiny_checkpoint)


@pytest.fixture(scope="module")
def drafting_stock(drafts: Drafts) -> Iterator[Server]:
    """The stock server with the assistant, of one rank."""
    directory = drafts.directory / "off"
    with running(drafts.checkpoint, directory, switch="0", arguments=drafts.arguments) as server:
        yield server


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.release)],
    ids=["one rank", "two ranks"],
)
def drafting(
    request: pytest.FixtureRequest, drafts: Drafts, drafting_stock: Server
) -> Iterator[Pair]:
    """Servers with the assistant: the fast one on so many tensor-parallel ranks, and stock.

    The fast one replays what verifies drafts, and the tails of its prefills.
    """
    ranks: int = request.param
    arguments = (*drafts.arguments, "--tp-size", str(ranks), *CAPTURED_ARGUMENTS)
    directory = drafts.directory / f"on-{ranks}"
    captured: Any = {"arguments": arguments, "env": CAPTURED_GRAPHS}
    with running(drafts.checkpoint, directory, switch=None, **captured) as server:
        yield server, drafting_stock


def ranks_of(server: Server) -> int:
    """How many ranks the server reports."""
    ranks: int = server.resolved("tp_size")
    return ranks


def compare_drafts(servers: Pair, ask: Callable[[Server], list[Any]]) -> Compared[Any]:
    """Same tokens and same accepted lengths, from prompts that took the fast path on all ranks."""
    both = compare(servers, ask)
    assert_fast_on_all_ranks(servers[0], both.prefills)
    assert both.on == both.off
    return both


def assert_fast_on_all_ranks(server: Server, prefills: list[Prefill]) -> None:
    """Every rank ran every batch, and cut it alike."""
    assert_all_fast(prefills, captured=CAPTURED_ROWS)
    assert any(prefill.replays for prefill in prefills)
    processes = {prefill.process for prefill in prefills}
    assert len(processes) == ranks_of(server)
    first, *others = (
        [(p.extend_lens, p.prefix_lens, p.rows) for p in prefills if p.process == process]
        for process in processes
    )
    for other in others:
        assert other == first


def test_drafts(drafting: Pair, off_server: Server) -> None:
    """Same tokens and same accepted lengths; the assistant starts from the prompt's last row.

    And the same tokens as of a server that drafts nothing.
    """
    prompts = prompts_of(50, 7, 300)
    both = compare_drafts(drafting, lambda server: drafted(server, prompts))
    # Some drafts are right and some are wrong: both ways lead on from the prefill's K/V.
    histograms = [histogram for _, histogram, _ in both.on]
    assert any(sum(histogram[1:]) for histogram in histograms)
    assert any(histogram[0] for histogram in histograms)
    for prompt, (answer, _, _) in zip(prompts, both.on, strict=True):
        assert outputs(off_server, prompt, max_new_tokens=24) == [answer]
    # Drafts are verified by the stock forward: of every one of them a row is read.
    for server in drafting:
        assert server.verifications()
        assert_all_stock(server.verifications())
    assert [line for line in drafting[0].log_lines("cpu graph: True") if "accept len" in line]
    for line in ("Gemma 4 fast prefill is active", "the tail is captured from layer"):
        assert len(drafting[0].log_lines(line)) == ranks_of(drafting[0])


def test_drafts_of_eight_prompts(drafting: Pair) -> None:
    """At once: each of them goes on from its own prompt's last row."""
    prompts = prompts_of(150, 20, 3, 33, 7, 61, 12, 26)
    both = compare_drafts(drafting, lambda server: drafted(server, prompts))
    assert max(len(prefill.extend_lens) for prefill in both.prefills) > CAPTURED_ROWS[-1]
    assert len({tuple(answer) for answer, *_ in both.on}) == len(prompts)


def test_drafts_overlap_scheduling(drafting: Pair) -> None:
    """Of all drafts SGLang overlaps on a CPU those of an assistant that has no K/V of its own."""
    assert [server.resolved("disable_overlap_schedule") for server in drafting] == [False] * 2


def test_drafts_after_a_cached_prompt(drafting: Pair) -> None:
    """A second turn starts from the first one's K/V, that of accepted drafts included."""
    both = compare_drafts(drafting, drafted_twice)
    assert max(max(prefill.prefix_lens) for prefill in both.prefills) >= 60


def test_drafts_beside_input_logprobs(drafting: Pair) -> None:
    """A draft starts from the last row where the suffix of a prompt is kept too."""
    both = assert_alike(
        drafting,
        lambda server: generate(server, tokens(70, seed=6), logprob_start_len=60),
        rows=[cut(70, 10)] * ranks_of(drafting[0]),
    )
    assert len(both.on[0].input_logprobs) == 9
