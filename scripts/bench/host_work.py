"""The host's work in one forward: operations, replays, Triton launches, reads of the device.

It is counted from outside of the package, in a separate pass, since counting slows the host down.

Every dispatched operation counts, views and allocations as well. A replay is one operation, since
the operations in its graph are the device's work; each segment of a captured prefill is such a
graph. An attention call of the CPU platform's own backend is one operation too, in place of a
kernel. Reads are those that ``host_reads`` detects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_gemma4_reference import host_reads, releases
from sglang_gemma4_reference.attention import WindowedTorchNativeBackend
from sglang_gemma4_reference.recorder import RecordedGraph, unseen


@dataclass
class Counts:
    """Counts of the host's work in one forward.

    Attributes:
        operations: dispatched to the device; replays are among them.
        replays: of graphs.
        triton_launches: of Triton's kernels.
        device_reads: values that the host waited for.
    """

    operations: int = 0
    replays: int = 0
    triton_launches: int = 0
    device_reads: int = 0


def count(forward: Callable[[], Any]) -> Counts:
    """Return the counts of one ``forward``."""
    seen: Counter[str] = Counter()
    operation = partial(seen.update, ["operations"])
    launch = partial(seen.update, ["triton_launches"])
    replay = partial(seen.update, ["operations", "replays"])

    def read(_: str) -> None:
        seen["device_reads"] += 1

    with ExitStack() as span:
        # If a CPU's server records prefills, CUDA's class is replaced by the CPU's.
        for graph in {RecordedGraph, torch.cuda.CUDAGraph, *_cpu_segments()}:
            span.enter_context(_noted(graph, "replay", replay))
        for owner, name in _launchers():
            span.enter_context(_noted(owner, name, launch))
        for name in ("forward_extend", "forward_decode"):
            span.enter_context(_noted(WindowedTorchNativeBackend, name, operation))
        span.enter_context(host_reads.noted(read))
        span.enter_context(_Dispatched(operation))
        forward()
    return Counts(**seen)


def _noted(owner: Any, name: str, note: Callable[[], None]) -> Any:
    """Count each call of a method in the ``with`` block, without the work inside of it."""
    stock = getattr(owner, name)

    @wraps(stock)
    def noting(*args: Any, **kwargs: Any) -> Any:
        note()
        with unseen():
            return stock(*args, **kwargs)

    return mock.patch.object(owner, name, noting)


def _cpu_segments() -> list[Any]:
    """Return the class of a captured prefill's segments on a CPU, if there is one."""
    if not releases.records_prefills():
        return []
    from sglang_gemma4_reference.prefill_graphs import Segment

    return [Segment]


def _launchers() -> list[tuple[Any, str]]:
    """Return the methods by which Triton launches kernels, compiled and interpreted."""
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    return [(JITFunction, "run"), (GridExecutor, "__call__")]


class _Dispatched(TorchDispatchMode):
    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch gives it no annotations
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._note()
        return func(*args, **(kwargs or {}))
