"""On equals off, over HTTP: two real servers of one checkpoint get the same requests.

Of each scenario is proven, in this order: the fast path was active on one server, by the rows that
its layers computed, and on the other no row was skipped; the answers are the same, token by token,
and their log-probabilities agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ask import (
    TOLERANCE,
    Answer,
    again_and_again,
    assert_same_answers,
    assert_same_tokens,
    beside_decoding,
    chat,
    compare,
    generate,
    picture,
    tokens,
)
from layer_rows import UNREAD, assert_all_fast, cut, whole
from server import CHUNK, Server
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_yoco import __version__

QUESTION = "How many rows does the last layer of this model have to compute, and who reads them?"


def test_single_prompt(servers: tuple[Server, Server]) -> None:
    """One prompt: the layers behind the cut compute its last row."""
    both = compare(servers, lambda server: generate(server, tokens(50, seed=1)))
    assert both.rows == [cut(50, 1)]
    assert both.prefills[0].mode == "EXTEND"
    assert_same_answers(both)


@pytest.mark.parametrize("length", [1, 2, E2B_TINY.sliding_window, E2B_TINY.sliding_window + 1])
def test_prompt_length(servers: tuple[Server, Server], length: int) -> None:
    """Prompts at the edges: of one token, where nothing can be skipped, and of the window."""
    both = compare(servers, lambda server: generate(server, tokens(length, seed=length)))
    assert both.rows == [cut(length, 1)]
    assert_same_answers(both)


def test_batch_of_different_lengths(servers: tuple[Server, Server]) -> None:
    """One /generate with a list: requests share a forward, each keeps its own last row."""
    # While the first prompt is computed the others arrive, so that they share forwards.
    prompts = [tokens(n, seed=n) for n in (150, 20, 1, 33, 7, 61)]
    both = compare(servers, lambda server: generate(server, prompts))
    assert_all_fast(both.prefills)
    assert any(len(prefill.extend_lens) > 1 for prefill in both.prefills)
    assert_same_answers(both)


def test_cached_prefix(servers: tuple[Server, Server]) -> None:
    """A long prefix that is cached already: the tail's row attends to all of it."""
    prefix = tokens(300, seed=2)
    prompts = [prefix, prefix + tokens(40, seed=3)]
    both = compare(servers, lambda server: [generate(server, prompt)[0] for prompt in prompts])
    assert_all_fast(both.prefills)
    last = both.prefills[-1]
    assert (last.prefix_lens, last.rows) == ([300], cut(40, 1))
    assert_same_answers(both)
    assert [answer.cached_tokens for answer in both.on] == [0, 300]


def test_one_prompt_again_and_again(servers: tuple[Server, Server]) -> None:
    both = compare(servers, again_and_again)
    assert both.rows == [
        cut(CHUNK, UNREAD),
        cut(200 - CHUNK, 1),
        cut(20, 1),
        *[[1] * 8, cut(20, 1)] * 3,
    ]
    assert_same_answers(both)


def test_next_turn(servers: tuple[Server, Server]) -> None:
    """A prompt that goes on from an earlier prompt and its answer, both cached."""

    def ask(server: Server) -> list[Answer]:
        prompt = tokens(60, seed=5)
        [first] = generate(server, prompt)
        return [first, *generate(server, [*prompt, *first.tokens, *tokens(30, seed=6)])]

    both = compare(servers, ask)
    assert_all_fast(both.prefills)
    assert len(both.rows) == 2
    assert_same_answers(both)
    assert both.on[1].cached_tokens > 60


def test_chunked_prompt(servers: tuple[Server, Server]) -> None:
    """A prompt of 8 chunks: nobody reads a row of the first 7, the last one's last row is read."""
    both = compare(servers, lambda server: generate(server, tokens(1000, seed=7)))
    assert both.rows == [cut(CHUNK, UNREAD)] * 7 + [cut(1000 - 7 * CHUNK, 1)]
    assert_same_answers(both)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat(servers: tuple[Server, Server], stream: bool) -> None:
    """/v1/chat/completions, in one piece and streamed."""
    both = compare(servers, lambda server: [chat(server, QUESTION, stream=stream)])
    assert_all_fast(both.prefills)
    assert_same_answers(both)


def test_image(servers: tuple[Server, Server]) -> None:
    """Images take the fast path too, and the answer depends on them."""
    both = compare(servers, lambda server: [chat(server, picture(c)) for c in ("red", "blue")])
    assert_all_fast(both.prefills)
    assert_same_answers(both)
    red, blue = both.on
    assert red.logprobs != pytest.approx(blue.logprobs, abs=TOLERANCE, rel=0)


def test_input_logprobs_of_all_tokens(servers: tuple[Server, Server]) -> None:
    """A request that reads every row gets every row."""
    both = compare(
        servers, lambda server: generate(server, tokens(70, seed=8), logprob_start_len=0)
    )
    assert both.rows == [whole(70)]
    assert_same_answers(both)
    assert len(both.on[0].input_logprobs) == 69


def test_input_logprobs_of_last_tokens(servers: tuple[Server, Server]) -> None:
    """A request that reads the rows from some token on keeps these rows."""
    both = compare(
        servers, lambda server: generate(server, tokens(70, seed=9), logprob_start_len=60)
    )
    assert both.rows == [cut(70, 10)]
    assert_same_answers(both)
    assert len(both.on[0].input_logprobs) == 9


def test_input_logprobs_of_one_in_batch(servers: tuple[Server, Server]) -> None:
    """Of requests that share a forward, each keeps the rows that it reads and no more."""
    prompts = [tokens(n, seed=n) for n in (151, 40, 30)]
    both = compare(
        servers, lambda server: generate(server, prompts, logprob_start_len=[-1, 15, -1])
    )
    shared = [prefill for prefill in both.prefills if 40 in prefill.extend_lens]
    assert [prefill.rows for prefill in shared] == [
        cut(sum(prefill.extend_lens), 25 + len(prefill.extend_lens) - 1) for prefill in shared
    ]
    assert len(shared[0].extend_lens) > 1
    assert_same_answers(both)
    assert [len(answer.input_logprobs) for answer in both.on] == [0, 24, 0]


def test_concurrent_requests(servers: tuple[Server, Server]) -> None:
    """Eight clients at once, with prompts of every kind: no request gets another one's rows."""
    requests: list[Callable[[Server], Answer]] = [
        *(
            lambda server, n=n: generate(server, tokens(n, seed=n))[0]
            for n in (3, 45, 128, 129, 300)
        ),
        lambda server: chat(server, QUESTION),
        lambda server: chat(server, QUESTION[::-1], stream=True),
        lambda server: chat(server, picture("green")),
    ]

    def ask(server: Server) -> list[Answer]:
        with ThreadPoolExecutor(len(requests)) as clients:
            return list(clients.map(lambda request: request(server), requests))

    both = compare(servers, ask)
    assert_all_fast(both.prefills)
    assert_same_answers(both, close_calls=1)


def test_prompt_beside_decoding(servers: tuple[Server, Server]) -> None:
    """Chunks of a prompt share forwards with a request that decodes: both keep their last row."""
    prompts = [tokens(40, seed=12), tokens(1000, seed=13)]
    both = compare(servers, lambda server: beside_decoding(server, *prompts))
    assert_all_fast(both.prefills)
    mixed = [prefill for prefill in both.prefills if prefill.extend_lens == [CHUNK - 1, 1]]
    assert mixed
    assert all(prefill.rows == cut(CHUNK, 2) for prefill in mixed)
    assert_same_tokens(both, prompts, servers[1], close_calls=1)


def test_scheduling_overlaps(servers: tuple[Server, Server]) -> None:
    """What is shown on these servers is shown while SGLang overlaps scheduling and compute.

    SGLang switches that off by itself elsewhere, so its own word is asked for.
    """
    assert [server.resolved("disable_overlap_schedule") for server in servers] == [False, False]


def test_log_of_active_server(servers: tuple[Server, Server]) -> None:
    """The log says once that the fast path is active, in which model, and where the cut is."""
    on, _ = servers
    before = len(on.log_since_ready())  # of other tests, which make servers fail on purpose
    generate(on, tokens(50, seed=10))
    assert "Traceback" not in on.log_since_ready()[before:]
    [start] = on.log_lines(f"Gemma 4 fast prefill {__version__} is on: ")
    [line] = on.log_lines("Gemma 4 fast prefill is active")
    assert "Gemma4TextModel" in line
    for said in (start, line):
        assert re.search(r"(inside layer 3|before layer 4)\b.*\bof 8\b", said), said
    assert on.log().index(start) < on.log().index(line)


def test_log_of_switched_off_server(servers: tuple[Server, Server]) -> None:
    """One line, said where no process has set up its logging yet, and by one of them."""
    _, off = servers
    before = len(off.log_since_ready())
    generate(off, tokens(50, seed=10))
    assert "Traceback" not in off.log_since_ready()[before:]
    assert off.log_lines("fast prefill is active") == []
    assert off.log_lines("is on: ") == []
    [line] = off.log_lines("Gemma 4 fast prefill")
    assert line.endswith(f"Gemma 4 fast prefill {__version__} is off: SGLANG_GEMMA4_YOCO=0")
