"""Kept rows, against the definition written out; and the batch as the tail sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from sglang_gemma4_yoco.core import gate
from sglang_gemma4_yoco.core.kept import KeptRows, TailBatch, rewritten
from stand_ins import eligible_batch, tail_of

REQUESTS = st.lists(
    st.tuples(st.integers(1, 50), st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=8
)


@given(REQUESTS)
def test_kept_rows_are_the_suffix_of_every_request(batch: list[tuple[int, int, int]]) -> None:
    lens, prefixes, starts = (list(column) for column in zip(*batch, strict=True))
    kept = KeptRows.suffixes(lens, prefixes, starts)
    offset, expected = 0, []
    for n, start in zip(lens, starts, strict=True):
        # A row is read when a logprob is wanted from it, and the last row always is.
        expected += [offset + row for row in range(n) if row >= start or row == n - 1]
        offset += n
    assert kept.indices == expected
    assert (kept.count, kept.total) == (len(expected), offset)
    assert kept.one_per_request == (kept.lens == [1] * len(lens))
    for n, p, m, q in zip(lens, prefixes, kept.lens, kept.prefix_lens, strict=True):
        assert q + m == p + n  # the total length stays
    assert kept.start_loc == [sum(kept.lens[:i]) for i in range(len(lens))]
    assert KeptRows.suffixes(lens, prefixes) == KeptRows.suffixes(lens, prefixes, lens)


def seen_within(forward_batch: Any, tail: TailBatch) -> dict[str, Any]:
    before = dict(vars(forward_batch))
    positions = forward_batch.positions[tail.index]
    with rewritten(forward_batch, {**tail.fields, "positions": positions}):
        within = {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in vars(forward_batch).items()
        }
        for name in ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc"):
            assert getattr(forward_batch, name).dtype == before[name].dtype
    assert vars(forward_batch).keys() == before.keys()
    assert all(vars(forward_batch)[name] is value for name, value in before.items())
    return within


def tokens() -> dict[str, torch.Tensor]:
    """Of the three prompts of 3, 4 and 2 new tokens after 0, 10 and 0: what differs by row."""
    return {
        "input_ids": torch.arange(100, 109),
        "positions": torch.tensor([0, 1, 2, 10, 11, 12, 13, 0, 1]),
        "out_cache_loc": torch.arange(50, 59),
    }


def test_one_row_each_is_a_decode_step() -> None:
    forward_batch = eligible_batch(**tokens())
    tail = tail_of(forward_batch)
    assert tail.index.tolist() == [2, 6, 8]
    within = seen_within(forward_batch, tail)
    assert within["forward_mode"] is ForwardMode.DECODE
    assert within["extend_seq_lens"] == within["extend_seq_lens_cpu"] == [1, 1, 1]
    assert within["extend_prefix_lens"] == within["extend_prefix_lens_cpu"] == [2, 13, 1]
    assert within["extend_start_loc"] == [0, 1, 2]
    assert within["extend_num_tokens"] == 3
    assert within["input_ids"] == [102, 106, 108]
    assert within["positions"] == [2, 13, 1]
    assert within["out_cache_loc"] == list(range(50, 59))  # of all rows: nothing is written by it


@pytest.mark.parametrize("decodes", [True, False])
def test_suffixes_are_an_extend_batch_pruned_together(decodes: bool) -> None:
    starts = [1, 4, 2] if decodes else [3, 4, 2]  # the second keeps its last rows alone
    forward_batch = eligible_batch(
        **tokens(), return_logprob=True, extend_logprob_start_lens_cpu=starts
    )
    kept = [1, 2, 6, 8] if decodes else [2, 6, 8]
    tail = tail_of(forward_batch, decodes=decodes)
    assert tail.index.tolist() == kept
    within = seen_within(forward_batch, tail)
    lens, prefixes = ([2, 1, 1], [1, 13, 1]) if decodes else ([1, 1, 1], [2, 13, 1])
    assert within["forward_mode"] is ForwardMode.EXTEND
    assert within["extend_seq_lens"] == within["extend_seq_lens_cpu"] == lens
    assert within["extend_prefix_lens"] == within["extend_prefix_lens_cpu"] == prefixes
    assert within["extend_start_loc"] == [sum(lens[:i]) for i in range(3)]
    assert within["extend_num_tokens"] == len(kept)
    assert within["out_cache_loc"] == [50 + row for row in kept]
    assert within.get("kv_loc_cols", kept) == kept
    assert within["input_ids"] == [100 + row for row in kept]


def test_restored_after_an_exception() -> None:
    forward_batch = SimpleNamespace(**{"residual_stream": None} | vars(eligible_batch()))
    before = dict(vars(forward_batch))
    with (
        pytest.raises(RuntimeError, match="inside"),
        rewritten(forward_batch, tail_of(forward_batch).fields),
    ):
        forward_batch.residual_stream = object()
        raise RuntimeError("inside")
    assert vars(forward_batch).keys() == before.keys()
    assert all(vars(forward_batch)[name] is value for name, value in before.items())


UNFINISHED = {"contains_last_prefill_chunk": False}


@pytest.mark.parametrize(
    ("changes", "intermediate"),
    [
        ({}, False),
        (UNFINISHED, True),
        # A decoding request in a mixed batch has one new token, and its row is read.
        (UNFINISHED | {"extend_seq_lens_cpu": [3, 5, 1]}, False),
        (UNFINISHED | {"capture_hidden_mode": CaptureHiddenMode.LAST}, False),
        (
            UNFINISHED | {"return_logprob": True, "extend_logprob_start_lens_cpu": [3, 3, 2]},
            False,
        ),
        (UNFINISHED | {"return_logprob": True, "extend_logprob_start_lens_cpu": [3, 4, 2]}, True),
    ],
    ids=["finished", "unfinished", "mixed", "captured", "last row's logprob", "no logprob"],
)
def test_intermediate_chunks(changes: dict[str, Any], intermediate: bool) -> None:
    assert gate.is_intermediate_chunk(eligible_batch(**changes)) is intermediate
