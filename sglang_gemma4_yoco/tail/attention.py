"""What the tail attends on: a second attention backend over the server's pools, planned ahead.

The tail's metadata must not be built in the middle of the forward. Up to SGLang 0.5.21 Triton's
planner reads device scalars on the host, which there would stall the host until the GPU has
finished the front; and from the end of the backend's own planning on, the scheduler may rewrite the
tables it reads.
Nor may it be built on the runner's own backend: two metadata objects of one backend share buffers,
so the second would overwrite the first.

Hence a second backend over the same memory pools, planned right after the first; of which kind,
``backends`` says. Where none can be built, all batches run as stock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.tail.batch import rewritten

_ROWS = 2  # of a step for the compiler's sake: Triton compiles anew for arguments that are 1


class OwnBackend:
    """The attention backend of the tail's own.

    Attributes:
        main: the runner's attention backend.
        tail: a backend over the same pools, used by nobody else.
        description: for the log; says if it is of another kind than ``main``.
    """

    def __init__(self, main: Any, tail: Any) -> None:
        self.main = main
        self.tail = tail
        other = "" if type(main) is type(tail) else f" on {type(tail).__name__}"
        self.description = f"planned ahead{other}"

    def plan(self, forward_batch: Any, fields: Mapping[str, object]) -> None:
        """Build the tail's metadata; until its tail has run, for this batch alone."""
        with rewritten(forward_batch, fields):
            seams.plan(self.tail, forward_batch)

    @torch.no_grad()
    def compile_kernels(self, attentions: Iterable[Any]) -> None:
        """Run a decode step of nobody's request, once for each kind of layer.

        Where another backend serves the decode steps, the first user's prefill would wait for the
        compiler otherwise. What lies in the reserved slot is read, and nothing is written.

        Args:
            attentions: each a ``Gemma4Attention`` of the tail.
        """
        kinds = {(part.head_dim, part.attn.sliding_window_size): part for part in attentions}
        weight = next(iter(kinds.values())).q_norm.weight
        nobody = torch.zeros(_ROWS, dtype=torch.int64, device=weight.device)
        step = seams.decode_batch(
            input_ids=nobody,
            req_pool_indices=nobody,
            seq_lens=nobody + 1,
            positions=nobody,
        )
        try:
            seams.plan(self.tail, step)
            with seams.attn_backend_switched(self.tail):
                for part in kinds.values():
                    rows = weight.new_zeros(_ROWS, part.num_heads, part.head_dim)
                    part.attn(rows, None, None, forward_batch=step, save_kv_cache=False)
        finally:
            self.release()

    @contextmanager
    def running(self, forward_batch: Any, fields: Mapping[str, object]) -> Iterator[None]:
        """The tail's batch on the tail's backend, whose metadata is planned already."""
        try:
            with (
                rewritten(forward_batch, fields),
                seams.attn_backend_switched(self.tail),
            ):
                yield
        finally:
            self.release()

    def write_keys_and_values(
        self, attention: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write K and V of all rows of a batch, for the layers that read them.

        Args:
            attention: the ``RadixAttention`` of their layer.
            k, v: [T, kv_heads, head_dim].
        """
        # As its attention would, which an unread chunk does without: who asks for K and V waits
        # until a cache has loaded those of the prefix, and the next batch waits no more.
        seams.await_loads(self.tail.token_to_kv_pool, [attention.layer_id])
        seams.write_keys_and_values(self.main, self.tail, attention, forward_batch, k, v)

    def release(self) -> None:
        """Let go of the tail's metadata."""
        self.tail.forward_metadata = None
