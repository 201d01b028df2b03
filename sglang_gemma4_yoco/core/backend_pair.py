"""The runner's attention backend and the tail's, a second one over the same pools.

One backend cannot hold the metadata of two batches, whose buffers would be shared. The tail's
metadata is made right after the runner's, before the forward: later the scheduler may rewrite the
tables that are read for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from sglang_gemma4_yoco import compat, log
from sglang_gemma4_yoco.compat.attention import AttentionBackend
from sglang_gemma4_yoco.compat.batch import ForwardBatch, ForwardMode
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.compat.text_model import TextModel
from sglang_gemma4_yoco.core.kept_batch import rewrite_batch
from sglang_gemma4_yoco.patched import patched

if TYPE_CHECKING:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend


class BackendPair:
    """The attention backends of a forward that is cut.

    Attributes:
        main_backend: the runner's.
        tail_backend: one over the same pools, which nothing else uses.
        decodes: run a tail of one row per request as a decode step, and not as an extend. False on
            untested releases, whose decode steps may count the keys of a window differently.
    """

    def __init__(self, main_backend: AttentionBackend, tail_backend: TritonAttnBackend) -> None:
        self.main_backend = main_backend
        self.tail_backend = tail_backend
        self.decodes = not compat.release.is_newer_than_tested()

    def call_after_init(
        self, plan_batch: Callable[[ForwardBatch], None]
    ) -> AbstractContextManager[None]:
        """In the ``with`` block call ``plan_batch`` after ``main_backend`` has made its metadata.

        It is not called for decode steps. Unnecessary once SGLang calls plugins for each batch
        whose metadata exists.
        """
        stock = self.main_backend.init_forward_metadata

        def init_forward_metadata(forward_batch: ForwardBatch) -> None:
            stock(forward_batch)
            if forward_batch.forward_mode is not ForwardMode.DECODE:
                plan_batch(forward_batch)

        return patched(self.main_backend, init_forward_metadata=init_forward_metadata)

    def init_tail_metadata(
        self, forward_batch: ForwardBatch, fields: Mapping[str, object]
    ) -> object:
        """Return the attention metadata of the kept rows; the next call may overwrite its buffers.

        Args:
            fields: ``KeptBatch.fields`` of this batch; empty if it has the kept rows alone.
        """
        backend = self.tail_backend
        # The metadata belongs to the plan, and is freed with it.
        with patched(backend, forward_metadata=None), rewrite_batch(forward_batch, fields):
            compat.attention.init_tail_metadata(backend, forward_batch)
            return backend.forward_metadata

    @contextmanager
    def running_tail(
        self, forward_batch: ForwardBatch, fields: Mapping[str, object], metadata: object
    ) -> Iterator[None]:
        """In the ``with`` block ``tail_backend`` is current, and the batch has these fields.

        Args:
            fields: ``KeptBatch.fields``, and ``positions`` [B] of the kept rows.
            metadata: that of ``init_tail_metadata``.
        """
        backend = self.tail_backend
        with (
            patched(backend, forward_metadata=metadata),
            rewrite_batch(forward_batch, fields),
            compat.attention.use_backend(backend),
        ):
            yield


def build_pair(
    runner: ModelRunner, model: TextModel, table: compat.backends.BackendTable
) -> BackendPair | None:
    """Return the backends of a runner; None, with a log line, if the tail's cannot be built.

    Args:
        model: the runner's text model.
        table: the model's attention backends (``compat/backends.py``).
    """
    try:
        tail_backend = compat.attention.build_backend(runner, model.layers)
        if compat.backends.may_run_tail(table, tail_backend):
            return BackendPair(runner.attn_backend, tail_backend)
        failure = f"the backend registered as triton is a {type(tail_backend).__name__}"
    except Exception as raised:  # noqa: BLE001 - any failure falls back to stock
        failure = repr(raised)
    log.log_warning(
        f"YOCO fast prefill: the tail's attention backend could not be built ({failure})"
    )
    return None
