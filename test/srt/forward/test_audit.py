"""Audits of prefills: what they compare, and which answer the client gets."""

from __future__ import annotations

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend

from harness.batches import BATCHES, batch_of
from harness.checking import assert_audited, audited, counts
from harness.fixtures import Change, Said
from harness.forwards import (
    TWO_PROMPTS,
    InjectedError,
    assert_stock,
    outcomes,
    state_of,
)
from harness.layer_rows import FIRST_CUT
from harness.observe import run
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_yoco import compat, counters, log, metrics
from sglang_gemma4_yoco.checking import audit
from sglang_gemma4_yoco.core.forward import EagerForward
from sglang_gemma4_yoco.models import gemma4

pytestmark = pytest.mark.usefixtures("forgotten_reports")


@pytest.mark.parametrize("name", BATCHES)
def test_what_is_right_agrees(engine: Engine, name: str) -> None:
    assert_audited(engine, BATCHES[name], FIRST_CUT)
    assert 0 < counters.served.worst_audit < 0.5  # half of the tolerance


def test_the_first_of_each_outcome_is_audited_and_then_one_of_n(engine: Engine) -> None:
    """Of the same two chunks, both are audited the first time, and then none of a billion."""
    prompts = batch_of((0, 40), to_come=tuple(range(50, 71)))
    with audited(engine, every=10**9):
        for times in (1, 2):
            batch = engine.schedule(prompts)
            run(engine, batch, "1")
            run(engine, engine.next_chunk(batch, prompts), "1")
            assert outcomes() == {counters.TAIL_SKIPPED: times, counters.TAIL_EAGER: times}
    assert counts() == (2, 0)


@pytest.mark.parametrize("every", [1, 3, 30])
def test_one_of_n_of_any_rhythm(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Of prompts of three chunks each chunk is audited, and a rare outcome the first time."""
    state: Any = SimpleNamespace(counters=counters.Counters(logs=False))
    plan: Any = SimpleNamespace()
    audits = Counter[str]()

    def note(*_: object) -> None:
        audits[plan.name] += 1

    monkeypatch.setattr(audit.Auditor, "_audit", note)
    auditor: Any = audit.Auditor(state, every, Random(0))
    for plan.name in ["first", "second", "last"] * 3000 + ["rare"]:
        plan.outcome = "active_intermediate_chunk"
        if plan.name in ("last", "rare"):
            plan.outcome = plan.name
        auditor(None, plan, None)
        state.counters.count_cut(str, plan.outcome, computed=1, skipped=1)
    assert audits.pop("rare") == 1
    # Six standard deviations of 3,000 draws.
    spread = 6 * (3000 * (1 / every) * (1 - 1 / every)) ** 0.5
    assert len(audits) == 3
    for count in audits.values():
        assert abs(count - 3000 / every) <= spread + 1


# ---------------------------------------------------------------- differences


def _another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrupt the tail's first row: with input log-probabilities, not a request's last one.

    K and V stay correct.
    """
    stock = gemma4.run_tail

    def run_tail(*args: Any) -> torch.Tensor:
        rows = stock(*args)
        rows[0] *= 1.1
        return rows

    monkeypatch.setattr(gemma4, "run_tail", run_tail)


def test_a_defect_that_an_audit_finds_is_answered_by_stock(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = BATCHES["input logprobs"]
    scheduled = engine.schedule(prompts)
    stock = run(engine, scheduled, "0")
    cache = engine.kv()
    _another_row(monkeypatch)
    with audited(engine), caplog.at_level("ERROR", log.logger.name):
        seen = run(engine, scheduled, "1")
    assert counts() == (0, 1)
    assert counters.served.worst_audit > 1e-3
    assert torch.equal(seen.output.next_token_logits, stock.output.next_token_logits)
    assert torch.equal(seen.output.input_token_logprobs, stock.output.input_token_logprobs)
    for now, then in zip(engine.kv(), cache, strict=True):
        assert all(map(torch.equal, now, then))
    [record] = caplog.records
    line = record.getMessage()
    lengths = [len(prompt.new) for prompt in prompts]
    assert f"new tokens {lengths}, cached {[len(p.cached) for p in prompts]}" in line
    assert line.endswith(f", {counters.TAIL_EAGER}")
    assert state_of(engine).off_because is None


def test_lines_end_and_counts_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert audit._MOST_LINES == 16, "docs/log.md has this number"
    monkeypatch.setattr(audit, "_MOST_LINES", 2)
    _another_row(monkeypatch)
    with audited(engine), caplog.at_level("ERROR", log.logger.name):
        for length in range(5, 9):
            run(engine, engine.schedule(batch_of((0, length))), "1")
    assert counts() == (0, 4)
    assert len(caplog.records) == 2


def test_the_path_is_turned_off_where_that_is_asked_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with audited(engine, strict=True) as state:
        run(engine, engine.schedule(TWO_PROMPTS), "1")
        assert state.off_because is None
        with monkeypatch.context() as broken, caplog.at_level("ERROR", log.logger.name):
            _another_row(broken)
            run(engine, engine.schedule(TWO_PROMPTS), "1")
        assert state.off_because == audit.DIFFERED
        off = f"falls back to stock for this server: {audit.DIFFERED}"
        assert off in caplog.records[-1].getMessage()
        assert_stock(engine, audit.DIFFERED)
        found = metrics.describe_state()["audits"]
        assert found.pop("worst") > 1
        assert found == {"agrees": 1, "differs": 1}


# ---------------------------------------------------------------- failures


def test_an_audit_that_fails_gives_rows_of_its_own(engine: Engine) -> None:
    """The stock forward may reuse the memory of the fast one's output."""
    scheduled = engine.schedule(TWO_PROMPTS)
    with audited(engine) as state, switched("1"), pytest.MonkeyPatch.context() as patched:
        audit_it = state.after_cut
        assert audit_it is not None

        def overwriting(forward: Any, plan: Any, output: torch.Tensor) -> Any:
            def again(_: Any) -> Any:
                output.fill_(torch.nan)
                raise InjectedError("in the stock forward")

            patched.setattr(EagerForward, "stock", again)
            return audit_it(forward, plan, output)

        patched.setattr(state, "after_cut", overwriting)
        assert engine.forward(scheduled).next_token_logits.isfinite().all()
        assert state.after_cut is None


# ---------------------------------------------------------------- settings and figures


def test_no_audits_where_tables_are_rewritten_meanwhile(
    engine: Engine, setting: Change, said: Said
) -> None:
    """An audit plans attention again within the forward; SGLang may write to its tables then."""
    setting(audit=1)
    early = TRTLLMHAAttnBackend.__new__(TRTLLMHAAttnBackend)
    hybrid = HybridAttnBackend.__new__(HybridAttnBackend)
    hybrid.prefill_backend, hybrid.decode_backend = early, engine.runner.attn_backend
    state = state_of(engine)
    for backend in (early, hybrid):
        with mock.patch.object(engine.runner, "attn_backend", backend):
            assert audit.make_auditor(engine.runner, state) is None
            with getattr(envs, compat.server.BARRIER_VARIABLE).override(True):
                assert audit.make_auditor(engine.runner, state) is not None
    why = f"{audit.TABLES}; {compat.server.BARRIER_VARIABLE}=1 prevents that"
    assert said() == [f"YOCO fast prefill is not audited: {why}"]
    assert audit.make_auditor(engine.runner, state) is not None
