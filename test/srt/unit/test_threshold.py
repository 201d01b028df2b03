"""When the fast path pays: the rule, and the setting that replaces it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_gemma4_yoco.core import gate
from sglang_gemma4_yoco.core.kept import KeptRows
from sglang_gemma4_yoco.deciding import threshold
from sglang_gemma4_yoco.deciding.threshold import TailCost
from stand_ins import eligible_batch, model, reason_of

pytestmark = pytest.mark.usefixtures("outside_of_a_server")


@pytest.mark.parametrize(
    ("total", "kept", "expected"),
    [
        (4, 1, True),
        (3, 1, False),
        (4, 2, False),
        (16, 14, False),
        (16, 12, True),
        (48, 45, True),  # three rows are a sixteenth of 48
        (49, 46, False),
        (2048, 1, True),
        (2048, 2000, False),
        (2048, 1920, True),
        (128, 0, True),  # nobody reads the chunk
    ],
)
def test_the_rule(total: int, kept: int, expected: bool) -> None:
    assert threshold.pays(total, kept) is expected


@pytest.mark.parametrize(
    ("cost", "total", "kept", "expected"),
    [
        (TailCost.NOTHING, 2, 1, True),
        (TailCost.NOTHING, 33, 32, True),
        (TailCost.NOTHING, 8, 8, False),
        (TailCost.PLANNED, 128, 1, False),
        (TailCost.PLANNED, 129, 1, True),
        (TailCost.PLANNED, 20000, 19872, True),  # no sixteenth is asked for
        (TailCost.LAUNCHES, 1024, 1, False),
        (TailCost.LAUNCHES, 1025, 1, True),
        (TailCost.LAUNCHES, 20000, 18751, False),  # less than a sixteenth
    ],
)
def test_the_rule_knows_how_the_tail_runs(
    cost: TailCost, total: int, kept: int, expected: bool
) -> None:
    assert threshold.pays(total, kept, cost=cost) is expected
    assert threshold.pays(total, kept, minimum=total - kept, cost=cost)
    assert not threshold.pays(total, kept, minimum=total - kept + 1, cost=cost)


@given(total=st.integers(1, 10**6), skipped=st.integers(0, 10**6), more=st.integers(0, 100))
def test_what_pays_still_pays_with_more_rows_skipped(total: int, skipped: int, more: int) -> None:
    kept = max(total - skipped, 0)
    if threshold.pays(total, kept):
        assert threshold.pays(total, max(kept - more, 0))


def test_minimum_replaces_the_rule() -> None:
    assert threshold.pays(2048, 2047, minimum=1)
    assert not threshold.pays(2048, 1, minimum=2048)
    assert threshold.pays(2048, 0, minimum=2048)


def suffix(kept: int, **changes: Any) -> ForwardBatch:
    """One prompt of 49 rows of which the last ``kept`` are read."""
    return eligible_batch(
        batch_size=1,
        input_ids=torch.arange(49),
        seq_lens=torch.tensor([49]),
        seq_lens_sum=49,
        extend_num_tokens=49,
        extend_seq_lens_cpu=[49],
        extend_prefix_lens_cpu=[0],
        return_logprob=True,
        extend_logprob_start_lens_cpu=[49 - kept],
        **changes,
    )


@pytest.mark.parametrize(
    ("value", "kept", "reason"),
    [
        (None, 45, None),
        (None, 46, gate.TOO_LITTLE),
        (1, 48, None),
        (10, 39, None),
        (10, 40, gate.TOO_LITTLE),
    ],
)
def test_the_gate_follows_rule_and_setting(
    setting: Callable[..., None], value: int | None, kept: int, reason: str | None
) -> None:
    setting(min_skipped_rows=value)
    assert reason_of(model(), suffix(kept)) == reason


def test_an_unread_chunk_skips_all_its_rows(setting: Callable[..., None]) -> None:
    setting(min_skipped_rows=9)
    assert reason_of(model(), eligible_batch()) == gate.TOO_LITTLE
    unread = eligible_batch(contains_last_prefill_chunk=False)
    assert reason_of(model(), unread) is None


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("replaying", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_what_a_tail_costs(on_gpu: bool, replaying: bool, recorded: bool) -> None:
    """Planning it takes time where SGLang replays the front on a GPU, and nowhere else."""
    kept = KeptRows.suffixes([49], [0], None)
    known: Any = SimpleNamespace(
        on_gpu=on_gpu,
        replaying=eligible_batch() if replaying else None,
        graphs=SimpleNamespace(size_for=lambda _: 1) if recorded else None,
    )
    launched = TailCost.LAUNCHES if on_gpu else TailCost.ARITHMETIC
    replayed = TailCost.PLANNED if on_gpu and replaying else TailCost.NOTHING
    assert gate.tail_cost(known, kept, read=1) is (replayed if recorded else launched)
    assert gate.tail_cost(known, kept, read=0) is TailCost.NOTHING
