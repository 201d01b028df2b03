"""A real server with captured prefills, which are left at their exits, beside stock.

The stock server captures no prefills. The rows of each forward show how far its graph ran
(``row_trace``): a replayed layer computes as many as were captured, padding and all. And the
server's own counters show by which path its forwards went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ask import (
    GREEDY,
    Answer,
    Compared,
    again_and_again,
    assert_same_answers,
    chat,
    compare,
    generate,
    picture,
    tokens,
)
from layer_rows import FIRST_CUT, cut, fast_rows, is_replayed, whole
from server import CHUNK, RECORDED_ARGUMENTS, RECORDED_GRAPHS, RECORDED_ROWS, Server, running
from sglang_gemma4_reference import releases, workload
from sglang_gemma4_reference.checkpoint import E2B_TINY, write_assistant
from sglang_gemma4_reference.row_trace import Prefill
from sglang_gemma4_reference.workload import Client
from sglang_gemma4_yoco import log, settings
from sglang_gemma4_yoco.core import gate
from sglang_gemma4_yoco.loading import metrics
from sglang_gemma4_yoco.prefill_graphs.exits import TAIL_NOT_CAPTURED

if not releases.records_prefills():
    pytest.skip("tried with the prefill graphs of SGLang 0.5.23", allow_module_level=True)

BUCKETS = (16, 32, 64, CHUNK)
ARGUMENTS = (
    *RECORDED_ARGUMENTS,
    *("--cuda-graph-backend-prefill", "breakable"),
    *("--cuda-graph-bs-prefill", *map(str, BUCKETS)),
)
GRAPHS = {**RECORDED_GRAPHS, "GEMMA4_CPU_GRAPHS": "decode,prefill"}

A = TypeVar("A")


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.release)],
    ids=["one rank", "two ranks"],
)
def exits_server(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that replays its prefills, on one tensor-parallel rank or two."""
    directory = tmp_path_factory.mktemp("exits")
    arguments = (*ARGUMENTS, "--tp-size", str(request.param))
    graphs: Any = {"arguments": arguments, "env": GRAPHS}
    with running(tiny_checkpoint, directory, switch=None, **graphs) as server:
        yield server


@pytest.fixture
def both_servers(exits_server: Server, off_server: Server) -> tuple[Server, Server]:
    return exits_server, off_server


# -- which way a forward went ----------------------------------------------------------------


def bucket_of(prefill: Prefill) -> int | None:
    """The graph that SGLang serves a prefill by: more than half of a bucket must be used."""
    total = sum(prefill.extend_lens)
    bucket = min((b for b in BUCKETS if b >= total), default=None)
    fits = bucket is not None and bucket <= 2 * total
    return bucket if fits and not prefill.multimodal else None


def due(prefill: Prefill) -> tuple[list[int], int]:
    """The rows that the layers must compute of a forward, and how many graphs must be replayed."""
    rows = fast_rows(prefill, recorded=RECORDED_ROWS)
    tail = is_replayed(prefill, 1, RECORDED_ROWS)
    bucket = bucket_of(prefill)
    if bucket is None:
        return rows, tail
    if tail or rows[-1] == 0:
        return cut(bucket, rows[-1]), 1 + tail
    return whole(bucket), 1  # a tail that is not captured: the graph runs to its end


def assert_as_due(prefills: list[Prefill]) -> None:
    for prefill in prefills:
        assert (prefill.rows, prefill.replays) == due(prefill), prefill


def forwards(server: Server) -> Counter[str]:
    """Prefill forwards so far by what became of them, by the server's own word.

    Without those that verify drafts.
    """
    told: dict[str, int] = server.states()[0][metrics.ENTRY]["forwards"]
    return Counter({name: n for name, n in told.items() if not name.startswith("forward_mode")})


def through_exits(
    servers: tuple[Server, Server], ask: Callable[[Server], list[A]]
) -> tuple[Compared[A], Counter[str]]:
    """``compare``, and what became of the forwards; all of them went as they must."""
    before = forwards(servers[0])
    both = compare(servers, ask)
    assert_as_due(both.prefills)
    told = forwards(servers[0]) - before
    processes = {prefill.process for prefill in both.prefills}
    assert len(processes) == servers[0].resolved("tp_size")
    for process in processes:  # each runs every batch
        assert told == Counter(outcome(p) for p in both.prefills if p.process == process)
    return both, told


def outcome(prefill: Prefill) -> str:
    """What must be counted of a forward."""
    rows, _ = due(prefill)
    replayed, tail = bucket_of(prefill), is_replayed(prefill, 1, RECORDED_ROWS)
    if rows[-1] == 0:
        return log.TAIL_SKIPPED if replayed is None else log.EXIT_SKIPPED
    if tail:
        return log.TAIL_CAPTURED if replayed is None else log.EXIT_CAPTURED
    if workload.due_rows(prefill, lambda total, read: read < total) == sum(prefill.extend_lens):
        return metrics.label(gate.NOTHING_TO_SKIP)
    return log.TAIL_EAGER if replayed is None else metrics.label(TAIL_NOT_CAPTURED)


# -- what it says ----------------------------------------------------------------------------


def test_what_it_says(both_servers: tuple[Server, Server]) -> None:
    """SGLang's capture is repaired, and what it has captured is left at its exits."""
    server, stock = both_servers
    ranks = server.resolved("tp_size")
    generate(server, tokens(50, seed=1))
    repaired = server.log_lines("capture of prefill CUDA graphs is repaired")
    assert len(repaired) == ranks
    assert all("because --cuda-graph-backend-prefill asks for them" in line for line in repaired)
    where = f"open after segment {FIRST_CUT + 1} ({len(BUCKETS)} buckets of up to {BUCKETS[-1]} "
    opened = server.log_lines("exits from captured prefills are")
    assert len(opened) == ranks
    assert all(where in line for line in opened)
    assert len(server.log_lines("Gemma 4 fast prefill is active")) == ranks
    assert server.log_lines("falls back to stock for this server") == []
    assert "Traceback" not in server.log_since_ready()
    assert not stock.log_lines("is repaired")
    for process in server.states():
        state = process[metrics.ENTRY]
        assert (state["active"], state["reason"]) == (True, None)
        assert where in state["exits"]
        found = state["exits_check"]
        assert found["largest_difference"] <= found["allowed"]


# -- requests one by one ---------------------------------------------------------------------


def test_prompts_of_all_lengths(both_servers: tuple[Server, Server]) -> None:
    """In a full bucket and in padded ones, at the window's edge, and where no bucket fits."""
    window = E2B_TINY.sliding_window
    lengths = (1, 2, 7, 9, 16, 17, window - 1, window, window + 1, 63, 65, CHUNK - 1, CHUNK)

    def ask(server: Server) -> list[Answer]:
        return [generate(server, tokens(n, seed=n))[0] for n in lengths]

    both, told = through_exits(both_servers, ask)
    assert told[log.EXIT_CAPTURED] == sum(bucket_of_text(n) for n in lengths) == 10
    assert told[log.TAIL_CAPTURED] == 2
    assert_same_answers(both)


def bucket_of_text(length: int) -> bool:
    return bucket_of(Prefill("EXTEND", [length], [0], [])) is not None


def test_one_prompt_again_and_again(both_servers: tuple[Server, Server]) -> None:
    both, told = through_exits(both_servers, again_and_again)
    assert (told[log.EXIT_SKIPPED], told[log.EXIT_CAPTURED]) == (1, 5)
    assert_same_answers(both)


def test_image_over_a_chunk_boundary(both_servers: tuple[Server, Server]) -> None:
    """Its prompt has media in every chunk, for SGLang, though the last one is of text alone."""
    before, after = ({"type": "text", "text": "x" * n} for n in (CHUNK - 20, 2 * CHUNK))
    content = [before, *picture("purple", size=480), after]
    both, told = through_exits(both_servers, lambda server: [chat(server, content)])
    assert told == {log.TAIL_SKIPPED: 3, log.TAIL_CAPTURED: 1}
    assert_same_answers(both)


# -- random requests -------------------------------------------------------------------------


def assert_same_traffic(
    servers: tuple[Server, Server], count: int, seed: int
) -> tuple[list[Prefill], Counter[str]]:
    """Random requests get the same answers from both servers, and leave nothing behind."""
    requests = workload.random_requests(
        count, seed=seed, vocabulary=E2B_TINY.vocab_size, longest=400
    )
    before, mark, answers = forwards(servers[0]), servers[0].mark(), []
    for server in servers:
        server.forget_prefixes()
        client = Client(server.url)
        answers.append(workload.ask_all(client, requests, concurrency=12))
        assert workload.held_tokens(client) == 0
        assert "leak detected" not in server.log().lower()
    tested, stock = answers
    result = workload.compare(requests, stock, tested, Client(servers[1].url).likeliest)
    assert result.differences == []
    assert result.close_calls <= 1 + count // 200
    assert result.answered >= count - sum(request.interrupted for request in requests)
    assert result.compared_tokens > 2 * count
    assert result.compared_logprobs > 5 * count
    return servers[0].prefills(since=mark), forwards(servers[0]) - before


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.release)])
def test_random_traffic(both_servers: tuple[Server, Server], count: int) -> None:
    prefills, told = assert_same_traffic(both_servers, count, seed=count)
    assert_as_due(prefills)
    assert any(prefill.multimodal for prefill in prefills)
    assert told[log.EXIT_CAPTURED] >= count / 10
    assert told[log.EXIT_SKIPPED] >= count / 20
    assert told[log.TAIL_CAPTURED] >= 1  # images, and where no bucket fits
    assert told[metrics.label(TAIL_NOT_CAPTURED)] >= 1  # input logprobs
    assert any(prefix for prefill in prefills for prefix in prefill.prefix_lens)
    assert told[log.FAILED] == 0


def test_audited_traffic(
    tiny_checkpoint: Path, off_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each prefill that is cut is compared on the server with its whole graph."""
    how: Any = {"arguments": ARGUMENTS, "env": {**GRAPHS, settings.name_of("audit"): "1"}}
    with running(tiny_checkpoint, tmp_path_factory.mktemp("audited"), switch=None, **how) as server:
        _, told = assert_same_traffic((server, off_server), 40, seed=7)
        assert told[log.EXIT_CAPTURED] >= 4
        assert told[log.EXIT_SKIPPED] >= 2
        audits = server.states()[0][metrics.ENTRY]["audits"]
        cut = sum(forwards(server)[outcome] for outcome in log.CUT)
        assert "Traceback" not in server.log_since_ready()
    assert (audits["agree"], audits["differ"]) == (cut, 0)
    assert 0 < audits["worst"] < 0.5  # of what is rounding


# -- drafts of a multi-token-prediction assistant ----------------------------------------------


@pytest.mark.release
def test_drafts(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A draft starts from the last rows of SGLang's output, of which the others are stale."""
    write_assistant(tmp_path / "assistant", E2B_TINY)
    drafting = (
        *("--speculative-algorithm", "NEXTN"),
        *("--speculative-draft-model-path", str(tmp_path / "assistant")),
        *("--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "4"),
    )
    fast: Any = {"switch": None, "arguments": (*drafting, *ARGUMENTS), "env": GRAPHS}
    stock: Any = {"switch": "0", "arguments": drafting}
    with (
        running(tiny_checkpoint, tmp_path / "on", **fast) as on,
        running(tiny_checkpoint, tmp_path / "off", **stock) as off,
    ):
        both, told = through_exits((on, off), drafts)
        # Of unfinished chunks the last row is read, too.
        assert told == {log.EXIT_CAPTURED: 12}
        assert {prefill.captures for prefill in both.prefills} == {"FULL"}
        assert both.on == both.off
        histograms = [histogram for _, histogram in both.on]
        assert any(sum(histogram[1:]) for histogram in histograms)
        assert any(histogram[0] for histogram in histograms)
        prompts = [tokens(n, seed=n) for n in (150, 20, 3, 33, 7, 61, 12, 26)]
        at_once, told = through_exits(
            (on, off),
            lambda server: server.generate(
                input_ids=prompts, sampling_params=GREEDY | {"max_new_tokens": 24}
            ),
        )
        assert told[log.EXIT_CAPTURED]
        for fast, slow in zip(at_once.on, at_once.off, strict=True):
            assert fast["output_ids"] == slow["output_ids"]
        answers, _ = through_exits(
            (on, off), lambda server: generate(server, tokens(70, seed=6), logprob_start_len=60)
        )
        assert_same_answers(answers)


def drafts(server: Server) -> list[tuple[Any, ...]]:
    """Answers to prompts one by one, and a second turn; and how many drafts were right."""
    sampling = GREEDY | {"max_new_tokens": 24}
    answers: list[tuple[Any, ...]] = []
    for length in (50, 16, 9, 300, 100):
        prompt = tokens(length, seed=length)
        for turn in (prompt, [*prompt, *tokens(20, seed=5)]):
            reply = server.generate(input_ids=turn, sampling_params=sampling)
            answers.append(
                (reply["output_ids"], reply["meta_info"]["spec_correct_drafts_histogram"])
            )
    return answers
