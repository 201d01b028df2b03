"""Races between streams, and between a stream and the host, by vector clocks.

Each operation's byte ranges are noted with a tick of its stream. An event that is recorded keeps
its stream's clock, a wait for it joins that clock; the host's waits join the device's. Two accesses
of the same bytes on different streams, one of them a write, race when the later one's clock has not
reached the earlier one's tick::

    stream a: write x (tick 5), record e      stream b: wait e, read x   ordered
    stream a: write x (tick 5)                stream b: read x           a race

Kernels that are not PyTorch's count as writing all their arguments: more alarms, never fewer. What
is noted while a graph is captured counts at each of its launches. Pinned host memory counts, other
host memory does not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rehearsal import operations
from rehearsal.device import Kind

HOST = -1
#: Accesses are looked up by parts of 2 MiB.
_PART = 21
#: The last tick of each stream that is known to be over. Of two, ``|`` has the later ones.
Clock = Counter[int]


class _Range(NamedTuple):
    start: int
    end: int
    writes: bool


class _Access(NamedTuple):
    stream: int
    tick: int
    name: str
    place: str


class Races:
    """Observer of ``operations``' accesses and events, which finds unordered pairs."""

    def __init__(self, mode: operations.Computed) -> None:
        self.found: Counter[str] = Counter()
        self.accesses = 0
        #: Names of streams, for the findings.
        self.names: dict[int, str] = {0: "default", HOST: "host"}
        self._clocks: defaultdict[int, Clock] = defaultdict(Counter)
        self._events: defaultdict[int, Clock] = defaultdict(Counter)
        #: By part of the memory and stream: each range's last access, and the last one's tick.
        self._known: defaultdict[int, dict[int, dict[_Range, _Access]]] = defaultdict(dict)
        self._latest: defaultdict[int, Counter[int]] = defaultdict(Counter)
        #: By graph: each range, and the first operation that accesses it.
        self._graphs: defaultdict[int, dict[_Range, str]] = defaultdict(dict)
        mode.accesses = self._hear_access
        mode.events = self._hear_event

    # ---- order

    def _hear_event(self, kind: Kind, what: str, stream: int, handle: int) -> None:
        if kind == Kind.EVENT_RECORD:
            self._tick(stream)
            self._events[handle] = Counter(self._clocks[stream])
        elif kind == Kind.GRAPH_LAUNCH:
            for accessed, name in self._graphs[handle].items():
                self._access(stream, f"a graph's {name}", [accessed])
        elif kind == Kind.EVENT_WAIT and what != "host":
            self._clocks[stream] |= self._events[handle]
        else:
            for clock in self._find_awaited(what, stream, handle):
                self._clocks[HOST] |= clock

    def _find_awaited(self, what: str, stream: int, handle: int) -> list[Clock]:
        """Return the clocks that the host has waited for; a pageable copy orders nothing."""
        if what == "device":
            return list(self._clocks.values())
        if what in ("event", "host"):
            return [self._events[handle]]
        return [self._clocks[stream]] if what == "stream" else []

    def _tick(self, stream: int) -> int:
        """Return a new tick of this stream, after all that the host has done so far."""
        self._clocks[stream] |= self._clocks[HOST]
        self._clocks[stream][stream] += 1
        return self._clocks[stream][stream]

    # ---- accesses

    def _hear_access(
        self, name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        ranges = [*_find_ranges(read, writes=False), *_find_ranges(written, writes=True)]
        if not ranges:
            return
        graph = operations.captured_graph()
        if not any(tensor.is_cuda for tensor in (*read, *written)):
            self._access(HOST, name, ranges)
        elif graph:
            for accessed in ranges:
                self._graphs[graph].setdefault(accessed, name)
        else:
            self._access(operations.current_stream(), name, ranges)

    def _access(self, stream: int, name: str, ranges: Sequence[_Range]) -> None:
        self.accesses += 1
        access = _Access(stream, self._tick(stream), name, operations.place_of_call())
        for accessed in ranges:
            for part in range(accessed.start >> _PART, ((accessed.end - 1) >> _PART) + 1):
                self._compare(part, access, accessed)
                self._known[part].setdefault(stream, {})[accessed] = access
                self._latest[part][stream] = access.tick

    def _compare(self, part: int, access: _Access, own: _Range) -> None:
        clock = self._clocks[access.stream]
        for stream, accesses in self._known[part].items():
            # Most of the time all that another stream has done here is over.
            if stream == access.stream or clock[stream] >= self._latest[part][stream]:
                continue
            for other, earlier in accesses.items():
                overlap = other.start < own.end and own.start < other.end
                is_over = clock[stream] >= earlier.tick
                if overlap and (other.writes or own.writes) and not is_over:
                    both = self._describe(earlier, other), self._describe(access, own)
                    self.found[" | ".join(both)] += 1

    def _describe(self, access: _Access, accessed: _Range) -> str:
        verb = "writes" if accessed.writes else "reads"
        stream = self.names.get(access.stream, str(access.stream))
        return f"{access.name} {verb} on {stream} ({access.place})"


def _find_ranges(tensors: Sequence[torch.Tensor], *, writes: bool) -> list[_Range]:
    """Return the byte ranges of tensors, if they are in device memory or pinned."""
    found: list[_Range] = []
    for tensor in tensors:
        start = tensor.data_ptr()
        if tensor.numel() and (tensor.is_cuda or operations.RUNTIME.rehearsal_is_pinned(start)):
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            found.append(_Range(start, start + (last + 1) * tensor.element_size(), writes))
    return found
