"""On equals off, over HTTP: two real servers of one checkpoint get the same requests.

Of each scenario is proven, in this order: the fast path was active on one server, by the rows that
its layers computed, and on the other no row was skipped; the answers are the same, token by token,
and their log-probabilities agree.
"""

from __future__ import annotations

import base64
import io
import math
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from PIL import Image

from layer_rows import assert_all_fast, assert_all_stock, cut, whole
from server import CHUNK, SWITCH, Server, running
from sglang_gemma4_reference.checkpoint import E2B_TINY, build_tokenizer
from sglang_gemma4_reference.row_trace import Prefill

TOLERANCE = 1e-4  # of fp32 log-probabilities
NEW_TOKENS = 12
FIRST_TEXT_TOKEN = 20  # the tokens before it are special ones

# A stream loses the log-probability of a token that ends inside a character.
NOT_ASCII = [
    token
    for text, token in build_tokenizer(E2B_TINY.vocab_size).get_vocab().items()
    if not text.removeprefix("Ġ").isascii()
]

QUESTION = "How many rows does the last layer of this model have to compute, and who reads them?"


@dataclass(frozen=True)
class Answer:
    """What one request got back.

    Attributes:
        tokens: the generated ones, by id or, in the chat API, by text.
        logprobs: of ``tokens``.
        input_logprobs: of the prompt's tokens, where the request asked for them.
        cached_tokens: how many of the prompt's tokens were in the prefix cache.
    """

    tokens: tuple[int | str, ...]
    logprobs: tuple[float, ...]
    input_logprobs: tuple[float, ...] = ()
    cached_tokens: int = 0


A = TypeVar("A")


@dataclass(frozen=True)
class Compared(Generic[A]):
    """The same requests on both servers: their answers, and the fast one's prefill forwards."""

    on: list[A]
    off: list[A]
    prefills: list[Prefill]

    @property
    def rows(self) -> list[list[int]]:
        """Rows that each layer of the fast server computed, forward by forward."""
        return [prefill.rows for prefill in self.prefills]


def compare(servers: tuple[Server, Server], ask: Callable[[Server], list[A]]) -> Compared[A]:
    """Put the same requests to both servers, their prefix caches empty at first."""
    answers, prefills = [], []
    for server in servers:
        server.forget_prefixes()
        mark = server.mark()
        answers.append(ask(server))
        prefills.append(server.prefills(since=mark))
    assert_all_stock(prefills[1])
    assert prefills[1], "the row trace of the stock server is empty"
    return Compared(on=answers[0], off=answers[1], prefills=prefills[0])


def assert_same_answers(both: Compared[Answer]) -> None:
    """Same tokens, and log-probabilities within the tolerance."""
    assert len(both.on) == len(both.off) > 0
    for on, off in zip(both.on, both.off, strict=True):
        assert on.tokens == off.tokens
        assert len(on.tokens) == len(on.logprobs) == NEW_TOKENS
        assert on.logprobs == pytest.approx(off.logprobs, abs=TOLERANCE, rel=0)
        assert on.input_logprobs == pytest.approx(off.input_logprobs, abs=TOLERANCE, rel=0)
        assert all(map(math.isfinite, on.logprobs + on.input_logprobs))
        assert on.cached_tokens == off.cached_tokens


def tokens(count: int, seed: int) -> list[int]:
    """A prompt of random text tokens, always the same for a seed."""
    draw = random.Random(seed)
    return [draw.randrange(FIRST_TEXT_TOKEN, E2B_TINY.vocab_size) for _ in range(count)]


def generate(server: Server, input_ids: Any, **body: Any) -> list[Answer]:
    """Greedy answers of /generate to one prompt (a list of ids) or to a batch of them."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    replies = server.generate(
        input_ids=input_ids, sampling_params=sampling, return_logprob=True, **body
    )
    return [_answer(reply) for reply in (replies if isinstance(replies, list) else [replies])]


def _answer(reply: dict[str, Any]) -> Answer:
    meta = reply["meta_info"]
    output = meta["output_token_logprobs"]
    return Answer(
        tokens=tuple(token for _, token, _ in output),
        logprobs=tuple(logprob for logprob, _, _ in output),
        # Nothing precedes the first token of a prompt, so it has none.
        input_logprobs=tuple(
            logprob for logprob, _, _ in meta.get("input_token_logprobs", ()) if logprob is not None
        ),
        cached_tokens=meta["cached_tokens"],
    )


def chat(server: Server, content: Any, *, stream: bool = False) -> Answer:
    """The greedy answer of /v1/chat/completions to one user message."""
    reply = server.chat(
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logit_bias=dict.fromkeys(map(str, NOT_ASCII), -100),
        logprobs=True,
        stream=stream,
    )
    entries = [
        entry
        for part in (reply if stream else [reply])
        for choice in part["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    return Answer(
        tokens=tuple(entry["token"] for entry in entries),
        logprobs=tuple(entry["logprob"] for entry in entries),
    )


def picture(colour: str) -> list[dict[str, Any]]:
    """The content of a user message: an image of one colour, and a question."""
    file = io.BytesIO()
    Image.new("RGB", (96, 96), colour).save(file, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]


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
    assert both.rows == [cut(CHUNK, 0)] * 7 + [cut(1000 - 7 * CHUNK, 1)]
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
    assert_same_answers(both)


def test_prompt_beside_decoding(servers: tuple[Server, Server]) -> None:
    """Chunks of a prompt share forwards with a request that decodes: both keep their last row."""

    # SGLang mixes no request that wants log-probabilities.
    def answer(server: Server, prompt: list[int], count: int) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        reply = server.generate(input_ids=prompt, sampling_params=sampling)
        output: list[int] = reply["output_ids"]
        return output

    def ask(server: Server) -> list[list[int]]:
        mark = server.mark()
        with ThreadPoolExecutor(1) as client:
            decoding = client.submit(answer, server, tokens(40, seed=12), 150)
            while server.mark() == mark and not decoding.done():
                time.sleep(0.01)
            long = answer(server, tokens(1000, seed=13), 8)
            return [decoding.result(), long]

    both = compare(servers, ask)
    assert_all_fast(both.prefills)
    mixed = [prefill for prefill in both.prefills if prefill.extend_lens == [CHUNK - 1, 1]]
    assert mixed
    assert all(prefill.rows == cut(CHUNK, 2) for prefill in mixed)
    assert both.on == both.off


def test_log_of_active_server(servers: tuple[Server, Server]) -> None:
    """The log says once that the fast path is active, in which model, and where the cut is."""
    on, _ = servers
    generate(on, tokens(50, seed=10))
    [line] = on.log_lines("Gemma 4 fast prefill is active")
    assert "Gemma4TextModel" in line
    assert re.search(r"(inside layer 3|before layer 4)\b.*\bof 8\b", line), line
    assert "Traceback" not in on.log()


def test_log_of_switched_off_server(servers: tuple[Server, Server]) -> None:
    """The log of a server with the switch at 0 claims no fast path."""
    _, off = servers
    generate(off, tokens(50, seed=10))
    assert off.log_lines("fast prefill is active") == []
    assert "Traceback" not in off.log()


def test_misspelt_switch(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A switch that is neither 0 nor 1 is an error that says what to write; the server serves."""
    with running(tiny_checkpoint, tmp_path, switch="yes") as server:
        [answer] = generate(server, tokens(50, seed=11))
    assert len(answer.tokens) == NEW_TOKENS
    assert server.prefills()
    assert_all_stock(server.prefills())
    # One line from each process that loads plugins, the same but for the time in front of it.
    [line] = {line[line.index("Gemma 4") :] for line in server.log_lines(SWITCH)}
    assert "NOT installed" in line
    assert f"{SWITCH}='yes'" in line
    assert re.search(r"\buse 1\b.*\b0\b", line), line
