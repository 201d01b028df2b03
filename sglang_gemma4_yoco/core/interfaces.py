"""Interfaces that the packages above core implement."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sglang_gemma4_yoco.compat.text_model import ModelOutput
from sglang_gemma4_yoco.core.kept_batch import KeptRows
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.refusal import Refusal

if TYPE_CHECKING:
    from sglang_gemma4_yoco.captured.graphs import Bucket


class Eligible(NamedTuple):
    """A batch that may be cut.

    Attributes:
        kept: the rows whose logits the sampler and the logprobs read.
        is_intermediate_chunk: no request finishes its prompt in it, so no row is read.
        bucket: the captured tail's bucket for the kept rows; None if the tail runs eagerly.
    """

    kept: KeptRows
    is_intermediate_chunk: bool
    bucket: Bucket | None


class CapturedFront(Protocol):
    """A captured prefill, which SGLang replays in place of the model's own loop over its layers."""

    def find_refusal(self, eligible: Eligible, *, on_gpu: bool) -> Refusal | None:
        """Return why it runs all layers of an eligible batch, or None if it can stop at the cut."""

    def name_outcome(self, outcome: str) -> str:
        """Return the name under which this outcome of the model's own loop is counted."""


class Forward(Protocol):
    """A forward that can be run on either path."""

    def fast(self, plan: Plan) -> ModelOutput:
        """Run it on the fast path, and return the model's output."""

    def stock(self) -> ModelOutput:
        """Run it as stock, from its initial state, and return the model's output."""


#: Called with a forward that was cut, its plan and its output; returns the output for the model.
AfterCut = Callable[[Forward, Plan, ModelOutput], ModelOutput]
