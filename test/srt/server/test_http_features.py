"""Features of the HTTP API, each on the fast server and on the stock one.

As in ``test_server``: first the rows per layer prove that the fast path was active, then the
answers are compared.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy
import pytest
import soundfile
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from harness.ask import (
    GREEDY,
    TOLERANCE,
    Answer,
    assert_alike,
    assert_same_answers,
    at_once,
    chat,
    compare,
    generate,
    one_by_one,
    outputs,
    over_a_chunk_boundary,
    picture,
    tokens,
)
from harness.layer_rows import CHUNK_KEPT, cut
from harness.server import CHUNK, Pair, Server
from sglang_gemma4_reference.tail_failures import slow_prefills


def test_regex(servers: Pair) -> None:
    """The grammar's mask constrains the right row's logits."""
    body = {
        "input_ids": tokens(64, seed=23),
        "sampling_params": GREEDY | {"regex": "(yes|no), [0-9]{4}"},
    }
    both = assert_alike(servers, lambda server: [server.generate(**body)["text"]])
    assert re.match("(yes|no), [0-9]{4}", both.on[0])


CHUNKS = tokens(2 * CHUNK + 44, seed=35)
TOKEN = 77


@pytest.fixture(params=["on_server", pytest.param("exits_server", marks=pytest.mark.release)])
def chunking(request: pytest.FixtureRequest, off_server: Server) -> Pair:
    """Return a fast server, or one that leaves its captured prefills, and the stock one."""
    return request.getfixturevalue(request.param), off_server


class ChunkReader(CustomLogitProcessor):
    """Answers with the token that was the likeliest one when the request was first seen.

    With a ``token`` among the request's parameters, that one is sampled from its unfinished chunks,
    and nothing else is changed.
    """

    __module__ = "__main__"  # so it is sent by value: the server cannot import this file

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        """Return the logits [requests, vocabulary] with all other tokens ruled out."""
        for own, parameters in zip(logits, custom_param_list, strict=True):
            request = parameters["__req__"]
            if "token" not in parameters:
                token = vars(request).setdefault("first_seen", int(own.argmax()))
            elif request.extend_end < len(request.origin_input_ids):
                token = parameters["token"]
            else:
                continue
            own.fill_(-float("inf"))
            own[token] = 0
        return logits


def test_custom_logit_processor(chunking: Pair) -> None:
    """SGLang calls it on the logits of each chunk, so each chunk keeps its last row."""
    how = {"processor": ChunkReader.to_str(), "custom_params": {}}
    both = compare(chunking, lambda server: outputs(server, CHUNKS, **how))
    assert both.on == both.off
    assert [rows[-1] for rows in both.rows] == [1, 1, 1]


#: By what sees the logits of unfinished chunks or the tokens sampled from them, requests for which
#: it must discard them.
DISCARDING: dict[str, dict[str, Any]] = {
    "stop tokens": {"stop_token_ids": [TOKEN], "ignore_eos": False},
    "penalties": {"min_new_tokens": 3, "frequency_penalty": 2, "presence_penalty": 2},
    "a grammar": {"regex": "(yes|no), [0-9]{4}"},
    "logit bias": {"logit_bias": {str(TOKEN): 5}},
}


@pytest.mark.parametrize("name", DISCARDING)
def test_who_discards_what_is_sampled_from_chunks(chunking: Pair, name: str) -> None:
    """Chunks that skip the tail, or whose sampled token is another one, make no difference.

    Some share a forward with another request.
    """
    other = {"processor": ChunkReader.to_str(), "custom_params": {"token": TOKEN}}
    for prompts in ([tokens(30, seed=36), CHUNKS], CHUNKS):
        ask: Any = partial(outputs, prompt=prompts, **DISCARDING[name])
        both = compare(chunking, ask)
        chunking[1].forget_prefixes()
        assert both.on == both.off == ask(chunking[1], **other)
    assert both.rows[0][-1] == CHUNK_KEPT


@pytest.mark.parametrize(("start", "kept"), [(CHUNK - 1, 1), (CHUNK + 40, CHUNK_KEPT)])
def test_logprobs_of_chunks(chunking: Pair, start: int, kept: int) -> None:
    """A chunk's last row has the input logprob of the next chunk's first token."""
    both = compare(chunking, one_by_one(CHUNKS, logprob_start_len=start))
    assert_same_answers(both)
    assert both.rows[0][-1] == kept


@contextmanager
def given_up(server: Server, body: dict[str, Any], how: str) -> Iterator[None]:
    """Send a request before the block, and abort it after the block."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=300)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/generate", json.dumps(body), headers)
    try:
        yield
        if how == "abort":
            server.post("/abort_request", {"rid": body["rid"]})
            assert b"abort" in connection.getresponse().read()
    finally:
        connection.close()


PAUSE = 0.3
"""Seconds that a prefill forward takes at least while a request is given up: most of the 60 chunks
of a long prompt are still to come when the server has noticed, however busy the machine."""
LONG = 60 * CHUNK


@pytest.mark.parametrize("how", ["abort", "disconnect"])
def test_abort_of_a_running_prefill(servers: Pair, how: str) -> None:
    """A request that is aborted between two chunks leaves the others' answers as they are."""
    body = {
        "input_ids": tokens(LONG, seed=24),
        "sampling_params": GREEDY,
        "rid": how,
        "stream": how == "disconnect",  # SGLang notices at once only when a stream is left
    }

    def ask(server: Server) -> list[Answer]:
        mark = server.mark()
        with slow_prefills(server.failures, PAUSE):
            with given_up(server, body, how):
                server.wait_for_prefills(2, since=mark)
            server.wait_until(lambda: not any(server.load().values()), "nothing runs or waits")
        return generate(server, tokens(100, seed=25))

    both = assert_alike(servers, ask)
    computed = sum(sum(prefill.extend_lens) for prefill in both.prefills)
    assert computed < LONG, "the request ran to its end before it was given up"


def test_session(servers: Pair) -> None:
    """Each of the session's three turns is appended by the server to the ones before."""

    def ask(server: Server) -> list[list[int]]:
        session = server.post("/open_session", {"capacity_of_str_len": 10000}).json()
        answers, rid = [], None
        for turn in range(3):
            reply = server.generate(
                input_ids=tokens(40 + turn, seed=29 + turn),
                sampling_params=GREEDY,
                session_params={"id": session, "rid": rid, "offset": -1, "replace": False},
            )
            rid = reply["meta_info"]["id"]
            answers.append(reply["output_ids"])
        server.post("/close_session", {"session_id": session})
        return answers

    both = assert_alike(servers, ask)
    assert both.prefills[-1].prefix_lens[0] > 80, "the turns before are not in the cache"


def test_profile(servers: Pair, tmp_path: Path) -> None:
    """SGLang's profiler, started and stopped while the server serves, writes its trace."""

    def ask(server: Server) -> list[Answer]:
        if server is servers[0]:
            how = {"activities": ["CPU"], "with_stack": False, "record_shapes": False}
            server.post("/start_profile", {"output_dir": str(tmp_path), **how})
        answers = generate(server, tokens(70, seed=33), new_tokens=2)
        if server is servers[0]:
            server.post("/stop_profile", {})
            server.wait_until(lambda: [*tmp_path.glob("*.trace.json.gz")], "a profile")
        return answers + generate(server, tokens(71, seed=34))

    assert_alike(servers, ask, rows=[cut(70, 1), cut(71, 1)])


def test_image_over_a_chunk_boundary(servers: Pair) -> None:
    """The first chunk computes a part of the image."""
    both = assert_alike(servers, lambda server: [chat(server, over_a_chunk_boundary())])
    assert sum(both.prefills[0].extend_lens) == CHUNK
    assert len(both.prefills) == 2


def sound(frequency: float, seconds: float = 0.5) -> list[dict[str, Any]]:
    """Return the content of a user message: a tone, and a question."""
    rate = 16000
    wave = numpy.sin(2 * numpy.pi * frequency * numpy.arange(int(rate * seconds)) / rate)
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format="WAV")
    url = "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()
    return [
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]


def test_audio(servers: Pair) -> None:
    """Audio takes the fast path too, and the answer depends on it."""
    both = assert_alike(servers, lambda server: [chat(server, sound(f)) for f in (220.0, 1760.0)])
    low, high = both.on
    assert low.logprobs != pytest.approx(high.logprobs, abs=TOLERANCE, rel=0)


def test_media_of_several_kinds(servers: Pair) -> None:
    """Audio of several lengths, twice in one message, is sent along with pictures."""
    tone, later = sound(220.0), sound(440.0, 1.3)
    picture_, question = picture("purple")
    contents = [tone, later, [*sound(330.0, 0.2), *later], [picture_, *tone]]
    contents.append([*picture("red"), picture_, question])
    both = assert_alike(
        servers,
        lambda server: at_once(lambda content: chat(server, content), contents),
        close_calls=1,
    )
    assert len({tuple(answer.logprobs) for answer in both.on}) == len(contents)
