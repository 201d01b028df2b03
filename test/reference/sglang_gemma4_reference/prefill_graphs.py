"""SGLang's breakable prefill graphs on a CPU: its runner, backend and breaks, over ``recorder``.

SGLang captures a prefill as one CUDA graph for each part between two attentions, and the
attentions run eagerly between them. ``Segment`` replaces ``torch.cuda.CUDAGraph``. All segments
of a prefill are parts of one recording, so what holds for a recorded graph holds for all of them
together: memory that they allocated lasts from the first one to the last and no longer, and other
memory that they read must still be held when they are replayed.

Beyond the limits of ``recorder``, it cannot show the order of an eager break and the device's own
work, nor memory that a later segment is given while an earlier one still needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    breakable_cuda_graph as breakable,
)

from sglang_gemma4_reference import row_trace
from sglang_gemma4_reference.graph_backend import Pool
from sglang_gemma4_reference.recorder import RecordedGraph, Recording


class RecordedPrefill(RecordedGraph):
    """All segments of one prefill, replayed one after another.

    Attributes:
        pool: the memory pool that it was recorded in; None for its own.
        segments: its parts, in the order of their recording.
        ran: the number of them that have run in the latest replay.
        notes: in a replay, those of the segments that have run.
    """

    def __init__(self, pool: Pool | None) -> None:
        super().__init__()
        self.pool = pool
        self.segments: list[Segment] = []
        self.ran = 0
        if pool is not None:
            pool.add(self)


class Segment:
    """``torch.cuda.CUDAGraph``, as far as SGLang's breakable graphs use it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recording: RecordedPrefill | None = None
        self._mode: Recording | None = None
        self._first = self._end = 0
        self._notes: Counter[Hashable] = Counter()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:  # noqa: ARG002 - CUDA's
        """Capture the following operations, after the segments that this capture already has."""
        capture = breakable._current_capture_var.get()
        if capture is None:
            raise RuntimeError("a segment is recorded outside of SGLang's breakable graphs")
        of_capture = capture.cuda_graph.__dict__
        if "recording" not in of_capture:
            of_capture["recording"] = RecordedPrefill(pool if isinstance(pool, Pool) else None)
        recording = of_capture["recording"]
        self._recording, self._first = recording, len(recording)
        self._notes = recording.notes.copy()
        self._mode = Recording(recording)
        self._mode.__enter__()

    def capture_end(self) -> None:
        """End the capture."""
        assert self._mode is not None
        assert self._recording is not None
        self._mode.__exit__(None, None, None)
        self._mode, self._end = None, len(self._recording)
        self._notes = self._recording.notes - self._notes
        self._recording.segments.append(self)

    def instantiate(self) -> None:
        """Do nothing: there is nothing to instantiate."""

    def replay(self) -> None:
        """Run the segment on the current contents of its tensors.

        Raises:
            FreedMemoryError: memory that the prefill uses is no longer held; nothing was run. Only
                the first segment of a prefill raises it.
        """
        recording = self._recording
        assert recording is not None
        if self is recording.segments[0]:
            recording.begin()
            recording.ran = 0
            recording.notes.clear()
        recording.notes.update(self._notes)
        recording.run(self._first, self._end)
        recording.ran += 1
        if self is recording.segments[-1]:
            recording.spoil()
            if recording.pool is not None:
                recording.pool.spoil_later(recording)


@contextmanager
def recordable() -> Iterator[None]:
    """Let SGLang record prefills in the ``with`` block; it uses CUDA's class on every platform."""
    with mock.patch.object(torch.cuda, "CUDAGraph", Segment):
        yield


def install() -> None:
    """Let a server's process record prefills permanently, and observers read replayed batches."""
    if issubclass(torch.cuda.CUDAGraph, Segment):
        return
    torch.cuda.CUDAGraph = Segment  # type: ignore[misc, assignment] # what it stands for
    stock = PrefillCudaGraphRunner.execute

    def execute(self: Any, forward_batch: Any, **kwargs: Any) -> Any:
        token = row_trace.replayed.set(forward_batch)
        try:
            return stock(self, forward_batch, **kwargs)
        finally:
            row_trace.replayed.reset(token)

    PrefillCudaGraphRunner.execute = execute
