"""The kept rows of a prefill, and SGLang's batch rewritten to these rows.

A batch holds requests i with n_i new tokens after p_i cached ones. Its hidden states have
T = n_0 + n_1 + ... rows, request after request. Request i keeps its last m_i rows, 1 <= m_i <= n_i:
one row, or more for input logprobs. Kept suffixes are again an extend batch, of m_i new tokens
after p_i + n_i - m_i cached ones::

    n = [3, 4, 2] after p = [0, 10, 0], one row each  ->  rows 2, 6, 8: [1, 1, 1] after [2, 13, 1]

With one kept row per request the tail is a decode step: the query is the last token of request i,
and all its tokens are in the cache. A decode kernel splits a long K/V over the whole device; an
extend kernel processes it with a handful of thread blocks.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from sglang_gemma4_yoco.compat.batch import ForwardBatch, ForwardMode
from sglang_gemma4_yoco.patched import patched

#: Fields of a batch that the tail rewrites and nothing reads before.
REWRITTEN = (
    "extend_prefix_lens",
    "extend_start_loc",
    "global_num_token_non_padded_cpu",
    "kv_loc_cols",
    "positions",
)


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
            decode step and be captured, and multimodal prompts be cut.
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
        ends = new.cumsum()
        kept_ends = kept.cumsum()
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


def pin_memory(device: str) -> None:
    """Fill PyTorch's cache of pinned memory for ``KeptBatch.of``; a graph capture empties it.

    Otherwise a request waits for the driver when its batch needs a new block; PyTorch rounds block
    sizes up to powers of two. Four of each size are pinned: two batches can be in flight, and
    SGLang takes blocks too.
    """
    if torch.device(device).type == "cuda":
        # 2 ** 4 numbers are enough for one request, and 2 ** 18 for all rows of 131,072 tokens.
        sizes = [*range(4, 19)] * 4
        _blocks = [torch.empty(2**n, dtype=torch.int64, pin_memory=True) for n in sizes]


@dataclass(frozen=True)
class KeptBatch:
    """The batch that the tail runs on, created before the model's first layer runs.

    Attributes:
        kept: the kept rows, on the host.
        index: [B] int64 on the batch's device, the kept rows among all T rows.
        decodes: the tail runs as a decode step, not as an extend of suffixes.
    """

    kept: KeptRows
    index: torch.Tensor
    decodes: bool
    _batch: weakref.ref[ForwardBatch]
    #: On the device: the index, then ``lens``, ``prefix_lens`` and ``start_loc``, each padded to a
    #: multiple of 4 numbers.
    _packed: torch.Tensor

    @property
    def batch(self) -> ForwardBatch:
        """SGLang's ``ForwardBatch``, which is alive while its forward runs."""
        batch = self._batch()
        assert batch is not None, "a kept batch is used after its batch has been freed"
        return batch

    @classmethod
    def of(cls, forward_batch: ForwardBatch, kept: KeptRows, *, decodes: bool) -> KeptBatch:
        """Return the kept rows of an eligible batch.

        Nothing is read from the device, and all host values go there in one copy. No tensor shares
        memory with the batch's.

        Args:
            decodes: run the tail as a decode step if each request keeps one row.
        """
        device = forward_batch.seq_lens.device
        # Triton compiles another kernel for tensors that are not aligned to 16 bytes, or 4 numbers
        # of 4 bytes: 1 number of padding follows the lengths of 3 requests.
        padding = [0] * (-len(kept.lens) % 4)
        lists = [*kept.lens, *padding, *kept.prefix_lens, *padding, *kept.start_loc, *padding]
        packed = torch.frombuffer(kept.indices + array("q", lists), dtype=torch.int64)
        if device.type == "cuda":
            packed = packed.pin_memory()
        packed = packed.to(device, non_blocking=True)
        return cls(
            kept=kept,
            index=packed[: kept.count],
            decodes=decodes and kept.one_per_request,
            _batch=weakref.ref(forward_batch),
            _packed=packed,
        )

    @cached_property
    def fields(self) -> Mapping[str, object]:
        """Fields of ``ForwardBatch`` for the kept rows, by name.

        Computed on first use, before the batch is rewritten; a captured tail uses none.
        """
        kept, index, batch = self.kept, self.index, self.batch
        assert batch.extend_seq_lens is not None, "it is an extend batch"
        lists = self._packed[kept.count :].to(batch.extend_seq_lens.dtype).view(3, -1)
        lens, prefix_lens, start_loc = lists[:, : len(kept.lens)]
        fields: dict[str, object] = {
            "extend_seq_lens_cpu": kept.lens,
            "extend_prefix_lens_cpu": kept.prefix_lens,
            "extend_num_tokens": kept.count,
            # Attention narrows its rows to this count when it is the smaller one.
            "global_num_token_non_padded_cpu": kept.count,
            "extend_seq_lens": lens,
            "extend_prefix_lens": prefix_lens,
            "extend_start_loc": start_loc,
        }
        if self.decodes:
            # out_cache_loc stays [T]: it is not used in this mode.
            fields["forward_mode"] = ForwardMode.DECODE
        else:
            fields |= {
                "forward_mode": ForwardMode.EXTEND,
                # KV-shared layers read K and V of this chunk from these slots, one per query row.
                "out_cache_loc": batch.out_cache_loc.index_select(0, index),
                # The same rows of the iteration's translated slots.
                "kv_loc_cols": index,
            }
        if batch.input_ids is not None:
            fields["input_ids"] = batch.input_ids.index_select(0, index)
        return fields


def rewrite_batch(
    forward_batch: ForwardBatch, fields: Mapping[str, object]
) -> AbstractContextManager[None]:
    """Set ``fields`` on the batch in the ``with`` block, then restore the same objects.

    The residual stream, which belongs to the rows, is restored too.
    """
    return patched(forward_batch, residual_stream=forward_batch.residual_stream, **fields)
