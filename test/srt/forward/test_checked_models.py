"""Self-check, graph comparisons and audits on three models: all defects, no false alarms.

``scripts/bench/bench_checks.py`` runs hundreds of models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.batches import batch_of
from harness.breakages import BREAKAGES
from harness.checked_models import traffic
from harness.checking import (
    NEW,
    REQUESTS,
    assert_keys_have_their_scale,
    audited,
    checked,
    counted,
    counts,
    result_of_check,
)
from harness.decode_graphs import recorded_decode_steps
from harness.fixtures import Checkpoints
from harness.forwards import ENGINE, assert_untouched, norms_that_add_in_place, state_of, times
from harness.observe import assert_same_cache, run
from harness.rounding import perturb
from sglang_gemma4_reference.checkpoint import (
    E2B_TINY,
    E2B_TINY_SHARP,
)
from sglang_gemma4_reference.engine import Engine, reset_log, switched
from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.captured.graphs import TailGraphs
from sglang_gemma4_yoco.checking import rounding, tail_graphs
from sglang_gemma4_yoco.checking import self_check as check
from sglang_gemma4_yoco.compat.layers import get_rows
from sglang_gemma4_yoco.core import cut

pytestmark = pytest.mark.usefixtures("forgotten_reports")

MODELS = {
    "mild, fp32": E2B_TINY,
    "sharp, bf16": E2B_TINY_SHARP,
    "sharp, bf16, donor with a window": dataclasses.replace(
        E2B_TINY_SHARP, kv_shared_layers=3, sliding_per_full=1
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def captured(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Engine]:
    """Yield the engine with its tail captured."""
    shape = MODELS[request.param]
    engine = Engine(
        checkpoints(shape), **(ENGINE | {"dtype": shape.dtype}), cuda_graph_bs_decode=[1, 2, 4]
    )
    with recorded_decode_steps(engine):
        yield engine


ENOUGH = 4  # every breakage's error exceeds this multiple of its bound


def tail_of(engine: Engine) -> TailGraphs:
    tail = state_of(engine).captured
    assert isinstance(tail, TailGraphs)
    return tail


def test_what_is_right_agrees(captured: Engine) -> None:
    found = result_of_check(state_of(captured))
    assert found["largest_difference"] < 0.5 * found["allowed"]
    assert tail_of(captured).sizes
    assert state_of(captured).off_because is None


def inapplicable_breakages(engine: Engine) -> set[str]:
    """Return the breakages that do not apply: of the donor's window, if it has none."""
    donor = state_of(engine).tail_layers[0].self_attn.attn
    if compat.attention.count_keys_in_window(donor) > 0:
        return set()
    return {way for way in BREAKAGES if "the donor's window" in way}


def test_what_is_broken_is_found(captured: Engine) -> None:
    state, missed, applied = state_of(captured), [], set()
    with check.run_both_paths(captured.runner, state) as both:
        for way, breakage in BREAKAGES.items():
            with breakage(state) as applies:
                if applies:
                    applied.add(way)
                    worst = rounding.find_worst(both.findings())
                    missed += [(way, str(worst))] if worst.excess <= ENOUGH else []
        assert missed == []
        assert BREAKAGES.keys() - applied == inapplicable_breakages(captured)
        assert rounding.find_worst(both.findings()).is_rounding


def test_keys_have_their_scale(captured: Engine) -> None:
    assert_keys_have_their_scale(captured)


def test_a_captured_tail_is_replayed(captured: Engine) -> None:
    """It is replayed once on stock's rows, and once as in service; a replay runs no Python."""
    assert tail_of(captured).sizes[-1] >= REQUESTS
    with counted(captured) as forwards:
        assert checked(captured).agrees
    suffix, total = NEW[0] - 2 + 1 + NEW[2], sum(NEW)
    # Beside the first replay its layers run eagerly on as many rows as the graph has.
    expected = [total, REQUESTS, suffix, 0, REQUESTS + 1, 0]
    assert [f[-1] for f in forwards] == expected


def test_a_right_graph_is_not_dropped(captured: Engine) -> None:
    """A right graph stays, full and with the most padding there can be."""
    tail = tail_of(captured)
    rows = tail.sizes
    assert rows == (1, 2, 4, 8, 16, 32)
    found = [one for size in rows for one in tail_graphs.compare_graph(tail, captured.runner, size)]
    assert len(found) == 2 * len(rows) - 2  # of one row and of two there is no padding
    assert [one.excess for one in found if one.excess > 0.5] == []
    tail_graphs.check_graphs(tail, captured.runner)
    assert tail.sizes == rows


# ---------------------------------------------------------------- audits


WINDOW = E2B_TINY.sliding_window
BATCHES = {
    "replayed": batch_of((WINDOW + 9, 7), (2 * WINDOW, 3), (0, 5)),
    "eager": [*batch_of((WINDOW + 9, 7), (0, 5)), *batch_of((WINDOW, 9), logprob_start=WINDOW)],
}


def test_audits_of_random_traffic(captured: Engine) -> None:
    """There is no false alarm, however the tail runs, and also if norms add in place."""
    draws = random.Random(0)
    with audited(captured), switched("1"):
        for number in range(16):
            with norms_that_add_in_place(captured) if number % 2 else contextlib.nullcontext():
                batch = captured.schedule(traffic(draws))
                captured.forward(batch, intermediate=number % 6 == 5)
    assert counts() == (16, 0)
    assert counters.served.worst_audit < 0.5
    assert times(counters.TAIL_CAPTURED) > 0
    assert times(counters.TAIL_EAGER) > 0
    assert_untouched(captured)


def test_rows_that_round_differently(captured: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU kernels for few rows round like this. SGLang computes logits from these rows in fp32."""
    stock, draw = cut.run_prefill, torch.Generator().manual_seed(0)

    def prefill(state: Any, plan: Any, *args: Any) -> Any:
        output = stock(state, plan, *args)
        rows = get_rows(output)
        kept = rows.index_select(0, plan.kept_batch.index)
        rows.index_copy_(0, plan.kept_batch.index, perturb(kept, draw))
        return output

    monkeypatch.setattr(cut, "run_prefill", prefill)
    with audited(captured), switched("1"):
        for batch in BATCHES.values():
            scheduled = captured.schedule(batch)
            captured.forward(scheduled)
            # The perturbation hides no defects either.
            with BREAKAGES["scattered one row off"](state_of(captured)):
                captured.forward(scheduled)
    assert counts() == (2, 2)


CHUNK = "an intermediate chunk"


def _shows(way: str, batch: str) -> bool:
    """Return True if a forward of such a batch runs the broken code."""
    if batch == CHUNK:
        return way.startswith(("keys", "values", "chunks"))
    of_chunks = way.startswith("chunks")
    return not of_chunks and (batch == "replayed" or not way.startswith("a stale"))


@pytest.mark.parametrize("batch", [*BATCHES, CHUNK])
def test_an_audit_finds_what_is_broken(captured: Engine, batch: str) -> None:
    """The audit finds it in the served batch, and the client gets stock's answer."""
    scheduled = captured.schedule(BATCHES["replayed" if batch == CHUNK else batch])
    stock, state = run(captured, scheduled, "0"), state_of(captured)
    for way in (way for way in BREAKAGES if _shows(way, batch)):
        reset_log()
        with audited(captured), switched("1"), BREAKAGES[way](state) as applies:
            if not applies:
                assert way in inapplicable_breakages(captured)
                continue
            output = captured.forward(scheduled, intermediate=batch == CHUNK)
        assert counts() == (0, 1), way
        assert counters.served.worst_audit > ENOUGH, way
        if batch != CHUNK:
            assert torch.equal(output.next_token_logits, stock.output.next_token_logits), way
        assert_same_cache(stock, dataclasses.replace(stock, kv=captured.kv()))
