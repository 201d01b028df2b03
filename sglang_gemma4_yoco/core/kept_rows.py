"""The kept rows of a prefill.

A batch holds requests i with n_i new tokens after p_i cached ones. Its hidden states have
T = n_0 + n_1 + ... rows, request after request. Request i keeps its last m_i rows, 1 <= m_i <= n_i:
one row, or more for input logprobs. Kept suffixes are again an extend batch, of m_i new tokens
after p_i + n_i - m_i cached ones::

    n = [3, 4, 2] after p = [0, 10, 0], one row each  ->  rows 2, 6, 8: [1, 1, 1] after [2, 13, 1]
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class KeptRows:
    """The kept suffix of every request of one batch, in host integers.

    Attributes:
        lens: m_i, rows kept of request i.
        prefix_lens: tokens of request i before its first kept row.
        start_loc: the place of request i's first kept row among the kept ones.
        indices: the kept rows among the T rows, ascending, in 64 bits.
        total: T.
        count: rows kept, m_0 + m_1 + ...
        one_per_request: every request keeps exactly its last row. Only then can the tail be a
            decode step (``tail_batch``) and be captured, and multimodal prompts be cut.
    """

    lens: list[int]
    prefix_lens: list[int]
    start_loc: list[int]
    indices: array[int]
    total: int
    count: int
    one_per_request: bool

    @classmethod
    def suffixes(
        cls,
        extend_lens: Sequence[int],
        prefix_lens: Sequence[int],
        logprob_starts: Sequence[int] | None = None,
    ) -> KeptRows:
        """Keep one row per request, or the rows from its logprob start on.

        Args:
            extend_lens: n_i >= 1.
            prefix_lens: p_i.
            logprob_starts: the first new row of request i whose logits are read, relative to its
                new rows (n_i or more means none); None when no request reads more than its last.

        >>> KeptRows.suffixes(extend_lens=[3, 4, 2], prefix_lens=[0, 10, 0]).indices.tolist()
        [2, 6, 8]
        >>> KeptRows.suffixes([5, 4, 3], [0, 0, 7], logprob_starts=[2, 4, 0]).lens
        [3, 1, 3]
        """
        new = np.array(extend_lens)
        kept = np.ones_like(new)
        if logprob_starts is not None:
            kept = np.clip(new - logprob_starts, 1, new)
        ends, kept_ends = new.cumsum(), kept.cumsum()
        count = int(kept_ends[-1])
        indices = np.repeat(ends - kept_ends, kept) + np.arange(count)
        return cls(
            kept.tolist(),
            (prefix_lens + new - kept).tolist(),
            (kept_ends - kept).tolist(),
            array("q", indices.tobytes()),
            total=int(ends[-1]),
            count=count,
            one_per_request=count == len(kept),
        )
