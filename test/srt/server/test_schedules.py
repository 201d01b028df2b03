"""Servers with two of SGLang's schedule policies: with a cache on the host, and with priorities.

Each policy has a server of its own, with the fast path on, and with another mode besides; the stock
server that it is compared with has the default policy and none of these modes. A policy shows in
the order of the requests in a forward, where all have waited while a long prompt was computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from harness.ask import Answer, Compared, assert_alike, generate, prompts_of, tokens
from harness.layer_rows import CHUNK_KEPT, cut
from harness.server import CHUNK, Pair, Server, running
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.row_trace import Prefill
from sglang_gemma4_reference.tail_failures import slow_prefills

pytestmark = pytest.mark.release

LONG = 24 * CHUNK
PAUSE = 0.3  # seconds of each forward of the long prompt, until all that wait have come


@dataclass(frozen=True)
class Schedule:
    """A policy, and the other arguments of its server."""

    policy: str
    arguments: tuple[str, ...] = ()


PREFIXES = Schedule(
    "lpm",
    (
        *("--enable-hierarchical-cache", "--hicache-io-backend", "direct"),
        *("--hicache-mem-layout", "layer_first", "--hicache-ratio", "2"),
        *("--max-total-tokens", "4096"),
    ),
)
PRIORITIES = Schedule("lof", ("--enable-priority-scheduling", "--max-running-requests", "2"))


@pytest.fixture(
    scope="module",
    params=[PREFIXES, PRIORITIES],
    ids=lambda schedule: schedule.policy,
)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    wanted: Schedule = request.param
    if wanted is PREFIXES and not releases.moves_cache_to_the_host():
        pytest.skip("this SGLang's cache on the host cannot run on a CPU")
    return wanted


@pytest.fixture(scope="module")
def scheduling(
    schedule: Schedule, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of this policy, with the fast path on."""
    arguments = ("--schedule-policy", schedule.policy, *schedule.arguments)
    directory = tmp_path_factory.mktemp(schedule.policy)
    with running(tiny_checkpoint, directory, switch=None, arguments=arguments) as server:
        yield server


@pytest.fixture
def both_servers(scheduling: Server, off_server: Server) -> Pair:
    return scheduling, off_server


def only(*schedules: Schedule) -> pytest.MarkDecorator:
    """For the servers of these policies."""
    return pytest.mark.parametrize("schedule", schedules, indirect=True, ids=lambda s: s.policy)


# -- the order of those that wait ------------------------------------------------------------


@dataclass(frozen=True)
class Waiting:
    """Requests of one POST: their prompts, and what else they say."""

    prompts: Sequence[list[int]]
    body: dict[str, Any]

    @property
    def input_ids(self) -> Any:
        """A batch, or one prompt: of a batch SGLang loses the routing keys."""
        if len(self.prompts) > 1:
            return list(self.prompts)
        return self.prompts[0]


def after_a_long_prompt(server: Server, posts: Sequence[Waiting]) -> list[Answer]:
    """Answers to requests that wait, in the order of ``posts``, while a long prompt is computed."""
    mark, waiting = server.mark(), []
    coming = accumulate(len(post.prompts) for post in posts)
    with ThreadPoolExecutor(len(posts) + 1) as clients:
        with slow_prefills(server.failures, PAUSE):
            first = clients.submit(generate, server, tokens(LONG, seed=1))
            server.wait_for_prefills(1, since=mark)
            for post, count in zip(posts, coming, strict=True):
                waiting.append(clients.submit(generate, server, post.input_ids, **post.body))
                wait_for_queue(server, count)
        return [*first.result(), *(answer for post in waiting for answer in post.result())]


def wait_for_queue(server: Server, count: int) -> None:
    """Return when so many requests wait."""
    server.wait_until(lambda: server.load()["waiting"] == count, f"{count} in the queue")


def served(prefills: Sequence[Prefill], lengths: Sequence[int]) -> list[int]:
    """The requests with so many new tokens, in the order in which they were computed."""
    found: list[int] = []
    for prefill in prefills:
        for n in prefill.extend_lens:
            if n in lengths:
                found.append(n)
    return found


def compare_waiting(
    servers: Pair, posts: Sequence[Waiting], cached: Sequence[list[int]] = ()
) -> Compared[Answer]:
    """The answers of both servers, on which the prompts ``cached`` were computed before."""

    def ask(server: Server) -> list[Answer]:
        before = []
        for prompt in cached:
            before.append(generate(server, prompt)[0])
        return [*before, *after_a_long_prompt(server, posts)]

    return assert_alike(servers, ask)


def fresh(*lengths: int) -> list[list[int]]:
    """Prompts that no other test uses."""
    return prompts_of(*lengths, seed=100)


@only(PREFIXES)
def test_longest_prefix_first(both_servers: Pair) -> None:
    long, short = tokens(100, seed=2), tokens(50, seed=3)
    a, b, c = fresh(20, 30, 40)
    both = compare_waiting(
        both_servers, [Waiting([c, short + b, long + a], {})], cached=[long, short]
    )
    assert served(both.prefills, (20, 30, 40)) == [20, 30, 40]
    assert [answer.cached_tokens for answer in both.on[-3:]] == [0, 50, 100]


@only(PRIORITIES)
def test_longest_output_first(both_servers: Pair) -> None:
    posts = [Waiting(fresh(10, 20, 30), {"new_tokens": [12, 14, 16]})]
    both = compare_waiting(both_servers, posts)
    assert served(both.prefills, (10, 20, 30)) == [30, 20, 10]


@only(PRIORITIES)
def test_highest_priority_first(both_servers: Pair) -> None:
    """Before the length of the output."""
    first, second = fresh(10, 20)
    posts = [
        Waiting([first], {"priority": 1, "new_tokens": 16}),
        Waiting([second], {"priority": 2}),
    ]
    both = compare_waiting(both_servers, posts)
    assert served(both.prefills, (10, 20)) == [20, 10]


@only(PRIORITIES)
def test_preemption(both_servers: Pair) -> None:
    """Of two requests that decode, one is thrown out for an urgent one, and computed again."""
    low = fresh(40, 50)

    def ask(server: Server) -> list[Answer]:
        mark = server.mark()
        with ThreadPoolExecutor(1) as client:
            run = client.submit(generate, server, low, new_tokens=300, priority=0)
            server.wait_until(lambda: server.load()["running"] == len(low), "both decode")
            assert server.mark() > mark
            urgent = generate(server, tokens(60, seed=7), priority=100)
            return [*urgent, *run.result()]

    both = assert_alike(both_servers, ask)
    assert [answer.retractions for answer in both.off] == [0, 0, 0]
    urgent, *others = [answer.retractions for answer in both.on]
    assert urgent == 0
    assert sorted(others) == [0, 1]
    # It was computed again, with what it had answered by then, after the urgent one.
    [*_, again] = both.prefills
    assert sum(again.prefix_lens) + sum(again.extend_lens) > 50


# -- K and V that come back from the host ----------------------------------------------------


def crowd_out(server: Server) -> None:
    """Fill the pool, so that what was cached before is on the host alone."""
    for seed in range(4):
        generate(server, tokens(1200, seed=200 + seed))


@only(PREFIXES)
@pytest.mark.parametrize(
    ("cached", "new", "body", "rows"),
    [
        (300, 1, {}, [cut(1, 1)]),
        (300, 60, {}, [cut(60, 1)]),
        # No row is read of the chunk that the prefix is loaded for.
        (300, CHUNK + 40, {}, [cut(CHUNK, CHUNK_KEPT), cut(40, 1)]),
        # The kept rows are a suffix: an extend batch, which reads the donors' K and V too.
        (200, 40, {"logprob_start_len": 230}, [cut(40, 10)]),
    ],
    ids=["one token", "a chunk", "two chunks", "input logprobs"],
)
def test_prefix_from_the_host(
    both_servers: Pair,
    cached: int,
    new: int,
    body: dict[str, Any],
    rows: list[list[int]],
) -> None:
    """Prefixes that were evicted to the host; each layer's K and V come when it waits for them."""
    prefix = tokens(cached, seed=8)

    def ask(server: Server) -> list[Answer]:
        generate(server, prefix)
        crowd_out(server)
        return generate(server, prefix + tokens(new, seed=9), **body)

    both = assert_alike(both_servers, ask)
    assert both.prefills[-len(rows)].prefix_lens == [cached]
    assert both.rows[-len(rows) :] == rows
    assert (both.on[0].loaded_tokens, both.off[0].loaded_tokens) == (cached, 0)


@only(PREFIXES)
def test_prefixes_of_several_requests(both_servers: Pair) -> None:
    """Of the requests in one forward some have theirs on the host, some nowhere."""
    prefixes = [tokens(100, seed=12), tokens(70, seed=13)]
    posts = [Waiting([p + tokens(20 + i, seed=14 + i) for i, p in enumerate(prefixes)], {})]
    posts.append(Waiting(fresh(25), {}))

    def ask(server: Server) -> list[Answer]:
        for prefix in prefixes:
            generate(server, prefix)
        crowd_out(server)
        return after_a_long_prompt(server, posts)

    both = assert_alike(both_servers, ask)
    last = both.prefills[-1]
    assert (last.extend_lens, last.prefix_lens) == ([20, 21, 25], [100, 70, 0])
    assert last.rows == cut(66, 3)
    assert [answer.loaded_tokens for answer in both.on] == [0, 100, 70, 0]
