"""The batch as the tail sees it: fields rewritten for the kept rows, and put back.

With one kept row per request the tail is a decode step: request i has s_i tokens in the cache and
its last one is the query. n = [3, 4, 2] new tokens after p = [0, 10, 0] cached ones become
n = [1, 1, 1] after p = [2, 13, 1], in mode DECODE. A decode kernel splits a long K/V over the
whole device; the extend kernel would walk it with a handful of thread blocks.

With more rows for some request (it wants input logprobs) the tail is an extend batch of suffixes,
with everything that is laid out by rows pruned to the same rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.deciding.rows import KeptRows

# Triton compiles a kernel anew for a tensor that does not begin at a multiple of 16 bytes, which is
# what 4 numbers of 4 bytes take: the lengths of 3 requests are followed by 1 number of padding.
_ALIGNMENT = 4


@dataclass(frozen=True)
class Tail:
    """What the tail runs on, derived from one batch before its first layer.

    Attributes:
        kept: the kept rows, on the host.
        index: [kept] int64 on the batch's device, positions of the kept rows among all T rows.
        decodes: it runs as a decode step, not as an extend of suffixes.
        unread: nobody reads any row: no request of the batch finishes its prompt.
    """

    kept: KeptRows
    index: torch.Tensor
    decodes: bool
    unread: bool
    _batch: Any
    _packed: torch.Tensor

    @classmethod
    def of(cls, forward_batch: Any, kept: KeptRows, unread: bool, backend: Any) -> Tail:
        """The tail of an eligible extend batch, to run on an attention backend like ``backend``.

        No value travels from the device to the host, and what the host knows travels to the
        device in one copy. No tensor shares memory with one of the batch's.
        """
        device = forward_batch.extend_seq_lens.device
        numbers, padding = kept.indices(), [0] * (-len(kept.lens) % _ALIGNMENT)
        for column in (kept.lens, kept.prefix_lens, kept.start_loc()):
            numbers += column
            numbers += padding
        packed = torch.frombuffer(array("q", numbers), dtype=torch.int64)
        if device.type == "cuda":
            packed = packed.pin_memory()
        packed = packed.to(device, non_blocking=True)
        return cls(
            kept=kept,
            index=packed[: kept.count],
            decodes=kept.one_per_request and seams.decodes_like_extend(backend),
            unread=unread,
            _batch=forward_batch,
            _packed=packed,
        )

    @cached_property
    def fields(self) -> Mapping[str, object]:
        """ForwardBatch fields of the tail, by name.

        Made when they are first asked for, which must be while the batch is the front's; a replayed
        tail may need none.
        """
        kept, index, batch = self.kept, self.index, self._batch
        columns = self._packed[kept.count :].to(batch.extend_seq_lens.dtype).view(3, -1)
        lens, prefix_lens, start_loc = columns[:, : len(kept.lens)]
        fields: dict[str, object] = {
            "extend_seq_lens_cpu": list(kept.lens),
            "extend_prefix_lens_cpu": list(kept.prefix_lens),
            "extend_num_tokens": kept.count,
            # Attention narrows its rows to this count when it is the smaller one.
            "global_num_token_non_padded_cpu": kept.count,
            "num_token_non_padded_cpu": kept.count,
            "extend_seq_lens": lens,
            "extend_prefix_lens": prefix_lens,
            "extend_start_loc": start_loc,
        }
        if self.decodes:
            # out_cache_loc stays [T]: nothing is written or read by it in this mode.
            fields["forward_mode"] = seams.ForwardMode.DECODE
        else:
            fields |= {
                "forward_mode": seams.ForwardMode.EXTEND,
                # Without K and V of its own a layer reads this chunk's back from these slots,
                # row by row with the queries.
                "out_cache_loc": batch.out_cache_loc.index_select(0, index),
                # The same rows of the iteration's translated slots (SGLang 0.5.22 and later).
                "kv_loc_cols": index,
            }
        input_ids = getattr(batch, "input_ids", None)
        if input_ids is not None:
            fields["input_ids"] = input_ids.index_select(0, index)
        return fields

    def fields_at(self, positions: torch.Tensor) -> Mapping[str, object]:
        """The same with the kept rows' positions, which are known at the cut only."""
        return {**self.fields, "positions": positions}


@contextmanager
def rewritten(forward_batch: Any, fields: Mapping[str, object]) -> Iterator[None]:
    """Set ``fields`` on the batch for the span; put the very same objects back on every way out.

    Fields that this SGLang's batch does not have are left out. The residual stream goes with the
    rows: it is put back too, whatever the span made of it.
    """
    names = [name for name in (*fields, "residual_stream") if hasattr(forward_batch, name)]
    saved = {name: getattr(forward_batch, name) for name in names}
    try:
        for name in names:
            if name in fields:
                setattr(forward_batch, name, fields[name])
        yield
    finally:
        for name, value in saved.items():
            setattr(forward_batch, name, value)
