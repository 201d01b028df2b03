"""The tail's attention backend: a second one over the server's pools, planned after the first.

Its metadata is built before the forward: up to SGLang 0.5.21 Triton's planner reads from the device
and would stall the host there, and the scheduler may rewrite the tables that planning reads. It is
not built on the runner's own backend: two metadata objects of one backend share buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.core.tail_batch import rewrite_batch
from sglang_gemma4_yoco.replaced import replaced


class TailBackend:
    """The tail's own attention backend.

    Attributes:
        main: the runner's attention backend.
        tail: a backend over the same pools, which nothing else uses.
        decodes: whether a decode step of ``tail`` sees the same keys as an extend row.
    """

    def __init__(self, main: Any, tail: Any) -> None:
        self.main = main
        self.tail = tail
        self.decodes: bool = compat.attention.decodes_like_extend(tail)

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
