"""The plan of a batch that is cut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sglang_gemma4_yoco.core.backend_pair import BackendPair
from sglang_gemma4_yoco.core.kept_batch import KeptBatch
from sglang_gemma4_yoco.core.per_layer import Buffers


class TailRunner(Protocol):
    """Runs the tail of one planned batch."""

    @property
    def buffers(self) -> Buffers | None:
        """The memory from which it projects its per-layer inputs; None if they are passed in."""

    def run(
        self,
        rows: Tensor,
        positions: Tensor,
        get_inputs: Callable[[], Tensor | None],
    ) -> Tensor:
        """Return the kept rows [B, hidden], normed.

        Args:
            rows: [T, ...], the residual of all rows at the cut.
            positions: [T] int64.
            get_inputs: returns the kept rows' per-layer inputs, [B, L - S + 1, width], or None. Not
                called by a runner with ``buffers``, which projects them itself.
        """


@dataclass(frozen=True)
class Plan:
    """A batch that is cut.

    Attributes:
        kept_batch: its kept rows, and SGLang's batch rewritten to them.
        backends: the runner's attention backend, and the tail's.
        runner: runs the tail, whose attention metadata exists; None for an intermediate chunk, no
            row of which is read.
        outcome: the name under which ``counters`` counts the forward.
    """

    kept_batch: KeptBatch
    backends: BackendPair
    runner: TailRunner | None
    outcome: str
