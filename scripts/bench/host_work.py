"""What does the host do in one forward? Operations, launches, reads of the device, time by region.

Looks from outside of the package, in passes of their own, since counting slows the host down:
``count`` returns how often, ``clock`` how long.

What a replayed graph runs is the device's work, so for ``count`` the replay itself is one
operation. ``clock`` does not run the CPU's captured graphs, whose outputs stay as the last replay
left them: a GPU's host does not do that work either, and here it would leave the caches cold for
what follows. It leaves a CUDA graph's replay out of the time.

Each segment of a captured prefill is such a graph. What runs between two segments is the host's
work, and belongs to the layer whose attention it is.

An attention call of the CPU platform's own backend is one operation too, in place of a kernel. All
that is dispatched counts, views and allocations as well. Reads are those that ``host_reads`` sees.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_gemma4_reference import host_reads, releases
from sglang_gemma4_reference.attention import WindowedTorchNativeBackend
from sglang_gemma4_reference.recorder import RecordedGraph, unseen

# In the order of a forward. The donor layer is S-1, the tail ends where the final norm begins.
REGIONS = ("planning", "front", "donor layer", "tail", "rest")


@dataclass
class Counts:
    """How often the host did something in one forward.

    Attributes:
        operations: dispatched to the device, by region; replays are among them.
        replays: of graphs.
        triton_launches: of Triton's kernels.
        device_reads: values that the host waited for.
    """

    operations: Counter[str] = field(default_factory=Counter)
    replays: int = 0
    triton_launches: int = 0
    device_reads: int = 0


class _Regions:
    """Where in a forward of ``engine`` the host is, as long as ``followed``."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._now = "rest"
        self._since = time.perf_counter()
        self._of_segments = _regions_of_segments(engine)
        self.seconds: dict[str, float] = defaultdict(float)

    @property
    def now(self) -> str:
        return self._now

    def enter(self, region: str) -> str:
        """From here on it is in ``region``; returns where it was."""
        moment = time.perf_counter()
        self.seconds[self._now] += moment - self._since
        before, self._now, self._since = self._now, region, moment
        return before

    @contextmanager
    def within(self, region: str) -> Iterator[None]:
        before = self.enter(region)
        try:
            yield
        finally:
            self.enter(before)

    def at_replay(self, graph: Any) -> None:
        """A graph is about to be replayed, maybe a segment of a prefill."""
        if id(graph) in self._of_segments:
            self.enter(self._of_segments[id(graph)])

    @contextmanager
    def followed(self) -> Iterator[None]:
        model, backend = self._engine.text_model, self._engine.runner.attn_backend
        plan = self._inside("planning", backend.init_forward_metadata)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(backend, "init_forward_metadata", plan))
            if self._of_segments:
                segments = prefill_backend(self._engine)
                # From the first segment to the last, and what is done behind the last one.
                replay = self._inside("rest", segments.replay)
                stack.enter_context(mock.patch.object(segments, "replay", replay))
            for layer, region in _begins(model.config).items():
                hook = model.layers[layer].register_forward_pre_hook(self._entering(region))
                stack.callback(hook.remove)
            # On the fast path a norm that changes nothing comes before K and V and the tail.
            hook = model.norm.register_forward_pre_hook(self._at_the_norm)
            stack.callback(hook.remove)
            hook = model.register_forward_hook(self._entering("rest"))
            stack.callback(hook.remove)
            self._since = time.perf_counter()
            yield
            self.enter("rest")

    def _at_the_norm(self, *_: Any) -> None:
        self.enter("donor layer" if self._now == "front" else "rest")

    def _entering(self, region: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.enter(region)

        return hook

    def _inside(self, region: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self.within(region):
                return call(*args, **kwargs)

        return inside


def _begins(config: Any) -> dict[int, str]:
    """The regions by the layer that each begins with."""
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    return {0: "front", first_shared - 1: "donor layer", first_shared: "tail"}


def prefill_backend(engine: Any) -> Any:
    """SGLang's backend that replays prefills in segments, or None."""
    runner = getattr(engine.runner, "prefill_cuda_graph_runner", None)
    backend = getattr(runner, "backend", None)
    return backend if hasattr(backend, "_graphs") else None


def _regions_of_segments(engine: Any) -> dict[int, str]:
    """By the identity of a segment, the region of the layer whose attention it leads to."""
    graphs = getattr(prefill_backend(engine), "_graphs", {}).values()
    begins, found = _begins(engine.text_model.config), {}
    for graph in graphs:
        region = ""
        for layer, segment in enumerate(graph._segments):
            region = begins.get(layer, region)
            found[id(segment)] = region
    return found


def outside_of_layers(seconds: Mapping[str, float]) -> float:
    """Of the seconds by region, those of planning and of the rest: where no layer runs."""
    return seconds["planning"] + seconds["rest"]


def clock(engine: Any, forward: Callable[[], Any]) -> dict[str, float]:
    """Seconds of one ``forward`` by region, without those in which a graph was replayed."""
    regions = _Regions(engine)
    with ExitStack() as stack:
        # A mock in its place takes longer.
        stack.enter_context(mock.patch.object(RecordedGraph, "replay", lambda _: None))  # noqa: PT008
        for segment in _cpu_segments():
            stack.enter_context(mock.patch.object(segment, "replay", _method(regions.at_replay)))
        replay = functools.partial(_replayed, torch.cuda.CUDAGraph.replay, regions)
        stack.enter_context(mock.patch.object(torch.cuda.CUDAGraph, "replay", _method(replay)))
        stack.enter_context(regions.followed())
        forward()
    return {region: regions.seconds.get(region, 0.0) for region in REGIONS}


def _replayed(stock: Callable[..., Any], regions: _Regions, graph: Any) -> None:
    regions.at_replay(graph)
    with regions.within("replay"):
        stock(graph)


def _method(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` as a function, which binds to an instance as a partial object does not."""
    return lambda *args, **kwargs: call(*args, **kwargs)


def count(engine: Any, forward: Callable[[], Any]) -> Counts:
    """How often the host did what in one ``forward``."""
    counts, regions = Counts(), _Regions(engine)

    def operation(*_: Any) -> None:
        counts.operations[regions.now] += 1

    def replay(graph: Any) -> None:
        regions.at_replay(graph)
        operation()
        counts.replays += 1

    def launch(*_: Any) -> None:
        counts.triton_launches += 1

    def read(_: str) -> None:
        counts.device_reads += 1

    # Where a CPU's server records prefills, CUDA's class is the CPU's.
    graphs = {RecordedGraph, torch.cuda.CUDAGraph, *_cpu_segments()}
    with ExitStack() as stack:
        for owner, name, note in (
            (WindowedTorchNativeBackend, "forward_extend", operation),
            (WindowedTorchNativeBackend, "forward_decode", operation),
            *((graph, "replay", replay) for graph in graphs),
            *((owner, name, launch) for owner, name in _launchers()),
        ):
            noting = functools.partial(_noted, getattr(owner, name), note)
            stack.enter_context(mock.patch.object(owner, name, _method(noting)))
        stack.enter_context(regions.followed())
        stack.enter_context(host_reads.noted(read))
        stack.enter_context(_Dispatched(operation))
        forward()
    return counts


def _noted(
    stock: Callable[..., Any], note: Callable[..., None], /, *args: Any, **kwargs: Any
) -> Any:
    note(*args[:1])
    with unseen():
        return stock(*args, **kwargs)


def _cpu_segments() -> list[Any]:
    """What stands for a segment of a captured prefill on a CPU."""
    if not releases.records_prefills():
        return []
    from sglang_gemma4_reference.prefill_graphs import Segment

    return [Segment]


def _launchers() -> list[tuple[Any, str]]:
    """Through what Triton launches its kernels: compiled ones, and those in its interpreter."""
    try:
        from triton.runtime.interpreter import GridExecutor
        from triton.runtime.jit import JITFunction
    except ImportError:
        return []
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
