"""Interfaces that the folders above core implement.

``TailBucket`` and ``CapturedTail`` have one implementation each (``captured/graphs.py``). It needs
the state of ``core``; with these interfaces the state does not need it in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from sglang_gemma4_yoco.compat.batch import ForwardBatch
from sglang_gemma4_yoco.compat.text_model import ModelOutput
from sglang_gemma4_yoco.core.kept_batch import KeptRows
from sglang_gemma4_yoco.core.plan import Plan, TailRunner
from sglang_gemma4_yoco.refusal import Refusal


class TailBucket(Protocol):
    """The tail, captured in a CUDA graph for a number of rows."""

    def fill(self, live: ForwardBatch, index: Tensor) -> TailRunner:
        """Fill the graph's inputs for rows ``index`` [B] of the batch ``live``; return a runner."""


class CapturedTail(Protocol):
    """The tail, captured for some numbers of rows."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The buckets' sizes, in rows, ascending."""

    def bucket_for(self, kept: KeptRows) -> TailBucket | None:
        """Return the smallest bucket for these rows; None if they cannot be replayed."""

    def close(self) -> None:
        """Free all graphs."""


class Eligible(NamedTuple):
    """A batch that may be cut.

    Attributes:
        kept: the rows whose logits the sampler and the logprobs read.
        is_intermediate_chunk: no request finishes its prompt in it, so no row is read.
        bucket: the captured tail's bucket for the kept rows; None if the tail runs eagerly.
    """

    kept: KeptRows
    is_intermediate_chunk: bool
    bucket: TailBucket | None


class CapturedFront(Protocol):
    """A captured prefill, which SGLang replays in place of the model's own loop over its layers."""

    def find_refusal(self, eligible: Eligible, *, on_gpu: bool) -> Refusal | None:
        """Return why it runs all layers of an eligible batch, or None if it can stop at the cut."""


class Forward(Protocol):
    """A forward that can be run on either path."""

    def fast(self, plan: Plan) -> ModelOutput:
        """Run it on the fast path, and return the model's output."""

    def stock(self) -> ModelOutput:
        """Run it as stock, from its initial state, and return the model's output."""


#: Called with a forward that was cut, its plan and its output; returns the output for the model.
AfterCut = Callable[[Forward, Plan, ModelOutput], ModelOutput]
