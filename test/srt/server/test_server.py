"""Equality of on and off over HTTP: two real servers of one checkpoint get the same requests.

For each scenario ``ask.assert_alike`` asserts, in this order: the fast path was active on one
server, by the rows that its layers computed, and on the other no row was skipped; the answers are
the same, token by token, and their log-probabilities agree. Many requests at once are sent by
``test_workload``.
"""

from __future__ import annotations

import re

import pytest

from harness.ask import (
    TOLERANCE,
    assert_alike,
    assert_same_answers,
    assert_same_tokens,
    beside_decoding,
    chat,
    compare,
    generate,
    next_turn,
    one_by_one,
    picture,
    prompts_of,
    tokens,
)
from harness.layer_rows import CHUNK_KEPT, assert_all_fast, cut, whole
from harness.server import CHUNK, Pair
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_yoco import __version__

QUESTION = "How many rows does the last layer of this model have to compute, and who reads them?"


@pytest.mark.parametrize("length", [1, 2, E2B_TINY.sliding_window, E2B_TINY.sliding_window + 1, 50])
def test_single_prompt(servers: Pair, length: int) -> None:
    """The layers after the cut compute its last row; of one token nothing can be skipped."""
    both = assert_alike(servers, one_by_one(tokens(length, seed=length)), rows=[cut(length, 1)])
    assert both.prefills[0].mode == "EXTEND"


def test_cached_prefix(servers: Pair) -> None:
    """The tail's row attends to all of a long prefix that is cached already."""
    prefix = tokens(300, seed=2)
    both = assert_alike(servers, one_by_one(prefix, prefix + tokens(40, seed=3)))
    last = both.prefills[-1]
    assert (last.prefix_lens, last.rows) == ([300], cut(40, 1))
    assert [answer.cached_tokens for answer in both.on] == [0, 300]


def test_next_turn(servers: Pair) -> None:
    """A prompt continues an earlier prompt and its answer, both cached."""
    prompt, more = tokens(60, seed=5), tokens(30, seed=6)
    both = assert_alike(servers, lambda server: next_turn(server, prompt, more))
    assert len(both.rows) == 2
    assert both.on[1].cached_tokens > 60


@pytest.mark.parametrize(("chunks", "last"), [(7, 104), (1, CHUNK)])
def test_chunked_prompt(servers: Pair, chunks: int, last: int) -> None:
    """No row of the first chunks is read, and only the last row of the last one, even if full."""
    rows = [cut(CHUNK, CHUNK_KEPT)] * chunks + [cut(last, 1)]
    assert_alike(servers, one_by_one(tokens(chunks * CHUNK + last, seed=7)), rows=rows)


def test_prefix_that_a_chunk_without_a_tail_has_written(servers: Pair) -> None:
    """The chunk's K and V are read by another prompt, and in its second turn."""
    chunk, more = tokens(CHUNK, seed=8), tokens(30, seed=9)
    first, other = chunk + tokens(40, seed=10), chunk + tokens(50, seed=11)
    both = assert_alike(
        servers, lambda server: generate(server, first) + next_turn(server, other, more)
    )
    assert both.rows[:3] == [cut(CHUNK, CHUNK_KEPT), cut(40, 1), cut(50, 1)]
    prefixes = [prefill.prefix_lens[0] for prefill in both.prefills]
    assert prefixes[:3] == [0, CHUNK, CHUNK]
    assert prefixes[3] > CHUNK + 50


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat(servers: Pair, stream: bool) -> None:
    """/v1/chat/completions, in one piece and streamed."""
    assert_alike(servers, lambda server: [chat(server, QUESTION, stream=stream)])


def test_image(servers: Pair) -> None:
    """Images take the fast path too, and the answer depends on them."""
    both = assert_alike(
        servers, lambda server: [chat(server, picture(colour)) for colour in ("red", "blue")]
    )
    red, blue = both.on
    assert red.logprobs != pytest.approx(blue.logprobs, abs=TOLERANCE, rel=0)


@pytest.mark.parametrize(("start", "rows"), [(0, whole(70)), (60, cut(70, 10))])
def test_input_logprobs_from_a_token_on(servers: Pair, start: int, rows: list[int]) -> None:
    """A request that reads the rows from some token on keeps these rows."""
    ask = one_by_one(tokens(70, seed=8), logprob_start_len=start)
    both = assert_alike(servers, ask, rows=[rows])
    assert len(both.on[0].input_logprobs) == 70 - start - 1


def test_input_logprobs_of_one_in_batch(servers: Pair) -> None:
    """Of requests that share a forward, each keeps the rows that it reads and no more."""
    prompts = prompts_of(151, 40, 30)
    both = compare(
        servers, lambda server: generate(server, prompts, logprob_start_len=[-1, 15, -1])
    )
    [shared] = [prefill for prefill in both.prefills if 40 in prefill.extend_lens]
    assert len(shared.extend_lens) > 1
    assert shared.rows == cut(sum(shared.extend_lens), 25 + len(shared.extend_lens) - 1)
    assert_same_answers(both)
    assert [len(answer.input_logprobs) for answer in both.on] == [0, 24, 0]


def test_prompt_beside_decoding(servers: Pair) -> None:
    """Chunks of a prompt share forwards with a request that decodes: both keep their last row."""
    prompts = [tokens(40, seed=12), tokens(1000, seed=13)]
    both = compare(servers, lambda server: beside_decoding(server, *prompts))
    assert_all_fast(both.prefills)
    assert any(prefill.extend_lens == [CHUNK - 1, 1] for prefill in both.prefills)
    assert_same_tokens(both, prompts, servers[1])


def test_scheduling_overlaps(servers: Pair) -> None:
    """Tests on these servers hold while SGLang overlaps scheduling and compute.

    It switches that off by itself elsewhere.
    """
    for server in servers:
        assert server.resolved("disable_overlap_schedule") is False


def test_log_of_active_server(servers: Pair) -> None:
    """The log says once that the fast path is active, in which model, and where the cut is."""
    on, _ = servers
    before = len(on.log_since_ready())  # of other tests, which make servers fail on purpose
    generate(on, tokens(50, seed=10))
    assert "Traceback" not in on.log_since_ready()[before:]
    [start] = on.log_lines(f"YOCO fast prefill {__version__} is on: ")
    [line] = on.log_lines("YOCO fast prefill is active")
    assert "Gemma4TextModel" in line
    for said in (start, line):
        assert re.search(r"(inside layer 3|before layer 4)\b.*\bof 8\b", said), said
    assert on.log().index(start) < on.log().index(line)


def test_log_of_switched_off_server(servers: Pair) -> None:
    """One process logs one line, when no process has configured its logging yet."""
    _, off = servers
    before = len(off.log_since_ready())
    generate(off, tokens(50, seed=10))
    assert "Traceback" not in off.log_since_ready()[before:]
    assert off.log_lines("fast prefill is active") == []
    assert off.log_lines("is on: ") == []
    [line] = off.log_lines("YOCO fast prefill")
    assert line.endswith(f"YOCO fast prefill {__version__} is off: SGLANG_GEMMA4_YOCO=0")
