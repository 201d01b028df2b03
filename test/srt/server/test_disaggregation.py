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
from harness.server import (
    CAPTURED_ARGUMENTS,
    CAPTURED_GRAPHS,
    CAPTURED_ROWS,
    CHUNK,
    EXIT_ARGUMENTS,
    EXIT_BUCKETS,
    EXIT_GRAPHS,
    Server,
)
from sglang_gemma4_reference import roles
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_yoco.captured import lifecycle

pytestmark = pytest.mark.release

CAPTURED = f"captured for up to {CAPTURED_ROWS[-1]} rows"
EXITS = {"captured": CAPTURED_ROWS, "buckets": EXIT_BUCKETS}
LONG_AND_SHORT = (150, 20, 7, 3, 45, 128, 129, 300, 17)


@pytest.fixture(scope="module", params=[{}, EXITS], ids=["by default", "exits"])
def graphs(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the rows for which the first prefill server captures tails and prefills."""
    return dict(request.param)


@pytest.fixture(scope="module")
def both_roles(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, graphs: dict[str, Any]
) -> Iterator[Disaggregated]:
    """Yield a prefill server and a decode server."""
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    directory, arguments = tmp_path_factory.mktemp("roles"), CAPTURED_ARGUMENTS
    if graphs:
        arguments = (*EXIT_ARGUMENTS, "--cuda-graph-backend-decode", "full")
    with disaggregated(
        tiny_checkpoint, directory, arguments, EXIT_GRAPHS if graphs else CAPTURED_GRAPHS
    ) as servers:
        yield servers


def tail(server: Server) -> str:
    """Return what the server says of its tail."""
    return str(server.reports()[0]["tail"])


@pytest.fixture
def both(both_roles: Disaggregated, off_server: Server) -> Iterator[tuple[Either, Either]]:
    """Yield the two roles, and the stock server; only one of the roles ever prefills."""
    decode = both_roles.decode
    mark = decode.mark()
    yield both_roles, off_server
    assert decode.prefills(since=mark) == []


def test_what_is_captured(both_roles: Disaggregated, graphs: dict[str, Any]) -> None:
    """SGLang captures no decode steps for a server that is to prefill, unless it is told to."""
    wanted = CAPTURED if graphs else f"eager ({lifecycle.NO_GRAPHS_BY_ROLE})"
    assert (tail(both_roles.prefill), tail(both_roles.decode)) == (wanted, CAPTURED)


def test_prompts_of_all_lengths(both: tuple[Either, Either], graphs: dict[str, Any]) -> None:
    """Prompts at the window's edge, and over several chunks: unfinished ones skip the tail."""
    window = E2B_TINY.sliding_window
    lengths = (1, 2, 50, window, window + 1, 2 * CHUNK, 5 * CHUNK + 44)
    compared = assert_alike(both, one_by_one(*prompts_of(*lengths)), **graphs)
    assert compared.rows[-6:-1] == [cut(CHUNK, CHUNK_KEPT)] * 5


def test_cached_prefix(both: tuple[Either, Either], graphs: dict[str, Any]) -> None:
    """The prefill server has the prefix, the decode server is sent all of it again."""
    prefix = tokens(150, seed=2)
    compared = assert_alike(both, one_by_one(prefix, prefix + tokens(40, seed=3)), **graphs)
    assert compared.prefills[-1].prefix_lens == [150]
    assert compared.on[1].cached_tokens == 150


def test_input_logprobs(both: tuple[Either, Either], graphs: dict[str, Any]) -> None:
    """Their rows are kept, in a prompt's last chunk and in the one before."""
    prompts = ((tokens(70, seed=9), 60), (tokens(2 * CHUNK + 44, seed=10), 2 * CHUNK - 10))
    rows = [cut(70, 10), cut(CHUNK, CHUNK_KEPT), cut(CHUNK, 10), whole(44)]
    if graphs:
        rows = [whole(CHUNK), cut(CHUNK, CHUNK_KEPT), whole(CHUNK), whole(64)]
    compared = assert_alike(
        both,
        lambda s: [generate(s, prompt, logprob_start_len=n)[0] for prompt, n in prompts],
        rows=rows,
    )
    assert [len(answer.input_logprobs) for answer in compared.on] == [9, 10 + 44 - 1]


def test_image(both: tuple[Either, Either], graphs: dict[str, Any]) -> None:
    [image, _] = picture("red")
    body = {"text": "<|image|>What is this?", "image_data": image["image_url"]["url"]}
    compared = assert_alike(both, lambda s: generate(s, None, **body), **graphs)
    assert [prefill.multimodal for prefill in compared.prefills] == [True]


def ask_at_once(server: Either) -> list[Answer]:
    """Send prompts that share forwards on both servers, while K and V of others are sent."""
    return at_once(lambda prompt: generate(server, prompt)[0], prompts_of(*LONG_AND_SHORT))


def test_several_at_a_time(both: tuple[Either, Either], graphs: dict[str, Any]) -> None:
    compared = assert_alike(both, ask_at_once, close_calls=1, **graphs)
    assert any(len(prefill.extend_lens) > 1 for prefill in compared.prefills)


def test_roles_are_switched(
    both_roles: Disaggregated, off_server: Server, graphs: dict[str, Any]
) -> None:
    """A server that was started to decode prefills on the fast path, and its peer decodes.

    Its tail was captured at start, and no prefill was: SGLang captures none in that role. A peer
    that captures decode steps now, while it serves, keeps its tail eager.
    """
    both_roles.forget_prefixes()
    switched = both_roles.switch_roles()
    assert_alike((switched, off_server), ask_at_once, close_calls=1, captured=CAPTURED_ROWS)
    switched.forget_prefixes()
    again = switched.switch_roles()
    assert tail(again.prefill) == (CAPTURED if graphs else f"eager ({lifecycle.SHARED})")
    assert_alike((again, off_server), ask_at_once, close_calls=1, **graphs)


def first_tokens(server: Server, prompts: list[list[int]], **peer: Any) -> list[list[int]]:
    """Return the first token of each answer, which a prefill server gives without a peer."""
    body = {"sampling_params": GREEDY | {"max_new_tokens": 1}, **peer}
    return [server.generate(input_ids=prompt, **body)["output_ids"] for prompt in prompts]


def test_a_decode_server_that_vanishes(
    both_roles: Disaggregated, off_server: Server, graphs: dict[str, Any]
) -> None:
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
    assert_all_fast(prefill.prefills(since=mark), **graphs)
    assert alone == first_tokens(off_server, prompts)
