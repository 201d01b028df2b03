"""Servers of several model processes: tensor-parallel ranks, and replicas.

Each answers the same requests as the stock server that has one process. That the path was active,
or not, is proven on every process, by the rows that each of its layers computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from harness.ask import (
    Answer,
    Compared,
    assert_same_answers,
    at_once,
    generate,
    prompts_of,
    tokens,
)
from harness.ask import (
    compare as compare_servers,
)
from harness.layer_rows import (
    assert_all_fast,
    cut,
    without_audit,
)
from harness.server import CHUNK, Pair, Server, running
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.row_trace import Prefill


@dataclass(frozen=True)
class Mode:
    """How a server spreads over two model processes."""

    name: str
    arguments: tuple[str, ...]

    @property
    def has_replicas(self) -> bool:
        return "--dp-size" in self.arguments


TENSOR_PARALLEL = Mode("tensor-parallel", ())
REPLICAS = Mode("replicas", ("--dp-size", "2", "--load-balance-method", "round_robin"))


@pytest.fixture(
    scope="module",
    params=[TENSOR_PARALLEL, pytest.param(REPLICAS, marks=pytest.mark.release)],
    ids=lambda m: m.name,
)
def mode(request: pytest.FixtureRequest) -> Mode:
    spread: Mode = request.param
    return spread


@pytest.fixture(scope="module")
def spread_server(
    request: pytest.FixtureRequest,
    mode: Mode,
    tiny_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """A server with the fast path on, over two model processes."""
    if mode is TENSOR_PARALLEL:
        yield request.getfixturevalue("ranks_server")
        return
    directory = tmp_path_factory.mktemp(mode.name)
    with running(tiny_checkpoint, directory, switch=None, arguments=mode.arguments) as server:
        yield server


def compare(servers: Pair, ask: Callable[[Server], list[Answer]]) -> Compared[Answer]:
    """``ask.compare``, without what audits have computed."""
    both = compare_servers(servers, ask)
    return replace(both, prefills=[*map(without_audit, both.prefills)])


@pytest.fixture
def both_servers(spread_server: Server, off_server: Server) -> Pair:
    return spread_server, off_server


def turn(mode: Mode, servers: Pair, server: Server, number: int) -> dict[str, Any]:
    """The field of a request that has replicas take turns, whatever load SGLang counts."""
    spread = mode.has_replicas and server is servers[0]
    if spread:
        return {"routed_dp_rank": number % 2}
    return {}


def in_turns(
    mode: Mode, servers: Pair, prompts: Sequence[list[int]], **body: Any
) -> Compared[Answer]:
    """Answers of both servers to these prompts, one after the other."""

    def ask(server: Server) -> list[Answer]:
        found: list[Answer] = []
        for i, prompt in enumerate(prompts):
            found.append(generate(server, prompt, **body, **turn(mode, servers, server, i))[0])
        return found

    return compare(servers, ask)


def by_process(prefills: list[Prefill]) -> list[list[Prefill]]:
    """The prefill forwards of each process, the first pipeline stage before the second."""

    def owner(prefill: Prefill) -> tuple[int, int]:
        return prefill.first_layer, prefill.process

    found: list[list[Prefill]] = []
    for _, mine in groupby(sorted(prefills, key=owner), owner):
        found.append(list(mine))
    return found


def assert_fast_on_all_processes(mode: Mode, prefills: list[Prefill]) -> None:
    first, second = by_process(prefills)
    if mode.has_replicas:
        assert_all_fast(first)
    else:  # both run every batch
        assert [p.extend_lens for p in first] == [p.extend_lens for p in second]
        assert [p.prefix_lens for p in first] == [p.prefix_lens for p in second]
        assert [p.rows for p in first] == [p.rows for p in second]
    assert_all_fast(second)


def test_prompts_of_all_lengths(mode: Mode, both_servers: Pair) -> None:
    """Prompts at the window's edge, and over several chunks: unfinished ones skip the tail."""
    window = E2B_TINY.sliding_window
    lengths = (1, 2, 50, window, window + 1, 2 * CHUNK + 44)
    both = in_turns(mode, both_servers, prompts_of(*lengths))
    assert_fast_on_all_processes(mode, both.prefills)
    assert any(p.rows == cut(CHUNK, 0) for p in both.prefills if p.rows[-1] == 0)
    assert_same_answers(both)


def test_scheduling_overlaps(spread_server: Server) -> None:
    assert spread_server.resolved("disable_overlap_schedule") is False


def test_cached_prefix(mode: Mode, both_servers: Pair) -> None:
    prefix = tokens(150, seed=2)
    # On both replicas, each of which has a cache of its own.
    sent = [(prompt, i) for i in range(2) for prompt in (prefix, prefix + tokens(40, seed=3))]
    if not mode.has_replicas:
        del sent[2:]

    def ask(server: Server) -> list[Answer]:
        answers = []
        for prompt, i in sent:
            if prompt is prefix:
                server.forget_prefixes()
            answers += generate(server, prompt, **turn(mode, both_servers, server, i))
        return answers

    both = compare(both_servers, ask)
    assert_fast_on_all_processes(mode, both.prefills)
    for mine in by_process(both.prefills):
        assert mine[-1].prefix_lens == [150]
    assert_same_answers(both)
    assert both.on[1].cached_tokens == 150


def test_input_logprobs_of_last_tokens(mode: Mode, both_servers: Pair) -> None:
    """The kept rows are a suffix: an extend batch, not a decode step, on every process."""
    prompts = [tokens(70, seed=9 + i) for i in range(2)]
    both = in_turns(mode, both_servers, prompts, logprob_start_len=60)
    assert len(by_process(both.prefills)) == 2
    for p in both.prefills:
        assert p.rows == cut(70, 10)
    assert_same_answers(both)
    assert [len(answer.input_logprobs) for answer in both.on] == [9, 9]


def test_concurrent_requests(mode: Mode, both_servers: Pair) -> None:
    """Eight clients at once: requests share forwards, and decode steps run between them."""
    lengths = (3, 45, 128, 129, 300, 17, 64, 90)

    def ask(server: Server) -> list[Answer]:
        def one(i: int) -> Answer:
            prompt = tokens(lengths[i], seed=i)
            return generate(server, prompt, **turn(mode, both_servers, server, i))[0]

        return at_once(one, range(len(lengths)))

    both = compare(both_servers, ask)
    assert_fast_on_all_processes(mode, both.prefills)
    assert_same_answers(both, close_calls=1)


def test_log_names_every_process(mode: Mode, spread_server: Server) -> None:
    """Each process that cuts logs it."""
    for i in range(2):
        generate(
            spread_server,
            tokens(50, seed=1 + i),
            **turn(mode, (spread_server, spread_server), spread_server, i),
        )
    active = spread_server.log_lines("Gemma 4 fast prefill is active")
    assert len(active) == 2
    assert spread_server.log_lines("falls back to stock for this server") == []
    assert "Traceback" not in spread_server.log()
