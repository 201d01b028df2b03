"""A real server that replays its decode steps and the tails of its prefills, beside a stock one.

The rows of a replayed layer are those that were recorded (``row_trace``): a batch of three prompts
is padded to four. Random traffic, retraction and aborts: ``test_workload``, ``test_http_features``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.platforms.interface import SRTPlatform

from ask import (
    TOLERANCE,
    Answer,
    again_and_again,
    assert_same_answers,
    beside_decoding,
    chat,
    compare,
    generate,
    picture,
    tokens,
)
from layer_rows import FIRST_CUT, assert_all_fast
from server import CHUNK, RECORDED_ROWS, Server
from sglang_gemma4_reference.checkpoint import E2B_TINY, write_checkpoint
from sglang_gemma4_yoco.loading import metrics

if not hasattr(SRTPlatform, "get_full_graph_backend_cls"):
    pytest.skip("this SGLang asks no platform for its graphs", allow_module_level=True)


@pytest.fixture
def both_servers(recorded_server: Server, off_server: Server) -> tuple[Server, Server]:
    return recorded_server, off_server


def assert_replayed(prefills: list[Any], replays: int) -> None:
    assert_all_fast(prefills, recorded=RECORDED_ROWS)
    assert sum(prefill.replays for prefill in prefills) == replays


def test_it_says_that_it_is_recorded(both_servers: tuple[Server, Server]) -> None:
    recorded, stock = both_servers
    generate(recorded, tokens(50, seed=1))
    [line] = recorded.log_lines("the tail is captured from")
    rows = ", ".join(map(str, RECORDED_ROWS))
    assert f"from layer {FIRST_CUT} on for {rows} rows in " in line
    [state] = [state[metrics.ENTRY] for state in recorded.states()]
    assert state["tail"] == f"captured for up to {RECORDED_ROWS[-1]} rows"
    assert not stock.log_lines("the tail is captured from")


@pytest.mark.parametrize("count", [1, 3, 5])
def test_prompts_together(both_servers: tuple[Server, Server], count: int) -> None:
    prompts = [tokens(20 + 3 * n, seed=60 + n) for n in range(count)]
    both = compare(both_servers, lambda server: generate(server, prompts))
    assert_all_fast(both.prefills, recorded=RECORDED_ROWS)
    assert any(prefill.replays for prefill in both.prefills) or count > RECORDED_ROWS[-1]
    assert_same_answers(both)


def test_one_prompt_again_and_again(both_servers: tuple[Server, Server]) -> None:
    both = compare(both_servers, again_and_again)
    assert_replayed(both.prefills, replays=5)
    assert_same_answers(both)


def test_image_over_a_chunk_boundary(both_servers: tuple[Server, Server]) -> None:
    text = {"type": "text", "text": "x" * (CHUNK - 20)}
    content = [text, *picture("purple", size=480)]
    both = compare(both_servers, lambda server: [chat(server, content)])
    assert_replayed(both.prefills, replays=1)
    assert_same_answers(both)


def test_prompt_beside_decoding(both_servers: tuple[Server, Server]) -> None:
    """A decode row in the same forward is one row more of its tail."""
    short, long = tokens(20, seed=64), tokens(CHUNK + 40, seed=65)
    both = compare(both_servers, lambda server: beside_decoding(server, short, long))
    assert_all_fast(both.prefills, recorded=RECORDED_ROWS)
    assert any(len(p.extend_lens) == 2 and p.replays for p in both.prefills)
    assert both.on == both.off


def test_weight_update(
    both_servers: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The recorded tail computes with the new weights."""
    other = write_checkpoint(
        tmp_path_factory.mktemp("other") / "weights", dataclasses.replace(E2B_TINY, seed=7)
    )
    first, prompt = both_servers[0].checkpoint, tokens(77, seed=66)

    def update(server: Server, weights: Path) -> None:
        body = {"model_path": str(weights), "flush_cache": True}
        assert server.post("/update_weights_from_disk", body).json()["success"]

    def ask(server: Server) -> list[Answer]:
        try:
            update(server, other)
            answers = generate(server, prompt)
        finally:
            update(server, first)
        return [*answers, *generate(server, prompt)]

    both = compare(both_servers, ask)
    assert_replayed(both.prefills, replays=2)
    assert_same_answers(both)
    assert both.on[0].logprobs != pytest.approx(both.on[1].logprobs, abs=TOLERANCE, rel=0)
