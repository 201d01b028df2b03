"""The batch as the tail sees it: what is rewritten, and that the same objects come back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from sglang_gemma4_yoco.core.kept import TailBatch, rewritten
from stand_ins import tail_of


def batch(**changes: Any) -> SimpleNamespace:
    """n = [3, 4, 2] new tokens after p = [0, 10, 0] cached ones."""
    fields: dict[str, Any] = {
        "forward_mode": ForwardMode.EXTEND,
        "input_ids": torch.arange(100, 109),
        "positions": torch.tensor([0, 1, 2, 10, 11, 12, 13, 0, 1]),
        "seq_lens": torch.tensor([3, 14, 2]),
        "out_cache_loc": torch.arange(50, 59),
        "kv_loc_cols": None,
        "extend_seq_lens": torch.tensor([3, 4, 2], dtype=torch.int32),
        "extend_prefix_lens": torch.tensor([0, 10, 0], dtype=torch.int32),
        "extend_start_loc": torch.tensor([0, 3, 7], dtype=torch.int32),
        "extend_seq_lens_cpu": [3, 4, 2],
        "extend_prefix_lens_cpu": [0, 10, 0],
        "extend_num_tokens": 9,
        "extend_logprob_start_lens_cpu": None,
        "return_logprob": False,
        "residual_stream": None,
        "capture_hidden_mode": CaptureHiddenMode.NULL,
        "contains_last_prefill_chunk": True,
    }
    return SimpleNamespace(**(fields | changes))


def seen_within(forward_batch: SimpleNamespace, tail: Tail) -> dict[str, Any]:
    before = dict(vars(forward_batch))
    with rewritten(forward_batch, tail.fields_at(forward_batch.positions[tail.index])):
        within = dict(vars(forward_batch))
    assert all(vars(forward_batch)[name] is value for name, value in before.items())
    assert vars(forward_batch).keys() == before.keys()
    return within


def test_one_row_each_is_a_decode_step() -> None:
    forward_batch = batch()
    tail = tail_of(forward_batch)
    within = seen_within(forward_batch, tail)
    assert tail.index.tolist() == [2, 6, 8]
    assert within["forward_mode"] is ForwardMode.DECODE
    assert within["extend_seq_lens"].tolist() == [1, 1, 1]
    assert within["extend_prefix_lens"].tolist() == [2, 13, 1]
    assert within["extend_start_loc"].tolist() == [0, 1, 2]
    assert within["extend_seq_lens_cpu"] == [1, 1, 1]
    assert within["extend_prefix_lens_cpu"] == [2, 13, 1]
    assert within["extend_num_tokens"] == 3
    assert within["input_ids"].tolist() == [102, 106, 108]
    assert within["positions"].tolist() == [2, 13, 1]
    # Layer K-1 writes K and V of all rows.
    assert within["out_cache_loc"] is forward_batch.out_cache_loc
    for name in ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc"):
        assert within[name].dtype == getattr(forward_batch, name).dtype


def test_suffixes_are_an_extend_batch_pruned_together() -> None:
    forward_batch = batch(return_logprob=True, extend_logprob_start_lens_cpu=[1, 4, 2])
    tail = tail_of(forward_batch)
    within = seen_within(forward_batch, tail)
    assert tail.index.tolist() == [1, 2, 6, 8]
    assert within["forward_mode"] is ForwardMode.EXTEND
    assert within["extend_seq_lens"].tolist() == [2, 1, 1]
    assert within["extend_seq_lens_cpu"] == [2, 1, 1]
    assert within["extend_prefix_lens"].tolist() == [1, 13, 1]
    assert within["extend_prefix_lens_cpu"] == [1, 13, 1]
    assert within["extend_start_loc"].tolist() == [0, 2, 3]
    assert within["extend_num_tokens"] == 4
    assert within["out_cache_loc"].tolist() == [51, 52, 56, 58]
    assert within["kv_loc_cols"].tolist() == [1, 2, 6, 8]
    assert within["input_ids"].tolist() == [101, 102, 106, 108]


def test_restored_after_an_exception() -> None:
    forward_batch = batch()
    before = dict(vars(forward_batch))
    with (
        pytest.raises(RuntimeError, match="inside"),
        rewritten(forward_batch, tail_of(forward_batch).fields),
    ):
        forward_batch.residual_stream = object()
        raise RuntimeError("inside")
    assert all(vars(forward_batch)[name] is value for name, value in before.items())


@pytest.mark.parametrize(
    ("changes", "unread"),
    [
        ({}, False),
        ({"contains_last_prefill_chunk": False}, True),
        # A decoding request in a mixed batch has one new token, and its row is read.
        (
            {
                "contains_last_prefill_chunk": False,
                "extend_seq_lens_cpu": [3, 5, 1],
                "extend_seq_lens": torch.tensor([3, 5, 1], dtype=torch.int32),
            },
            False,
        ),
        (
            {"contains_last_prefill_chunk": False, "capture_hidden_mode": CaptureHiddenMode.LAST},
            False,
        ),
        (
            {
                "contains_last_prefill_chunk": False,
                "return_logprob": True,
                "extend_logprob_start_lens_cpu": [3, 3, 2],
            },
            False,
        ),
        (
            {
                "contains_last_prefill_chunk": False,
                "return_logprob": True,
                "extend_logprob_start_lens_cpu": [3, 4, 2],
            },
            True,
        ),
    ],
    ids=["finished", "unfinished", "mixed", "captured", "last row's logprob", "no logprob"],
)
def test_unread_batches(changes: dict[str, Any], unread: bool) -> None:
    assert tail_of(batch(**changes)).unread is unread
