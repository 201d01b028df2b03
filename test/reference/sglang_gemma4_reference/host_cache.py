"""SGLang's hierarchical cache on a CPU: K and V are copied to the host, and later back to the pool.

``--hicache-io-backend direct --hicache-mem-layout layer_first`` needs one kernel, which is one line
of PyTorch here. What SGLang copies back into the pool while layers run is as late as it can be: a
layer's K and V are copied when the model waits for them, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch


class LateStream(torch.cpu.Stream):
    """A stream whose work is done, in its order, when an event after it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._work: list[Callable[[], None]] = []
        self.ended = 0

    @property
    def length(self) -> int:
        """How many pieces of work there were so far."""
        return self.ended + len(self._work)

    def add(self, work: Callable[[], None]) -> None:
        """Do it later."""
        self._work.append(work)

    def run_until(self, length: int) -> None:
        """Do what is left of the first ``length`` pieces of work."""
        while self.ended < length:
            self._work.pop(0)()
            self.ended += 1

    def synchronize(self) -> None:
        """Do all that is left."""
        self.run_until(self.length)


class Event(torch.cpu.Event):
    """An event of any stream; of a late one it is over when the work before it is done."""

    def __init__(self) -> None:
        self._stream: LateStream | None = None
        self._length = 0

    def record(self, stream: torch.cpu.Stream | None = None) -> None:
        """After the work that the stream has so far."""
        if stream is None:
            stream = torch.cpu.current_stream()
        self._stream = None
        if isinstance(stream, LateStream):
            self._stream = stream
        self._length = 0
        if self._stream is not None:
            self._length = self._stream.length

    def query(self) -> bool:
        """Complete it, and return True: SGLang calls this between two forwards.

        No code waits for the layers that have slots of their own and read another layer's.
        """
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Do the work before it that is left."""
        if self._stream is not None:
            self._stream.run_until(self._length)


class WaitingStream(torch.cpu.Stream):
    """The stream that computes: to wait for an event is to complete it."""

    def wait_event(self, event: Event) -> None:
        """Complete it."""
        event.synchronize()


def copy_slots(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,  # noqa: ARG001 - slots of a page are listed one by one
) -> None:
    """Copy slots of each source to slots of its destination, on the current stream."""

    def copy() -> None:
        for source, destination in zip(src_layers, dst_layers, strict=True):
            destination[dst_indices] = source[src_indices]

    stream = torch.cpu.current_stream()
    if isinstance(stream, LateStream):
        stream.add(copy)
    else:
        copy()


def plain_memory(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: Any) -> torch.Tensor:
    """Memory of the host, with nothing to register it with."""
    return torch.empty(dims, dtype=dtype, device=device)


def unpinned(make_page: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """What makes a page that a storage's file is read into, in memory that no GPU knows."""

    @wraps(make_page)
    def make(pool: Any) -> torch.Tensor:
        pool.pin_memory = False
        return make_page(pool)

    return make


def install() -> None:
    """Have SGLang use these instead of a GPU's streams, its memory and its kernel."""
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.pool_host import base, common, mha

    class LateLoads(l2_transfer.L2TransferEngine):
        """Its copies to the device are late; those to the host are made at once."""

        def __init__(self, io_backend: str) -> None:
            super().__init__(io_backend)
            self.host_to_device_stream = LateStream()

    device = SimpleNamespace(
        __name__="host_cache",
        Event=Event,
        Stream=torch.cpu.Stream,
        stream=torch.cpu.stream,
        current_stream=WaitingStream,
    )
    for module in (cache_controller, l2_transfer):
        module.device_module = device
    cache_controller.L2TransferEngine = LateLoads
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # the pools are small, and the machine may be too
    common.ALLOC_MEMORY_FUNCS["cpu"] = plain_memory
    mha.transfer_kv_direct = copy_slots
    pool = mha.MHATokenToKVPoolHost
    pool.get_dummy_flat_data_page = unpinned(pool.get_dummy_flat_data_page)
