"""A real server that replays its decode steps and the tails of its prefills, beside a stock one.

The rows of a replayed layer are those that were captured (``row_trace``): a batch of three prompts
is padded to four. Random traffic, retraction and aborts: ``test_workload``, ``test_http_features``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.ask import (
    assert_alike,
    assert_new_weights,
    beside_decoding,
    generate,
    tokens,
)
from harness.documented import sample
from harness.server import CAPTURED_ROWS as ROWS
from harness.server import CHUNK, Pair, Server
from sglang_gemma4_yoco import counters, metrics
from sglang_gemma4_yoco.core import eligibility


@pytest.fixture
def both_servers(captured_server: Server, off_server: Server) -> Pair:
    return captured_server, off_server


def general(line: str) -> str:
    """Return a line without the parts that differ between models and machines."""
    return re.sub(r"\w+Backend", "...Backend", re.sub(r"\d+", "#", line))


def keys_and_types(state: dict[str, Any]) -> dict[str, Any]:
    """Return the keys and types of an entry in /server_info, without the counted outcomes."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        found[name] = type(value)
        if name in ("check", "audits"):
            found[name] = {key: type(part) for key, part in value.items()}
    return found


def test_the_sample_in_the_documents(captured_server: Server) -> None:
    """A server's entry has the sample's keys and types."""
    generate(captured_server, tokens(50, seed=2))
    [state] = captured_server.reports()
    [shown] = json.loads(sample("status").rpartition("\n")[0])
    assert keys_and_types(state) == keys_and_types(shown)
    for name in ("cut", "tail"):
        assert general(state[name]) == general(shown[name])
    counted = {*counters.CUT, metrics.make_label(eligibility.NOTHING_TO_SKIP)}
    assert shown["forwards"].keys() <= counted


def test_prompt_beside_decoding(both_servers: Pair) -> None:
    """A decode row in the same forward is one row more of its tail."""
    short, long = tokens(20, seed=64), tokens(CHUNK + 40, seed=65)
    both = assert_alike(
        both_servers, lambda server: beside_decoding(server, short, long), captured=ROWS
    )
    assert any(len(p.extend_lens) == 2 and p.replays for p in both.prefills)


def test_weight_update(both_servers: Pair, tmp_path: Path) -> None:
    """The captured tail computes with the new weights."""
    both = assert_new_weights(both_servers, tmp_path, captured=ROWS)
    assert sum(prefill.replays for prefill in both.prefills) == 3
