"""Row arithmetic: plain integers, checked against the definition written out."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_gemma4_yoco.core.kept import KeptRows

requests = st.lists(
    st.tuples(st.integers(1, 50), st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=8
)


@given(requests)
def test_kept_rows_are_the_suffix_of_every_request(batch: list[tuple[int, int, int]]) -> None:
    lens, prefixes, starts = (list(column) for column in zip(*batch, strict=True))
    kept = KeptRows.suffixes(lens, prefixes, starts)
    offset, expected = 0, []
    for n, start in zip(lens, starts, strict=True):
        # A row is read when a logprob is wanted from it, and the last row always is.
        expected += [offset + row for row in range(n) if row >= start or row == n - 1]
        offset += n
    assert kept.indices() == expected
    assert kept.count == len(expected)
    assert kept.total == offset
    for n, p, m, q in zip(lens, prefixes, kept.lens, kept.prefix_lens, strict=True):
        assert q + m == p + n  # the total length stays


@given(requests)
def test_without_logprobs_one_row_each(batch: list[tuple[int, int, int]]) -> None:
    lens, prefixes, _ = (list(column) for column in zip(*batch, strict=True))
    kept = KeptRows.suffixes(lens, prefixes)
    assert kept.one_per_request
    assert kept.lens == (1,) * len(lens)


def test_worked_example() -> None:
    kept = KeptRows.suffixes([3, 4, 2], [0, 10, 0])
    assert kept.indices() == [2, 6, 8]
    assert kept.prefix_lens == (2, 13, 1)


@pytest.mark.parametrize(
    ("lens", "prefixes", "starts"),
    [([3, 0], [0, 0], None), ([3], [0, 0], None), ([3, 4], [0, 0], [1])],
    ids=["no new token", "prefix missing", "start missing"],
)
def test_what_is_no_batch_is_an_error(
    lens: list[int], prefixes: list[int], starts: list[int] | None
) -> None:
    with pytest.raises(ValueError, match=r"batch|logprob"):
        KeptRows.suffixes(lens, prefixes, starts)


def test_needs_no_torch() -> None:
    code = "import sys, sglang_gemma4_yoco.deciding.rows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
