"""Servers with SGLang's schedule policies, and what goes with them: priorities, caches, sessions.

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
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, CacheAwarePolicy

from harness.ask import Answer, Compared, assert_alike, generate, prompts_of, tokens
from harness.layer_rows import CHUNK_KEPT, cut
from harness.server import CHUNK, Pair, Server, running
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.row_trace import Prefill
from sglang_gemma4_reference.tail_failures import slow_prefills

pytestmark = pytest.mark.release

LONG = 24 * CHUNK
PAUSE = 0.3  # seconds of each forward of the long prompt, until all that wait have come
LARGE_PAGE = 32
POLICIES = {policy.value for policy in (*CacheAwarePolicy, *CacheAgnosticPolicy)}


@dataclass(frozen=True)
class Schedule:
    """A policy, and the other arguments of its server."""

    policy: str
    arguments: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The fields of SGLang's ``ServerArgs`` that it sets."""
        options = [word for word in self.arguments if word.startswith("--")]
        return [option.removeprefix("--").replace("-", "_") for option in options]


PREFIXES = Schedule(
    "lpm",
    (
        *("--enable-hierarchical-cache", "--hicache-io-backend", "direct"),
        *("--hicache-mem-layout", "layer_first", "--hicache-ratio", "2"),
        *("--max-total-tokens", "4096"),
    ),
)
BRANCHES = Schedule("dfs-weight")  # with which streaming sessions end SGLang's scheduler
PRIORITIES = Schedule("lof", ("--enable-priority-scheduling", "--max-running-requests", "2"))
RATIOS = Schedule("hrrn", ("--disable-overlap-schedule",))
SHORTEST = Schedule("shortest-prefill-first", ("--page-size", str(LARGE_PAGE)))
SESSIONS = Schedule(
    "routing-key",
    (
        *("--enable-streaming-session", "--enable-session-radix-cache"),
        *("--max-total-tokens", "4096"),
    ),
)
RANDOM = Schedule("random")


@pytest.fixture(
    scope="module",
    params=[PREFIXES, BRANCHES, PRIORITIES, RATIOS, SHORTEST, SESSIONS, RANDOM],
    ids=lambda schedule: schedule.policy,
)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    wanted: Schedule = request.param
    if wanted.policy not in POLICIES:
        pytest.skip(f"this SGLang has no policy {wanted.policy}")
    unknown = releases.unknown_arguments(wanted.names)
    if unknown:
        pytest.skip(f"this SGLang has no {', '.join(unknown)}")
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
        return list(self.prompts) if len(self.prompts) > 1 else self.prompts[0]


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
    return [n for prefill in prefills for n in prefill.extend_lens if n in lengths]


def compare_waiting(
    servers: Pair, posts: Sequence[Waiting], cached: Sequence[list[int]] = ()
) -> Compared[Answer]:
    """The answers of both servers, on which the prompts ``cached`` were computed before."""

    def ask(server: Server) -> list[Answer]:
        before = [generate(server, prompt)[0] for prompt in cached]
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


@only(BRANCHES)
def test_heaviest_branch_first(both_servers: Pair) -> None:
    """Two requests go on from one prefix, and one from the other."""
    one, other = tokens(60, seed=3), tokens(60, seed=4)
    a, b, c = fresh(10, 20, 30)
    posts = [Waiting([other + a, one + b, one + c], {})]
    both = compare_waiting(both_servers, posts, cached=[one, other])
    assert served(both.prefills, (10, 20, 30)) == [20, 30, 10]


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


@only(RATIOS)
def test_highest_response_ratio_first(scheduling: Server, both_servers: Pair) -> None:
    """Of those that have waited for equally long, the shortest first; scheduling is not overlapped.

    Elsewhere it is: ``test_server``.
    """
    assert scheduling.resolved("disable_overlap_schedule") is True
    both = compare_waiting(both_servers, [Waiting(fresh(30, 20, 10), {})])
    assert served(both.prefills, (10, 20, 30)) == [10, 20, 30]


@only(SESSIONS)
def test_routing_key_of_those_that_run_first(both_servers: Pair) -> None:
    first, second = fresh(10, 20)
    posts = [Waiting([first], {"routing_key": "b"}), Waiting([second], {"routing_key": "a"})]

    def ask(server: Server) -> list[Answer]:
        mark = server.mark()
        with ThreadPoolExecutor(1) as client:
            runs = client.submit(
                generate, server, tokens(40, seed=5), new_tokens=200, routing_key="a"
            )
            server.wait_for_prefills(1, since=mark)
            return [*after_a_long_prompt(server, posts), *runs.result()]

    assert served(assert_alike(both_servers, ask).prefills, (10, 20)) == [20, 10]


@only(RANDOM)
def test_random_order(both_servers: Pair) -> None:
    lengths = range(4, 20, 2)
    both = compare_waiting(both_servers, [Waiting(fresh(*lengths), {})])
    order = served(both.prefills, lengths)
    assert sorted(order) == [*lengths]
    assert order != [*lengths]  # one time in 40320 it is


@only(SHORTEST)
def test_short_prompt_beside_a_chunk_of_a_long_one(scheduling: Server, both_servers: Pair) -> None:
    """A short prompt need not wait: the long one's chunk becomes whole pages shorter for it."""
    assert scheduling.resolved("page_size") == LARGE_PAGE
    short = 20

    def ask(server: Server) -> list[Answer]:
        mark = server.mark()
        with ThreadPoolExecutor(2) as clients:
            with slow_prefills(server.failures, PAUSE):
                long = clients.submit(generate, server, tokens(LONG, seed=1))
                server.wait_for_prefills(1, since=mark)
                beside = clients.submit(generate, server, tokens(short, seed=6))
                server.wait_for_prefills(4, since=mark)
            return [*long.result(), *beside.result()]

    both = assert_alike(both_servers, ask)
    [shared] = [prefill for prefill in both.prefills if short in prefill.extend_lens]
    assert shared.extend_lens == [CHUNK - LARGE_PAGE, short]
    assert shared.prefix_lens[0] < LONG // 2
    assert shared.rows == cut(CHUNK - LARGE_PAGE + short, 2)


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


# -- sessions --------------------------------------------------------------------------------


@only(SESSIONS)
def test_streaming_session(scheduling: Server, both_servers: Pair) -> None:
    """Three turns of a session that owns its K and V, beside a stock server with whole prompts."""
    turns = [tokens(n, seed=20 + n) for n in (40, 2, CHUNK + 9)]

    def ask(server: Server) -> list[Answer]:
        if server is not scheduling:
            return whole_prompts(server, turns)
        body = {"capacity_of_str_len": 10000, "streaming": True}
        session = {"id": server.post("/open_session", body).json()}
        answers = [generate(server, turn, session_params=session)[0] for turn in turns[:2]]
        crowd_out(server)
        answers += generate(server, turns[2], session_params=session)
        server.post("/close_session", {"session_id": session["id"]})
        return answers

    both = assert_alike(both_servers, ask)
    assert both.rows[:2] == [cut(40, 1), cut(3, 1)]
    assert both.rows[-2:] == [cut(CHUNK, CHUNK_KEPT), cut(10, 1)]
    # Of an answer's last token there is no K and V yet.
    assert [answer.cached_tokens for answer in both.on] == [0, 51, 65]


def whole_prompts(server: Server, turns: Sequence[list[int]]) -> list[Answer]:
    """Answers to turns, each sent with the ones before it and their answers."""
    answers: list[Answer] = []
    prompt: list[Any] = []
    for turn in turns:
        prompt += turn
        answers += generate(server, prompt)
        prompt += answers[-1].tokens
    return answers


@only(SESSIONS)
def test_session_that_keeps_its_prefix(scheduling: Server, both_servers: Pair) -> None:
    """What a session has computed stays cached while the pool runs full; all else goes."""
    owned, foreign = tokens(300, seed=30), tokens(310, seed=31)

    def ask(server: Server) -> list[Answer]:
        body: dict[str, Any] = {"session_id": "owner"} if server is scheduling else {}
        first = generate(server, owned, **body)
        if server is scheduling:  # the other one has room, and forgets nothing
            generate(server, foreign)
            crowd_out(server)
        turn = [*owned, *first[0].tokens, *tokens(30, seed=32)]
        answers = [*first, *generate(server, turn, **body), *generate(server, foreign + turn[:9])]
        if server is scheduling:
            server.post("/close_session", {"session_id": "owner"})
        return answers

    both = assert_alike(both_servers, ask)
    assert [answer.cached_tokens for answer in both.on] == [0, 311, 0]
