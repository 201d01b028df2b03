"""Which rows of a prefill batch somebody reads: arithmetic on host integers, no tensors.

A batch holds requests i with n_i new tokens after p_i cached ones. Its hidden states have
T = n_0 + n_1 + ... rows, request after request. Request i keeps its last m_i rows, 1 <= m_i <= n_i.
A kept suffix is again an extend batch: the same total lengths, m_i new tokens after p_i + n_i - m_i
cached ones.

>>> kept = KeptRows.suffixes(extend_lens=[3, 4, 2], prefix_lens=[0, 10, 0])
>>> kept.indices()
[2, 6, 8]
>>> kept.prefix_lens
(2, 13, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class KeptRows:
    """The kept suffix of every request of one batch.

    Attributes:
        lens: m_i, rows kept of request i.
        prefix_lens: tokens of request i before its first kept row.
        extend_lens: n_i, rows of request i in the batch.
    """

    lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    extend_lens: tuple[int, ...]

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
            prefix_lens: cached tokens of request i, as long as ``extend_lens``.
            logprob_starts: the first new row of request i whose logits are read, relative to its
                new rows (n_i or more means none); None when no request reads more than its last.

        Raises:
            ValueError: the lengths do not describe a batch.

        >>> KeptRows.suffixes([5, 4, 3], [0, 0, 7], logprob_starts=[2, 4, 0]).lens
        (3, 1, 3)
        """
        if len(prefix_lens) != len(extend_lens) or min(extend_lens, default=0) < 1:
            raise ValueError(
                f"not a batch of requests: extend_lens={list(extend_lens)}, "
                f"prefix_lens={list(prefix_lens)}"
            )
        if logprob_starts is None:
            lens = (1,) * len(extend_lens)
        elif len(logprob_starts) != len(extend_lens):
            raise ValueError(
                f"{len(logprob_starts)} logprob starts for {len(extend_lens)} requests"
            )
        else:
            lens = tuple(
                min(max(n - start, 1), n)
                for n, start in zip(extend_lens, logprob_starts, strict=True)
            )
        return cls(
            lens=lens,
            prefix_lens=tuple(
                p + n - m for p, n, m in zip(prefix_lens, extend_lens, lens, strict=True)
            ),
            extend_lens=tuple(extend_lens),
        )

    @property
    def total(self) -> int:
        """Rows of the whole batch, T."""
        return sum(self.extend_lens)

    @property
    def count(self) -> int:
        """Rows kept, m_0 + m_1 + ..."""
        return sum(self.lens)

    @property
    def one_per_request(self) -> bool:
        """Whether every request keeps exactly its last row, so that the tail is a decode step."""
        return self.count == len(self.lens)

    def start_loc(self) -> list[int]:
        """The place of each request's first kept row among the kept ones."""
        return [0, *accumulate(self.lens[:-1])]

    def indices(self) -> list[int]:
        """Positions of the kept rows among the T rows, ascending."""
        end = 0
        kept: list[int] = []
        for n, m in zip(self.extend_lens, self.lens, strict=True):
            end += n
            kept.extend(range(end - m, end))
        return kept
