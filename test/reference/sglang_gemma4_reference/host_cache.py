"""SGLang's hierarchical cache on a CPU: K and V are copied to the host, and later back to the pool.

``--hicache-io-backend direct --hicache-mem-layout layer_first`` needs one kernel, which is one line
of PyTorch here. Copies back into the pool while layers run are deferred as long as possible: a
layer's K and V are copied when the model waits for them, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch


class LateStream(torch.cpu.Stream):
    """Stream whose work is deferred until an event after it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._work: list[Callable[[], None]] = []
        self.ended = 0

    @property
    def length(self) -> int:
        """Return the number of pieces of work so far."""
        return self.ended + len(self._work)

    def add(self, work: Callable[[], None]) -> None:
        """Defer a piece of work."""
        self._work.append(work)

    def run_until(self, length: int) -> None:
        """Run those of the first ``length`` pieces of work that remain."""
        while self.ended < length:
            self._work.pop(0)()
            self.ended += 1

    def synchronize(self) -> None:
        """Run all remaining work."""
        self.run_until(self.length)


class Event(torch.cpu.Event):
    """Event of any stream; on a late stream it is complete when the work before it is done."""

    def __init__(self) -> None:
        self._stream: LateStream | None = None
        self._length = 0

    def record(self, stream: torch.cpu.Stream | None = None) -> None:
        """Record the work that the stream has so far."""
        if stream is None:
            stream = torch.cpu.current_stream()
        self._stream = None
        if isinstance(stream, LateStream):
            self._stream, self._length = stream, stream.length

    def query(self) -> bool:
        """Complete the event, and return True; SGLang calls this between two forwards.

        No code waits for the copies of layers that read another layer's slots: they run here.
        """
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Run the remaining work before this event."""
        if self._stream is not None:
            self._stream.run_until(self._length)


class WaitingStream(torch.cpu.Stream):
    """Stream of the computation: waiting for an event completes it."""

    def wait_event(self, event: Event) -> None:
        """Complete the event."""
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
    """Return host memory that is not registered with a device."""
    return torch.empty(dims, dtype=dtype, device=device)


def unpinned(make_page: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """Return ``make_page``, the allocator of a storage's pages, without pinned memory."""

    @wraps(make_page)
    def make(pool: Any) -> torch.Tensor:
        pool.pin_memory = False
        return make_page(pool)

    return make


def install() -> None:
    """Replace a GPU's streams, memory and kernel in SGLang by those of this module."""
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.pool_host import base, common, mha

    class LateLoads(l2_transfer.L2TransferEngine):
        """Transfer engine whose copies to the device are late; those to the host are immediate."""

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
