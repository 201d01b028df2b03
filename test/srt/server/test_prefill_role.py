"""The prefill role of prefill-decode disaggregation, by the scheduler's own event loop.

Off and on the same is answered and the same bytes of K and V are sent; a chunk that finishes no
prompt skips the tail. No peer takes part, so nothing needs to be installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from sglang_gemma4_reference import roles

if version("sglang") != roles.SGLANG:
    pytest.skip(f"the role runs on a CPU with SGLang {roles.SGLANG}", allow_module_level=True)

from prefill_role import CHUNK, PrefillRole, Request, Served
from sglang.srt.managers.schedule_batch import FINISH_LENGTH

from ask import TOLERANCE, tokens
from layer_rows import assert_all_fast, assert_all_stock, cut
from sglang_gemma4_yoco import log


@pytest.fixture(scope="module")
def role(tiny_checkpoint: Path) -> PrefillRole:
    return PrefillRole(tiny_checkpoint)


def requests(*lengths: int) -> list[Request]:
    """Requests for a first token."""
    return [Request(f"{n} tokens", tokens(n, seed=n)) for n in lengths]


def compare(role: PrefillRole, asked: list[Request], retried: Sequence[str] = ()) -> Served:
    """Serve off and on, see that both do the same, and return the latter."""
    off, on = (role.serve(switch, asked, retried) for switch in "01")
    assert_all_stock(off.prefills)
    assert_all_fast(on.prefills)
    assert [p.extend_lens for p in on.prefills] == [p.extend_lens for p in off.prefills]
    assert sum(on.outcomes.values()) == len(on.prefills)
    for request in asked:
        stock, fast = off.finished[request.name], on.finished[request.name]
        assert type(stock.finished_reason) is type(fast.finished_reason) is FINISH_LENGTH
        assert len(fast.output_ids) == 1
        assert fast.output_ids == stock.output_ids
        for kind in ("output_token_logprobs_val", "input_token_logprobs_val"):
            assert logprobs(fast, kind) == pytest.approx(logprobs(stock, kind), abs=TOLERANCE)
        wanted = len(request.prompt) - request.logprob_start if request.logprob_start >= 0 else 1
        assert len(logprobs(fast, "input_token_logprobs_val")) == wanted - 1
        assert on.sent[request.name] == off.sent[request.name]
    return on


def logprobs(request: Any, kind: str) -> list[float]:
    """Those of a kind that SGLang answers; a prompt's first token of those wanted has none."""
    return [value for value in getattr(request.logprob, kind) or () if value is not None]


def test_requests_of_several_lengths(role: PrefillRole) -> None:
    asked = requests(200, 30, 70, 5, 2 * CHUNK)
    on = compare(role, asked)
    assert on.outcomes.keys() == {log.TAIL_EAGER, log.TAIL_SKIPPED}
    assert cut(CHUNK, 0) in [prefill.rows for prefill in on.prefills]
    # Chunk by chunk, and all of it in the end.
    assert len(on.sent["200 tokens"]) == 4


def test_input_logprobs(role: PrefillRole) -> None:
    """The rows that they are of are kept, in a prompt's last chunk and in the one before."""
    long, short = tokens(CHUNK + 40, seed=1), tokens(50, seed=2)
    asked = [Request("long", long, logprob_start=CHUNK - 3), Request("short", short, 45)]
    on = compare(role, asked)
    assert on.prefills[0].rows == cut(CHUNK, 3)
    assert on.outcomes.keys() == {log.TAIL_EAGER}


def test_a_peer_that_is_late(role: PrefillRole) -> None:
    """What its request has computed is put away, its first token too; the next attempt counts."""
    name = "150 tokens"
    on = compare(role, requests(150), retried=[name])
    assert on.finished[name].retraction_count == 1
    assert on.prefills[2].rows == on.prefills[-1].rows == cut(22, 1)
    assert len(on.prefills) > 3


def test_a_late_peer_lets_others_pass(role: PrefillRole) -> None:
    """Its request stops behind an unfinished chunk, and begins again after the others."""
    name = "200 tokens"
    on = compare(role, requests(200, 30, 70), retried=[name])
    assert on.finished[name].retraction_count == 1
    assert on.prefills[0].rows == cut(CHUNK, 0)
    # That chunk is computed once more.
    assert sum(sum(p.extend_lens) for p in on.prefills) == CHUNK + 200 + 30 + 70
