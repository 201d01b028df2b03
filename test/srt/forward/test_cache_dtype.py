"""A KV cache that rounds: its type is not that of the weights.

SGLang's Triton backend attends to a chunk's own K and V before they are rounded, except in layers
that read another layer's. So layer K-1 must attend as in stock, and the cut comes behind it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batches import BATCHES
from observe import assert_same_answers, assert_same_cache, assert_same_objects, run
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import cut
from sglang_gemma4_yoco.donor import DonorCut

FIRST_SHARED = E2B_TINY.layers - E2B_TINY.kv_shared_layers
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def rounding(tiny_checkpoint: Path) -> Engine:
    return Engine(
        tiny_checkpoint,
        device="cpu",
        dtype="float32",
        max_total_tokens=4096,
        kv_cache_dtype="bfloat16",
    )


@pytest.mark.parametrize("name", BATCHES)
def test_cut_behind_the_attention_of_the_donor(rounding: Engine, name: str) -> None:
    scheduled = rounding.schedule(BATCHES[name])
    stock, fast = run(rounding, scheduled, "0"), run(rounding, scheduled, "1")
    assert stock.kv[0][0].element_size() == 2
    assert cut.donor_cut(rounding.text_model) is DonorCut.AFTER_ATTENTION
    total, kept = fast.rows[0], fast.rows[-1]
    assert kept < total == sum(len(prompt.new) for prompt in BATCHES[name])
    shared = E2B_TINY.layers - FIRST_SHARED
    assert fast.attention_rows == [total] * FIRST_SHARED + [kept] * shared
    assert fast.rows == [total] * (FIRST_SHARED - 1) + [kept] * (shared + 1)
    assert_same_objects(fast)
    assert_same_cache(stock, fast)
    assert_same_answers(stock, fast, TOLERANCE)


def test_the_reason_is_told(
    rounding: Engine, forgotten_reports: None, caplog: pytest.LogCaptureFixture
) -> None:
    rounding.text_model.__dict__.pop("_yoco_donor_cut", None)
    with caplog.at_level("INFO", "sglang_gemma4_yoco"):
        run(rounding, rounding.schedule(BATCHES["one prompt"]), "1")
    [told] = [message for message in caplog.messages if "because" in message]
    assert "behind its attention" in told
    assert told.endswith("because the KV cache holds torch.bfloat16")
