"""Servers with two of SGLang's schedule policies: with a cache on the host, and with priorities.

Each policy has a server of its own, with the fast path on; the stock server that it is compared
with has the default policy, and neither of these modes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.ask import Answer, assert_alike, generate, prompts_of, tokens
from harness.layer_rows import cut
from harness.server import (
    CAPTURED_ARGUMENTS,
    CAPTURED_GRAPHS,
    CAPTURED_ROWS,
    CHUNK,
    EXIT_ARGUMENTS,
    EXIT_BUCKETS,
    EXIT_GRAPHS,
    Pair,
    Server,
    running,
)
from sglang_gemma4_reference.tail_failures import slow_prefills
from sglang_gemma4_yoco.commands.verify.comparison import Comparison

pytestmark = pytest.mark.release

ON_THE_HOST = (
    *("--enable-hierarchical-cache", "--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "layer_first", "--hicache-ratio", "2"),
    *("--max-total-tokens", "4096"),
)
PREFIXES = ("--schedule-policy", "lpm", *ON_THE_HOST)
IN_FILES = (
    *ON_THE_HOST,
    *("--page-size", "16", "--hicache-storage-backend", "file"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)
PRIORITIES = (
    *("--schedule-policy", "lof"),
    *("--enable-priority-scheduling", "--max-running-requests", "2"),
)


@pytest.fixture(scope="module", params=[(), EXIT_BUCKETS], ids=["captured tail", "exits"])
def buckets(request: pytest.FixtureRequest) -> Sequence[int]:
    """Return the row counts for which the server captures prefills, or none."""
    return tuple(request.param)


@pytest.fixture(scope="module")
def both_servers(
    tiny_checkpoint: Path,
    off_server: Server,
    tmp_path_factory: pytest.TempPathFactory,
    buckets: Sequence[int],
) -> Iterator[Pair]:
    """Yield a server with a cache on the host, and the stock server."""
    directory, graphs = tmp_path_factory.mktemp("prefixes"), CAPTURED_GRAPHS
    arguments = (*PREFIXES, *CAPTURED_ARGUMENTS)
    if buckets:
        arguments, graphs = (*PREFIXES, *EXIT_ARGUMENTS), EXIT_GRAPHS
    how = {"arguments": arguments, "env": graphs}
    with running(tiny_checkpoint, directory, switch=None, **how) as server:
        yield server, off_server


def test_preemption(tiny_checkpoint: Path, tmp_path: Path, off_server: Server) -> None:
    """One of two decoding requests is retracted for an urgent one, and computed again."""
    low = prompts_of(40, 50, seed=100)

    def ask(server: Server) -> list[Answer]:
        with ThreadPoolExecutor(1) as client:
            run = client.submit(generate, server, low, new_tokens=300, priority=0)
            server.wait_until(lambda: server.load()["running"] == len(low), "both decode")
            urgent = generate(server, tokens(60, seed=7), priority=100)
            return [*urgent, *run.result()]

    with running(tiny_checkpoint, tmp_path, switch=None, arguments=PRIORITIES) as server:
        both = assert_alike((server, off_server), ask)
    assert [answer.retractions for answer in both.off] == [0, 0, 0]
    urgent, *others = [answer.retractions for answer in both.on]
    assert urgent == 0
    assert sorted(others) == [0, 1]
    # It was computed again, with what it had answered by then, after the urgent one.
    [*_, again] = both.prefills
    assert sum(again.prefix_lens) + sum(again.extend_lens) > 50


# -- K and V that come back from the host ----------------------------------------------------


def crowd_out(server: Server) -> None:
    """Fill the pool, so that earlier prefixes are cached on the host alone."""
    for seed in range(4):
        generate(server, tokens(1200, seed=200 + seed))


@pytest.mark.parametrize(
    ("cached", "new", "body", "forwards"),
    [
        (300, 1, {}, 1),
        (300, 60, {}, 1),
        # No row is read of the chunk that the prefix is loaded for.
        (300, CHUNK + 40, {}, 2),
        # The kept rows are a suffix: an extend batch, which reads the loaded K and V too.
        (200, 40, {"logprob_start_len": 230}, 1),
    ],
    ids=["one token", "a chunk", "two chunks", "input logprobs"],
)
def test_prefix_from_the_host(
    both_servers: Pair,
    buckets: Sequence[int],
    cached: int,
    new: int,
    body: dict[str, Any],
    forwards: int,
) -> None:
    """Prefixes were evicted to the host; each layer's K and V come when it waits for them.

    Meanwhile the prefixes that crowd them out are copied to the host.
    """
    prefix = tokens(cached, seed=8)

    def ask(server: Server) -> list[Answer]:
        generate(server, prefix)
        crowd_out(server)
        return generate(server, prefix + tokens(new, seed=9), **body)

    both = assert_alike(both_servers, ask, captured=CAPTURED_ROWS, buckets=buckets)
    assert both.prefills[-forwards].prefix_lens == [cached]
    assert (both.on[0].loaded_tokens, both.off[0].loaded_tokens) == (cached, 0)


def test_prefixes_of_several_requests(both_servers: Pair, buckets: Sequence[int]) -> None:
    """Some requests of a forward have their prefixes on the host, some nowhere."""
    prefixes = [tokens(100, seed=12), tokens(70, seed=13)]
    prompts = [
        prefixes[0] + tokens(20, seed=14),
        prefixes[1] + tokens(21, seed=15),
        tokens(25, seed=16),
    ]

    def ask(server: Server) -> list[Answer]:
        for prefix in prefixes:
            generate(server, prefix)
        crowd_out(server)
        mark = server.mark()
        with ThreadPoolExecutor(2) as clients:
            with slow_prefills(server.failures, 0.3):  # until all others wait
                long = clients.submit(generate, server, tokens(24 * CHUNK, seed=17))
                server.wait_for_prefills(1, since=mark)
                others = clients.submit(generate, server, prompts)
                server.wait_until(lambda: server.load()["waiting"] == 3, "three in the queue")
            return [*long.result(), *others.result()]

    both = assert_alike(both_servers, ask, captured=CAPTURED_ROWS, buckets=buckets)
    last = both.prefills[-1]
    assert (last.extend_lens, last.prefix_lens) == ([20, 21, 25], [100, 70, 0])
    assert (last.rows[-1], last.replays) == (4, 1 + bool(buckets))
    assert [answer.loaded_tokens for answer in both.on] == [0, 100, 70, 0]


def test_prefix_from_files(tiny_checkpoint: Path, tmp_path: Path, off_server: Server) -> None:
    """A restarted server reads the prefixes that the one before has stored."""
    prompt = tokens(360, seed=18)
    files = tmp_path / "files"
    how = {
        "switch": None,
        "arguments": (*IN_FILES, *CAPTURED_ARGUMENTS),
        "env": {**CAPTURED_GRAPHS, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(files)},
    }
    [stock] = generate(off_server, prompt)
    stored = len(prompt) // 16 * 16
    for cached in (0, stored):
        with running(tiny_checkpoint, tmp_path / str(cached), **how) as server:
            [fast] = generate(server, prompt)
            server.wait_until(lambda: len([*files.iterdir()]) > stored // 16, "stored pages")
            last = server.prefills()[-1]
        assert fast.cached_tokens == cached
        assert (last.rows, last.replays) == (cut(sum(last.extend_lens), 1), 1)
        assert Comparison.of([(fast, stock)]).is_equal
    assert last.prefix_lens == [stored]
