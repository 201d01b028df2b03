"""How the tail runs: on attention metadata of a backend of its own, or of the runner's, rebuilt.

The tail's metadata must not be built in the middle of the forward. Up to SGLang 0.5.21 Triton's
planner reads device scalars on the host, which there would stall the host until the GPU has
finished the front; and from the end of the backend's own planning on, the scheduler may rewrite the
tables it reads.
Nor may it be built on the runner's own backend: two metadata objects of one backend share buffers,
so the second would overwrite the first.

Hence a second backend over the same memory pools, planned right after the first. Where none can
be built, the runner's own backend is rebuilt for the tail and rebuilt again after it.

Both ways have the same four parts: ``main``, the backend that the front runs on; ``told``, for the
log; ``running``, the span in which the tail's layers run; ``after_failure``, before stock serves
the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.tail import rewritten


class OwnBackend:
    """The tail's layers are launched on a backend of their own, planned ahead.

    Attributes:
        main: the runner's attention backend.
        tail: a backend of the same kind over the same pools, used by nobody else.
    """

    told = "planned ahead"

    def __init__(self, main: Any, tail: Any) -> None:
        self.main = main
        self.tail = tail

    def plan(self, forward_batch: Any, fields: Mapping[str, object]) -> None:
        """Build the tail's metadata; until its tail has run, for this batch alone."""
        with rewritten(forward_batch, fields):
            seams.plan(self.tail, forward_batch)

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

    def after_failure(self, forward_batch: Any) -> None:
        """The front's metadata was never touched."""

    def release(self) -> None:
        """Let go of the tail's metadata."""
        self.tail.forward_metadata = None


class RebuiltBackend:
    """The tail's layers are launched on the runner's own backend, planned anew at the cut.

    Attributes:
        main: the runner's attention backend.
    """

    told = "rebuilt at the cut"

    def __init__(self, main: Any) -> None:
        self.main = main

    @contextmanager
    def running(self, forward_batch: Any, fields: Mapping[str, object]) -> Iterator[None]:
        """The tail's batch, planned here, and the front's planned again on the way out."""
        try:
            with rewritten(forward_batch, fields):
                seams.plan(self.main, forward_batch)
                yield
        finally:
            self.main.init_forward_metadata(forward_batch)

    def after_failure(self, forward_batch: Any) -> None:
        """Plan once more: the metadata was the tail's for a while, which may be why it failed."""
        self.main.init_forward_metadata(forward_batch)


Way = OwnBackend | RebuiltBackend
