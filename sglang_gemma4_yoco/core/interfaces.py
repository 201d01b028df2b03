"""Interfaces that the packages above core implement, and the plan of a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang_gemma4_yoco.core.per_layer import Buffers
from sglang_gemma4_yoco.core.tail import TailBackend
from sglang_gemma4_yoco.core.tail_batch import KeptRows, TailBatch


class TailRunner(Protocol):
    """Runs the tail of one planned batch."""

    @property
    def buffers(self) -> Buffers | None:
        """The memory from which it projects its per-layer inputs; None if they are passed in."""

    def run(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        get_inputs: Callable[[], torch.Tensor | None],
    ) -> torch.Tensor:
        """Return the kept rows [B, hidden], normed, from all rows [T, ...] at the cut."""


class TailBucket(Protocol):
    """The tail, captured in a CUDA graph for a number of rows."""

    def plan(self, live: Any, index: torch.Tensor) -> TailRunner:
        """Return a runner for rows ``index`` [B] of the batch ``live``, its attention planned."""


class CapturedTail(Protocol):
    """The tail, captured for some numbers of rows."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The buckets' numbers of rows, ascending."""

    def bucket_for(self, kept: KeptRows) -> TailBucket | None:
        """Return the smallest bucket for these rows; None if they cannot be replayed."""

    def close(self) -> None:
        """Free all graphs."""


@dataclass(frozen=True)
class Plan:
    """A batch that is cut.

    Attributes:
        batch: SGLang's ``ForwardBatch``.
        tail: its kept rows, and the tail's view of the batch.
        attention: the tail's attention backend.
        runner: runs the tail, whose attention is already planned; None for an intermediate chunk,
            no row of which is read.
        outcome: the name under which ``counters`` counts the forward.
    """

    batch: Any
    tail: TailBatch
    attention: TailBackend
    runner: TailRunner | None
    outcome: str


class Forward(Protocol):
    """A forward that can be run on either path."""

    def fast(self, plan: Plan) -> Any:
        """Run it on the fast path, and return the model's output."""

    def stock(self) -> Any:
        """Run it as stock, from its initial state, and return the model's output."""


#: Called with a forward that was cut, its plan and its output; returns the output for the model.
AfterCut = Callable[[Forward, Plan, Any], Any]
