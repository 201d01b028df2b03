"""Prefill-decode disaggregation: two servers with the fast path on, compared with a stock server.

K and V go from one to the other over TCP, by SGLang's own transfer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from harness.ask import (
    GREEDY,
    Answer,
    Either,
    assert_alike,
    at_once,
    generate,
    one_by_one,
    picture,
    prompts_of,
    tokens,
)
from harness.disaggregated import Disaggregated, disaggregated
from harness.layer_rows import CHUNK_KEPT, assert_all_fast, cut, whole
from harness.server import CHUNK, Server
from sglang_gemma4_reference import roles
from sglang_gemma4_reference.checkpoint import E2B_TINY

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def both_roles(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Disaggregated]:
    """Yield a prefill server and a decode server."""
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    with disaggregated(tiny_checkpoint, tmp_path_factory.mktemp("roles")) as servers:
        yield servers


@pytest.fixture
def both(both_roles: Disaggregated, off_server: Server) -> Iterator[tuple[Either, Either]]:
    """Yield the two roles, and the stock server; only one of the roles ever prefills."""
    decode = both_roles.decode
    mark = decode.mark()
    yield both_roles, off_server
    assert decode.prefills(since=mark) == []


def test_prompts_of_all_lengths(both: tuple[Either, Either]) -> None:
    """Prompts at the window's edge, and over several chunks: unfinished ones skip the tail."""
    window = E2B_TINY.sliding_window
    lengths = (1, 2, 50, window, window + 1, 2 * CHUNK, 5 * CHUNK + 44)
    compared = assert_alike(both, one_by_one(*prompts_of(*lengths)))
    assert compared.rows[-6:] == [cut(CHUNK, CHUNK_KEPT)] * 5 + [cut(44, 1)]


def test_cached_prefix(both: tuple[Either, Either]) -> None:
    """The prefill server has the prefix, the decode server is sent all of it again."""
    prefix = tokens(150, seed=2)
    compared = assert_alike(both, one_by_one(prefix, prefix + tokens(40, seed=3)))
    assert compared.prefills[-1].prefix_lens == [150]
    assert compared.on[1].cached_tokens == 150


def test_input_logprobs(both: tuple[Either, Either]) -> None:
    """Their rows are kept, in a prompt's last chunk and in the one before."""
    prompts = ((tokens(70, seed=9), 60), (tokens(2 * CHUNK + 44, seed=10), 2 * CHUNK - 10))
    compared = assert_alike(
        both,
        lambda s: [generate(s, prompt, logprob_start_len=n)[0] for prompt, n in prompts],
        rows=[cut(70, 10), cut(CHUNK, CHUNK_KEPT), cut(CHUNK, 10), whole(44)],
    )
    assert [len(answer.input_logprobs) for answer in compared.on] == [9, 10 + 44 - 1]


def test_image(both: tuple[Either, Either]) -> None:
    [image, _] = picture("red")
    body = {"text": "<|image|>What is this?", "image_data": image["image_url"]["url"]}
    compared = assert_alike(both, lambda s: generate(s, None, **body))
    assert [prefill.multimodal for prefill in compared.prefills] == [True]


def test_several_at_a_time(both: tuple[Either, Either]) -> None:
    """They share forwards, on the prefill server and on the decode server."""
    prompts = prompts_of(150, 20, 7, 3, 45, 128, 129, 300, 17)

    def ask(server: Either) -> list[Answer]:
        return at_once(lambda prompt: generate(server, prompt)[0], prompts)

    compared = assert_alike(both, ask, close_calls=1)
    assert any(len(prefill.extend_lens) > 1 for prefill in compared.prefills)


def test_roles_are_switched(both_roles: Disaggregated, off_server: Server) -> None:
    """A server that was started to decode prefills on the fast path, and its peer decodes."""
    prompts = prompts_of(2 * CHUNK + 9, 60, seed=2)
    both_roles.forget_prefixes()
    switched = both_roles.switch_roles()
    compared = assert_alike((switched, off_server), one_by_one(*prompts))
    assert compared.rows[-1] == cut(60, 1)
    assert_alike((switched.switch_roles(), off_server), one_by_one(prompts[0]))


def first_tokens(server: Server, prompts: list[list[int]], **peer: Any) -> list[list[int]]:
    """Return the first token of each answer, which a prefill server gives without a peer."""
    body = {"sampling_params": GREEDY | {"max_new_tokens": 1}, **peer}
    return [server.generate(input_ids=prompt, **body)["output_ids"] for prompt in prompts]


def test_a_decode_server_that_vanishes(both_roles: Disaggregated, off_server: Server) -> None:
    """Its requests end; the prefill server frees their memory, and continues to serve.

    The last test of this file: there is no decode server after it.
    """
    prefill, decode = both_roles.prefill, both_roles.decode
    body = {"input_ids": tokens(30 * CHUNK, seed=5), "sampling_params": GREEDY}
    mark = prefill.mark()
    with ThreadPoolExecutor(2) as clients:
        prefilled, decoded = both_roles.send_to_both(clients, body)
        prefill.wait_for_prefills(1, since=mark)
        os.killpg(decode.process.pid, signal.SIGKILL)  # at once, while chunks are on their way
        assert isinstance(decoded.exception(timeout=120), requests.ConnectionError)
        assert not prefilled.result(timeout=120).ok
    prompts = prompts_of(50, 2 * CHUNK + 9, seed=3)
    prefill.forget_prefixes()
    mark = prefill.mark()
    nobody = {"bootstrap_host": roles.NO_PEER, "bootstrap_room": 10_000}
    alone = first_tokens(prefill, prompts, **nobody)
    assert_all_fast(prefill.prefills(since=mark))
    assert alone == first_tokens(off_server, prompts)
