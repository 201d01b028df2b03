"""The batch as the tail sees it: fields rewritten for the kept rows, and put back.

With one kept row per request the tail is a decode step: request i has s_i tokens in the cache,
its last one is the query. So the rewritten batch says DECODE and nothing else has to change for
the backend; the extend lengths are rewritten as well, for whoever reads them: n = [3, 4, 2] after
p = [0, 10, 0] cached tokens becomes n = [1, 1, 1] after p = [2, 13, 1].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
    """

    kept: KeptRows
    index: torch.Tensor
    fields: Mapping[str, object]

    @classmethod
    def of(cls, forward_batch: Any) -> Tail:
        """The decode step that ends every request of an eligible extend batch.

        No value travels from the device to the host; all tensors are new, none is a view.
        """
        kept = gate.kept_rows(forward_batch)
        assert kept.one_per_request, "the gate admits one kept row per request"
        lens: torch.Tensor = forward_batch.extend_seq_lens
        index = torch.cumsum(lens, dim=0) - 1  # [3, 4, 2] -> [2, 6, 8], int64
        requests = len(kept.lens)
        fields: dict[str, object] = {
            "forward_mode": seams.ForwardMode.DECODE,
            "extend_seq_lens": torch.ones_like(lens),
            "extend_prefix_lens": (forward_batch.seq_lens - 1).to(lens.dtype),
            "extend_start_loc": torch.arange(requests, dtype=lens.dtype, device=lens.device),
            "extend_seq_lens_cpu": list(kept.lens),
            "extend_prefix_lens_cpu": list(kept.prefix_lens),
            "extend_num_tokens": kept.kept,
            # Attention narrows its rows to this count when it is the smaller one.
            "global_num_token_non_padded_cpu": kept.kept,
            "num_token_non_padded_cpu": kept.kept,
        }
        input_ids = getattr(forward_batch, "input_ids", None)
        if input_ids is not None:
            fields["input_ids"] = input_ids.index_select(0, index)
        return cls(kept=kept, index=index, fields=fields)


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
