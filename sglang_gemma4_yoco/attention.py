"""Attention metadata for the tail: a backend of its own, planned before the first layer runs.

The tail's metadata must not be built in the middle of the forward. Triton's decode metadata reads
device scalars on the host, which there would stall the host until the GPU has finished the front;
and from the end of the backend's own planning on, the scheduler may rewrite the tables it reads.
Nor may it be built on the runner's own backend: two metadata objects of one backend share buffers,
so the second would overwrite the first.

Hence a second backend over the same memory pools, planned right after the first. Where none can
be built, the runner's own backend is rebuilt for the tail and rebuilt again after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_gemma4_yoco import fallback, gate, report, seams
from sglang_gemma4_yoco.shadow import Shadows
from sglang_gemma4_yoco.tail import Tail, rewritten


class TailAttention:
    """The second backend of one runner, and the tail that is planned on it.

    Attributes:
        main: the runner's attention backend.
        tail: a backend of the same kind over the same pools, used by nobody else.
    """

    def __init__(self, model: Any, main: Any, tail: Any) -> None:
        self.main = main
        self.tail = tail
        self._model = model
        self._shadow = Shadows()
        # One forward at a time: the batch planned last, until its tail has run.
        self._planned: tuple[Any, Tail] | None = None
        self._refused: tuple[Any, str] | None = None

    def attach(self) -> None:
        """Plan the tail whenever the runner plans a forward of the model."""
        self._shadow.add(self.main, "init_forward_metadata", self._with_tail)
        self._model.__dict__["_yoco_tail_attention"] = self

    def detach(self) -> None:
        """Leave the runner's backend and the model as they were."""
        self._shadow.close()
        self._model.__dict__.pop("_yoco_tail_attention", None)
        self.release()

    def release(self) -> None:
        """Forget the planned batch and its metadata, which hold device memory."""
        self._planned = self._refused = None
        self.tail.forward_metadata = None

    def planned(self, forward_batch: Any) -> Tail | None:
        """The tail planned for this very batch object, or None."""
        if self._planned is not None and self._planned[0] is forward_batch:
            return self._planned[1]
        return None

    def refusal(self, forward_batch: Any) -> str | None:
        """The reason for which this very batch was refused when it was planned; told once.

        What has changed since then can only make a refusal needless, never wrong.
        """
        refused, self._refused = self._refused, None
        return refused[1] if refused is not None and refused[0] is forward_batch else None

    def _with_tail(self, plan_main: Callable[[Any], None]) -> Callable[[Any], None]:
        def init_forward_metadata(forward_batch: Any) -> None:
            plan_main(forward_batch)
            if forward_batch.forward_mode is not seams.ForwardMode.DECODE:
                self._plan_tail(forward_batch)

        return init_forward_metadata

    def _plan_tail(self, forward_batch: Any) -> None:
        self._planned = self._refused = None
        try:
            reason = gate.ineligible_reason(self._model, forward_batch)
            if reason is not None:
                self._refused = (forward_batch, reason)
                return
            tail = Tail.of(forward_batch)
            with rewritten(forward_batch, tail.fields):
                seams.plan(self.tail, forward_batch)
        except Exception as failure:
            self.release()
            if not fallback.is_alone():
                raise  # the other ranks go on with a tail
            report.failure("Planning the tail's attention failed", failure)
        else:
            self._planned = (forward_batch, tail)


@contextmanager
def on_own_backend(attention: TailAttention, forward_batch: Any, tail: Tail) -> Iterator[None]:
    """The tail's batch on the tail's backend, whose metadata is planned already."""
    try:
        with (
            rewritten(forward_batch, tail.fields),
            seams.attn_backend_switched(attention.tail),
        ):
            yield
    finally:
        attention.release()


@contextmanager
def on_rebuilt_backend(main: Any, forward_batch: Any, tail: Tail) -> Iterator[None]:
    """The tail's batch on the runner's own backend, planned anew here and again on the way out."""
    try:
        with rewritten(forward_batch, tail.fields):
            seams.plan(main, forward_batch)
            yield
    finally:
        main.init_forward_metadata(forward_batch)
