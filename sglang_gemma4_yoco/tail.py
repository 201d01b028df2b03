"""The batch as the tail sees it: fields rewritten for the kept rows, and put back.

With one kept row per request the tail is a decode step: request i has s_i tokens in the cache and
its last one is the query. n = [3, 4, 2] new tokens after p = [0, 10, 0] cached ones become
n = [1, 1, 1] after p = [2, 13, 1], in mode DECODE. A decode kernel splits a long K/V over the
whole device; the extend kernel would walk it with a handful of thread blocks.

With more rows for some request (it wants input logprobs) the tail is an extend batch of suffixes,
with everything that is laid out by rows pruned to the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_gemma4_yoco import gate, seams
from sglang_gemma4_yoco.rows import KeptRows


@dataclass(frozen=True)
class Tail:
    """What the tail runs on, derived from one batch before its first layer.

    Attributes:
        kept: the kept rows, on the host.
        index: [kept] int64 on the batch's device, positions of the kept rows among all T rows.
        fields: ForwardBatch fields of the tail, by name.
        decodes: it runs as a decode step, not as an extend of suffixes.
        unread: nobody reads any row: no request of the batch finishes its prompt.
    """

    kept: KeptRows
    index: torch.Tensor
    fields: Mapping[str, object]
    decodes: bool
    unread: bool

    @classmethod
    def of(cls, forward_batch: Any) -> Tail:
        """The tail of an eligible extend batch.

        No value travels from the device to the host; all tensors are new, none is a view.
        """
        kept = gate.kept_rows(forward_batch)
        lens: torch.Tensor = forward_batch.extend_seq_lens
        fields: dict[str, object] = {
            "extend_seq_lens_cpu": list(kept.lens),
            "extend_prefix_lens_cpu": list(kept.prefix_lens),
            "extend_num_tokens": kept.kept,
            # Attention narrows its rows to this count when it is the smaller one.
            "global_num_token_non_padded_cpu": kept.kept,
            "num_token_non_padded_cpu": kept.kept,
        }
        decodes = kept.one_per_request and seams.decodes_like_extend(seams.current_attn_backend())
        if decodes:
            index = torch.cumsum(lens, dim=0) - 1  # [3, 4, 2] -> [2, 6, 8], int64
            fields |= {
                "forward_mode": seams.ForwardMode.DECODE,
                "extend_seq_lens": torch.ones_like(lens),
                "extend_prefix_lens": (forward_batch.seq_lens - 1).to(lens.dtype),
                "extend_start_loc": torch.arange(
                    len(kept.lens), dtype=lens.dtype, device=lens.device
                ),
                # out_cache_loc stays [T]: layer K-1 writes K and V of all rows in this mode,
                # and the layers after it write none.
            }
        else:
            index = _to_device(kept.indices(), torch.int64, lens.device)
            kept_lens = _to_device(kept.lens, lens.dtype, lens.device)
            fields |= {
                "forward_mode": seams.ForwardMode.EXTEND,
                "extend_seq_lens": kept_lens,
                "extend_prefix_lens": _to_device(kept.prefix_lens, lens.dtype, lens.device),
                "extend_start_loc": (kept_lens.cumsum(0) - kept_lens).to(lens.dtype),
                # Without K and V of its own a layer reads this chunk's back from these slots,
                # row by row with the queries.
                "out_cache_loc": forward_batch.out_cache_loc.index_select(0, index),
                # The same rows of the iteration's translated slots (SGLang 0.5.22 and later).
                "kv_loc_cols": index,
            }
        input_ids = getattr(forward_batch, "input_ids", None)
        if input_ids is not None:
            fields["input_ids"] = input_ids.index_select(0, index)
        return cls(kept, index, fields, decodes, unread=gate.is_unread(forward_batch))

    def at(self, positions: torch.Tensor) -> Tail:
        """The same tail with the kept rows' positions, which are known at the cut only."""
        return replace(self, fields={**self.fields, "positions": positions})


def _to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host integers as a tensor on ``device``, by a copy that no one waits for."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


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
