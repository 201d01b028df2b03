"""Servers of several model processes: tensor-parallel ranks, and replicas.

Each answers the same requests as the stock server that has one process. That the path was active is
proven on every process, by the rows that each of its layers computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.ask import (
    Answer,
    Compared,
    assert_ranks_alike,
    assert_same_answers,
    at_once,
    by_process,
    generate,
    one_by_one,
    prompts_of,
    tokens,
)
from harness.ask import compare as compare_servers
from harness.layer_rows import assert_all_fast, without_audit
from harness.server import CHUNK, Pair, Server, running
from sglang_gemma4_reference.checkpoint import E2B_TINY


@pytest.fixture
def both_servers(ranks_server: Server, off_server: Server) -> Pair:
    return ranks_server, off_server


def compare(
    servers: Pair, ask: Callable[[Server], list[Answer]], *, close_calls: int = 0
) -> Compared[Answer]:
    """Assert equal forwards of two ranks, audits aside, and stock's answers; return both."""
    both = compare_servers(servers, ask)
    both = replace(both, prefills=[*map(without_audit, both.prefills)])
    assert_ranks_alike(both.prefills, 2)
    assert_all_fast(both.prefills)
    assert_same_answers(both, close_calls=close_calls)
    return both


def test_prompts_of_all_lengths(both_servers: Pair) -> None:
    """Prompts at the window's edge, and over several chunks: unfinished ones skip the tail."""
    window = E2B_TINY.sliding_window
    lengths = (1, 2, 50, window, window + 1, 2 * CHUNK + 44)
    compare(both_servers, one_by_one(*prompts_of(*lengths)))


def test_scheduling_overlaps(ranks_server: Server) -> None:
    assert ranks_server.resolved("disable_overlap_schedule") is False


def test_concurrent_requests(both_servers: Pair) -> None:
    """Eight clients' requests share forwards, and decode steps run between them."""
    prompts = prompts_of(3, 45, 128, 129, 300, 17, 64, 90)

    def ask(server: Server) -> list[Answer]:
        return at_once(lambda prompt: generate(server, prompt)[0], prompts)

    compare(both_servers, ask, close_calls=1)


@pytest.mark.release
def test_replicas(tiny_checkpoint: Path, tmp_path: Path, off_server: Server) -> None:
    """Each has a prefix cache of its own, and gets every prompt here."""
    prefix = tokens(150, seed=2)
    prompts = [prefix, prefix + tokens(40, seed=3), tokens(2 * CHUNK + 44, seed=4)]
    arguments = ("--dp-size", "2", "--load-balance-method", "round_robin")
    with running(tiny_checkpoint, tmp_path, switch=None, arguments=arguments) as server:

        def ask(asked: Server) -> list[Answer]:
            answers = []
            for replica in range(2):
                route = {}
                if asked is server:
                    route["routed_dp_rank"] = replica
                else:
                    asked.forget_prefixes()
                answers += one_by_one(*prompts, **route)(asked)
            return answers

        both = compare_servers((server, off_server), ask)
        assert len(server.log_lines("YOCO fast prefill is active")) == 2
    assert_same_answers(both)
    for mine in by_process(both.prefills):
        assert_all_fast(mine)
        assert mine[2].prefix_lens == [150]
    assert_ranks_alike(both.prefills, 2)
