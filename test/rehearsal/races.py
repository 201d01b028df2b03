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
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

import torch

from rehearsal import operations
from rehearsal.device import Kind

HOST = -1
#: Accesses are looked up by parts of 2 MiB.
_PART = 21


class _Range(NamedTuple):
    start: int
    end: int
    writes: bool


@dataclass(frozen=True)
class _Access:
    stream: int
    tick: int
    name: str
    place: tuple[tuple[CodeType, int], ...]


class Clock(Counter[int]):
    """The last tick of each stream that is known to be over."""

    def join(self, other: Clock) -> None:
        for stream, tick in other.items():
            self[stream] = max(self[stream], tick)


class Races:
    """Hears of each access and event of ``operations``, and finds pairs that nothing orders."""

    def __init__(self, mode: operations.Computed) -> None:
        self.found: Counter[str] = Counter()
        self.accesses = 0
        #: Names of streams, for what is found.
        self.names: dict[int, str] = {0: "default", HOST: "host"}
        self._clocks: defaultdict[int, Clock] = defaultdict(Clock)
        self._events: dict[int, Clock] = {}
        #: By part of the memory and stream: each range's last access, and the last one's tick.
        self._known: defaultdict[int, dict[int, dict[_Range, _Access]]] = defaultdict(dict)
        self._latest: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._graphs: defaultdict[int, list[tuple[str, list[_Range]]]] = defaultdict(list)
        mode.accesses = self._hear_access
        mode.events = self._hear_event

    # ---- what is ordered

    def _hear_event(self, kind: Kind, what: str, stream: int, handle: int) -> None:
        if kind == Kind.EVENT_RECORD:
            self._tick(stream)
            clock = Clock()
            clock.join(self._clocks[stream])
            self._events[handle] = clock
        elif kind == Kind.EVENT_WAIT:
            waiting = HOST if what == "host" else stream
            self._clocks[waiting].join(self._events.get(handle, Clock()))
        elif kind == Kind.GRAPH_LAUNCH:
            seen: set[_Range] = set()
            for name, ranges in self._graphs[handle]:
                fresh = [accessed for accessed in ranges if accessed not in seen]
                seen.update(fresh)
                self._access(stream, f"a graph's {name}", fresh)
        elif kind == Kind.HOST_WAIT:
            self._host_has_waited(what, stream, handle)

    def _host_has_waited(self, what: str, stream: int, handle: int) -> None:
        host = self._clocks[HOST]
        if what == "device":
            for clock in list(self._clocks.values()):
                host.join(clock)
        elif what == "event":
            host.join(self._events.get(handle, Clock()))
        elif what == "stream":
            host.join(self._clocks[stream])

    def _tick(self, stream: int) -> int:
        """A step of this stream, which begins after all that the host has done so far."""
        clock = self._clocks[stream]
        if stream != HOST:
            clock.join(self._clocks[HOST])
        clock[stream] += 1
        return clock[stream]

    # ---- what is accessed

    def _hear_access(
        self, name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        ranges = [found for t in read if (found := _range_of(t, writes=False))]
        ranges += [found for t in written if (found := _range_of(t, writes=True))]
        if not ranges:
            return
        if not any(tensor.is_cuda for tensor in (*read, *written)):
            self._access(HOST, name, ranges)
            return
        graph = operations.captured_graph()
        if graph:
            self._graphs[graph].append((name, ranges))
        else:
            self._access(operations.current_stream(), name, ranges)

    def _access(self, stream: int, name: str, ranges: Sequence[_Range]) -> None:
        self.accesses += 1
        access = _Access(stream, self._tick(stream), name, operations.frames_of_call(6))
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
                    self._note(earlier, other, access, own)

    def _note(self, earlier: _Access, other: _Range, access: _Access, own: _Range) -> None:
        def describe(one: _Access, accessed: _Range) -> str:
            verb = "writes" if accessed.writes else "reads"
            stream = self.names.get(one.stream, str(one.stream))
            return f"{one.name} {verb} on {stream} ({operations.describe_place(one.place)})"

        self.found[f"{describe(earlier, other)} | {describe(access, own)}"] += 1


def _range_of(tensor: torch.Tensor, *, writes: bool) -> _Range | None:
    if not tensor.numel():
        return None
    start = tensor.data_ptr()
    if not tensor.is_cuda and not operations.RUNTIME.rehearsal_is_pinned(start):
        return None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return _Range(start, start + (last + 1) * tensor.element_size(), writes)
