"""The tail: its attention backend, and how its layers are launched.

The backend is a second one over the server's pools, planned after the first. Its metadata is built
before the forward: the scheduler may rewrite the tables that planning reads. It is not built on the
runner's own backend: two metadata objects of one backend share buffers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.core.model import TextModel
from sglang_gemma4_yoco.core.per_layer import Buffers
from sglang_gemma4_yoco.core.tail_batch import TailBatch, rewrite_batch
from sglang_gemma4_yoco.replaced import replaced


class TailBackend:
    """The tail's own attention backend.

    Attributes:
        main: the runner's attention backend.
        tail: a backend over the same pools, which nothing else uses.
        decodes: a tail of one row per request runs as a decode step, else it extends. On a release
            that was not tested it extends: a decode step may count the keys of a window otherwise.
    """

    def __init__(self, main: Any, tail: Any) -> None:
        self.main = main
        self.tail = tail
        self.decodes = not compat.release.is_newer_than_tested()

    def call_after_planning(
        self, plan_batch: Callable[[Any], None]
    ) -> AbstractContextManager[None]:
        """Call ``plan_batch`` with each batch, except decode steps, that SGLang has planned."""
        stock = self.main.init_forward_metadata

        def init_forward_metadata(forward_batch: Any) -> None:
            stock(forward_batch)
            if forward_batch.forward_mode is not compat.batch.ForwardMode.DECODE:
                plan_batch(forward_batch)

        return replaced(self.main, init_forward_metadata=init_forward_metadata)

    def plan(self, forward_batch: Any, fields: Mapping[str, object]) -> Any:
        """The metadata of the tail's batch. The next plan may overwrite the buffers it is in."""
        try:
            with rewrite_batch(forward_batch, fields):
                compat.attention.plan_tail(self.tail, forward_batch)
            return getattr(self.tail, "forward_metadata", None)
        finally:
            self.tail.forward_metadata = None

    @contextmanager
    def running(
        self, forward_batch: Any, fields: Mapping[str, object], metadata: Any
    ) -> Iterator[None]:
        """Make ``tail`` the current backend with this metadata; the batch has the tail's fields."""
        self.tail.forward_metadata = metadata
        try:
            with rewrite_batch(forward_batch, fields), compat.attention.use_backend(self.tail):
                yield
        finally:
            self.tail.forward_metadata = None


@dataclass(frozen=True)
class EagerTail:
    """A ``TailRunner`` that launches each layer; ``metadata`` is what ``attention`` planned."""

    kind: TextModel
    model: Any
    layers: list[Any]  # S-1 to L-1
    batch: Any
    tail: TailBatch
    attention: TailBackend
    metadata: Any
    outcome: str = counters.TAIL_EAGER
    buffers: Buffers | None = None

    def run(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        get_inputs: Callable[[], torch.Tensor | None],
    ) -> torch.Tensor:
        """The kept rows [B, hidden], normed, from all rows [T, ...] at the cut."""
        index = self.tail.index
        kept, kept_positions = rows.index_select(0, index), positions.index_select(0, index)
        fields = {**self.tail.fields, "positions": kept_positions}
        inputs = get_inputs()
        with self.attention.running(self.batch, fields, self.metadata):
            return self.kind.run_tail(
                self.model, self.layers, self.batch, kept, kept_positions, inputs
            )
