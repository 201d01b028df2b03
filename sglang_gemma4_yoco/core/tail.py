"""The tail's attention backend.

A second backend over the server's pools, since two plans of one backend would share buffers. It is
planned right after the first one, before the forward: later the scheduler may rewrite the tables
that planning reads.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.core.tail_batch import rewrite_batch
from sglang_gemma4_yoco.patched import patched


class TailBackend:
    """The tail's own attention backend.

    Attributes:
        main: the runner's attention backend.
        tail: a backend over the same pools, which nothing else uses.
        decodes: run a tail of one row per request as a decode step, and not as an extend. False on
            untested releases, whose decode steps may count the keys of a window differently.
    """

    def __init__(self, main: Any, tail: Any) -> None:
        self.main = main
        self.tail = tail
        self.decodes = not compat.release.is_newer_than_tested()

    def call_after_planning(
        self, plan_batch: Callable[[Any], None]
    ) -> AbstractContextManager[None]:
        """In the ``with`` block call ``plan_batch`` for each planned batch except decode steps."""
        stock = self.main.init_forward_metadata

        def init_forward_metadata(forward_batch: Any) -> None:
            stock(forward_batch)
            if forward_batch.forward_mode is not compat.batch.ForwardMode.DECODE:
                plan_batch(forward_batch)

        return patched(self.main, init_forward_metadata=init_forward_metadata)

    def plan(self, forward_batch: Any, fields: Mapping[str, object]) -> Any:
        """Return the metadata of the tail's batch, whose buffers the next plan may overwrite."""
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
        planned = patched(self.tail, forward_metadata=metadata)
        with planned, rewrite_batch(forward_batch, fields), compat.attention.use_backend(self.tail):
            yield
