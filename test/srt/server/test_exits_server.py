"""A real server that exits its captured prefills early, beside stock.

The setting turns them on, from the launcher's arguments to a served request. The stock server
captures no prefills. The rows of each forward show how far its graph ran (``row_trace``): a
replayed layer computes as many as were captured, padding and all. And the server's own counters
show by which path its forwards went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from harness.ask import (
    assert_alike,
    assert_ranks_alike,
    assert_same_traffic,
    chat,
    generate,
    one_by_one,
    over_a_chunk_boundary,
    prompts_of,
    tokens,
    traffic,
)
from harness.layer_rows import FIRST_CUT, assert_all_fast
from harness.server import (
    CAPTURED_ROWS,
    CHUNK,
    EXIT_ARGUMENTS,
    EXIT_BUCKETS,
    EXIT_GRAPHS,
    Pair,
    Server,
    running,
)
from sglang_gemma4_reference import workload
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_yoco import counters, metrics
from sglang_gemma4_yoco.prefill_exits.graph_exits import TAIL_NOT_CAPTURED

A = TypeVar("A")
EXITS: dict[str, Any] = {"captured": CAPTURED_ROWS, "buckets": EXIT_BUCKETS}


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.release)],
    ids=["one rank", "two ranks"],
)
def both_servers(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Path,
    off_server: Server,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Yield a server that replays its prefills, on one rank or two, and the stock one."""
    directory = tmp_path_factory.mktemp("exits")
    arguments = (*EXIT_ARGUMENTS, "--tp-size", str(request.param))
    graphs = {"arguments": arguments, "env": EXIT_GRAPHS}
    with running(tiny_checkpoint, directory, switch=None, **graphs) as server:
        yield server, off_server


# -- paths of forwards -----------------------------------------------------------------------


def forwards(server: Server) -> Counter[str]:
    """Return the prefill forwards so far by outcome, as the server counts them."""
    return Counter(server.reports()[0]["forwards"])


def through_exits(servers: Pair, ask: Callable[[Server], list[A]]) -> Counter[str]:
    """Assert equal answers and the due path of each forward; return the outcomes."""
    before = forwards(servers[0])
    both = assert_alike(servers, ask, **EXITS)
    assert_ranks_alike(both.prefills, servers[0].resolved("tp_size"))
    return forwards(servers[0]) - before


# -- reports ---------------------------------------------------------------------------------


def test_what_it_says(both_servers: Pair) -> None:
    """SGLang's capture is repaired, and its captured prefills are left at their exits."""
    server, stock = both_servers
    ranks = server.resolved("tp_size")
    generate(server, tokens(50, seed=1))
    where = f"open after {FIRST_CUT + 1} segments"
    assert len(server.log_lines("graphs on for prefills")) == 1
    for words in (
        "SGLang's capture of prefill CUDA graphs is fixed for this model",
        f"exits from captured prefills are {where}",
        "YOCO fast prefill is active",
    ):
        assert len(server.log_lines(words)) == ranks, words
    assert server.log_lines("falls back to stock for this server") == []
    assert "Traceback" not in server.log_since_ready()
    assert not stock.log_lines("is repaired")
    for state in server.reports():
        assert (state["active"], state["reason"]) == (True, None)
        assert where in state["exits"]
        found = state["exits_check"]
        assert found["largest_difference"] <= found["allowed"]


# -- requests one by one ---------------------------------------------------------------------


def test_prompts_of_all_lengths(both_servers: Pair) -> None:
    """They fill a bucket, are padded, reach the window's edge, or fit no bucket."""
    window = E2B_TINY.sliding_window
    lengths = (1, 2, 7, 9, 16, 17, window - 1, window, window + 1, 63, 65, CHUNK - 1, CHUNK)
    counted = through_exits(both_servers, one_by_one(*prompts_of(*lengths)))
    assert (counted[counters.EXIT_CAPTURED], counted[counters.TAIL_CAPTURED]) == (9, 3)


def test_image_over_a_chunk_boundary(both_servers: Pair) -> None:
    """SGLang counts media in every chunk of the prompt, though the last one is of text alone."""
    content = [*over_a_chunk_boundary(), {"type": "text", "text": "y" * 2 * CHUNK}]
    counted = through_exits(both_servers, lambda server: [chat(server, content)])
    assert counted == {counters.TAIL_SKIPPED: 3, counters.TAIL_CAPTURED: 1}


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.release)])
def test_random_traffic(both_servers: Pair, count: int) -> None:
    """Random requests get the same answers from both servers, and no slot leaks."""
    server, stock = both_servers
    requests = workload.random_requests(
        count, seed=count, vocabulary=E2B_TINY.vocab_size, longest=400
    )
    before, mark = forwards(server), server.mark()
    answers, wanted = traffic(server, requests, 12), traffic(stock, requests, 12)
    assert_same_traffic(requests, wanted, answers, stock)
    prefills, counted = server.prefills(since=mark), forwards(server) - before
    assert_all_fast(prefills, **EXITS)
    assert any(prefill.multimodal for prefill in prefills)
    assert counted[counters.EXIT_CAPTURED] >= count / 10
    assert counted[counters.EXIT_SKIPPED] >= count / 20
    assert counted[counters.TAIL_CAPTURED] >= 1  # images, and where no bucket fits
    assert counted[metrics.make_label(TAIL_NOT_CAPTURED)] >= 1  # input logprobs
    assert any(any(prefill.prefix_lens) for prefill in prefills)
    assert counted[counters.FAILED] == 0
