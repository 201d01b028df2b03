"""A server with default settings: the measured rule decides which prefills pay.

All other servers of the tests skip whatever they can. The stock server has no rule, so all are
compared with the same one. ``test_workload`` sends this server requests of all kinds at once.
"""

from __future__ import annotations

import pytest

from harness.ask import assert_alike, generate, one_by_one, tokens
from harness.layer_rows import assert_all_stock, cut, whole
from harness.server import Pair, Server
from sglang_gemma4_yoco.core import eligibility


@pytest.fixture
def both_servers(default_server: Server, off_server: Server) -> Pair:
    return default_server, off_server


@pytest.mark.parametrize(("length", "rows"), [(3, whole(3)), (4, cut(4, 1))])
def test_prompt(both_servers: Pair, length: int, rows: list[int]) -> None:
    """At least three rows must be skipped: prompts of up to three tokens run as stock."""
    assert_alike(both_servers, one_by_one(tokens(length, seed=length)), rows=[rows])


def test_what_means_nothing_to_an_operator_is_not_said(default_server: Server) -> None:
    """After "is active" such a line would read like a fallback."""
    mark = default_server.mark()
    for length in (1, 2):
        generate(default_server, tokens(length, seed=70))
    assert_all_stock(default_server.prefills(since=mark))
    assert default_server.log_lines(eligibility.TOO_LITTLE.text) == []
    assert default_server.log_lines(eligibility.NOTHING_TO_SKIP.text) == []
