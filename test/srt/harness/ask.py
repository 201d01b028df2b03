"""The same requests put to a server with the fast path and to a stock one, and their answers."""

from __future__ import annotations

import base64
import io
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest
from PIL import Image

from layer_rows import assert_all_stock
from server import Server
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


def picture(colour: str, size: int = 96) -> list[dict[str, Any]]:
    """The content of a user message: a square image of one colour, and a question."""
    file = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(file, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]
