"""Kept rows, against the definition written out; and the batch of the tail."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from harness.stand_ins import eligible_batch, tail_of
from sglang_gemma4_yoco.core.kept_batch import KeptBatch, KeptRows, pin_memory

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
    assert kept.indices.tolist() == expected
    assert (kept.count, kept.total) == (len(expected), offset)
    assert kept.one_per_request == (kept.lens == [1] * len(lens))
    for n, p, m, q in zip(lens, prefixes, kept.lens, kept.prefix_lens, strict=True):
        assert q + m == p + n  # the total length stays
    assert kept.start_loc == [sum(kept.lens[:i]) for i in range(len(lens))]
    assert KeptRows.suffixes(lens, prefixes) == KeptRows.suffixes(lens, prefixes, lens)


# Of three prompts with 3, 4 and 2 new tokens, of which 0, 10 and 0 are cached before.
LAST_ROWS = {
    "extend_seq_lens_cpu": [1, 1, 1],
    "extend_prefix_lens_cpu": [2, 13, 1],
    "extend_num_tokens": 3,
    "global_num_token_non_padded_cpu": 3,
    "extend_seq_lens": [1, 1, 1],
    "extend_prefix_lens": [2, 13, 1],
    "extend_start_loc": [0, 1, 2],
    "forward_mode": ForwardMode.DECODE,
    "input_ids": [2, 6, 8],
}
FROM_ROW_2_OF_THE_SECOND = {
    "extend_seq_lens_cpu": [1, 2, 1],
    "extend_prefix_lens_cpu": [2, 12, 1],
    "extend_num_tokens": 4,
    "global_num_token_non_padded_cpu": 4,
    "extend_seq_lens": [1, 2, 1],
    "extend_prefix_lens": [2, 12, 1],
    "extend_start_loc": [0, 1, 3],
    "forward_mode": ForwardMode.EXTEND,
    "out_cache_loc": [12, 15, 16, 18],
    "kv_loc_cols": [2, 5, 6, 8],
    "input_ids": [2, 5, 6, 8],
}


@pytest.mark.parametrize(
    ("starts", "expected"), [([3, 4, 2], LAST_ROWS), ([3, 2, 2], FROM_ROW_2_OF_THE_SECOND)]
)
def test_every_field_of_the_tails_batch_describes_the_kept_rows(
    starts: list[int], expected: dict[str, Any]
) -> None:
    """Kernels on a CPU read few of them, others may read any.

    ``harness.observe`` compares what attention finds in every test of ``forward/``.
    """
    batch = eligible_batch(
        return_logprob=True,
        extend_logprob_start_lens_cpu=starts,
        out_cache_loc=torch.arange(10, 19),
    )
    found = {}
    for name, value in tail_of(batch).fields.items():
        found[name] = value.tolist() if isinstance(value, torch.Tensor) else value
    assert found == expected


def test_blocks_are_pinned_for_every_batch() -> None:
    """PyTorch rounds a batch's need up to a power of two, in bytes."""
    with mock.patch.object(torch, "empty") as pinned:
        pin_memory("cpu")
        pin_memory("cuda")
    blocks = Counter(8 * call.args[0] for call in pinned.call_args_list)
    one_row = [KeptRows.suffixes([7] * n, [0] * n) for n in (1, 2, 4, 5, 17, 300, 4096)]
    for kept in (*one_row, KeptRows.suffixes([131_072], [0], [0])):
        batch = KeptBatch.of(eligible_batch(), kept, decodes=True)
        needed = batch.index.untyped_storage().nbytes()
        assert blocks[1 << (needed - 1).bit_length()] == 4
