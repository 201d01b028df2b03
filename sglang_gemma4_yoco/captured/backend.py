"""CUDA graphs of decode steps, captured and replayed by a graph backend of SGLang's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.environ import envs
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_utils import capture_mode

from sglang_gemma4_yoco import seams


def captured_decode_steps(runner: Any) -> Any | None:
    """SGLang's runner of its own captured decode steps, one graph per batch size; or None."""
    argument = seams.server_arguments()
    config = None if argument is None else argument("cuda_graph_config")
    graphs = getattr(runner, "decode_cuda_graph_runner", None)
    if not isinstance(graphs, DecodeCudaGraphRunner):
        return None  # switched off: SGLang's eager runner stands in its place
    return graphs if getattr(getattr(config, "decode", None), "backend", None) == "full" else None


class GraphBackend:
    """Graphs by key, in a memory pool of their own.

    In the pool of all graphs, memory that is free while one of SGLang's is captured may be in use
    when it is replayed.
    """

    def __init__(self, decode_steps: Any) -> None:
        self._runner = decode_steps
        self._backend = type(decode_steps.backend)(decode_steps)
        self.pool = self._backend._pool = decode_steps.device_module.graph_pool_handle()

    @contextmanager
    def session(self) -> Iterator[None]:
        """The span of ``capture``. With several ranks, all of them enter it together."""
        with (
            capture_mode.model_capture_mode(),
            parallel_state.graph_capture(stream=self._runner.stream) as captured,
            self._backend.capture_session(captured.stream),
        ):
            yield

    def capture(self, key: int, function: Callable[[], Any]) -> None:
        """Run ``function`` twice, then capture it."""
        self._backend.capture_one(key, function)

    def replay(self, key: int) -> Any:
        """Run what was captured; its outputs, which stay where they are until the next replay."""
        return self._backend.replay(key, None)

    def close(self) -> None:
        """Let go of all graphs and of their memory."""
        self._backend.cleanup()


def plan_captured(backend: Any, forward_batch: Any, live: Any | None = None) -> Any:
    """Build ``backend``'s metadata of a decode step in its graphs' own buffers.

    Args:
        forward_batch: the batch that was, or is to be, captured.
        live: the batch to be served, once its lengths and requests have been filled in; None
            before the capture.

    Returns:
        The metadata object.
    """
    with seams.whole_window(backend):
        if live is not None and hasattr(live, "kv_loc_plan"):
            forward_batch.kv_loc_plan = live.kv_loc_plan
        backend.init_forward_metadata_out_graph(forward_batch, in_capture=live is None)
    return backend.forward_metadata


def is_allocated_after_capture(pool: Any) -> bool:
    """Whether most of a pool has no memory before SGLang's graphs are captured (0.5.23)."""
    return bool(getattr(pool, "post_capture_active", False))


def loads_kv_layerwise(pool: Any) -> bool:
    """Whether layers wait for their K and V in this pool: a cache loads them while others run."""
    pools = (pool, *(getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool")))
    return any(getattr(part, "layer_transfer_counter", None) is not None for part in pools)


def borrows_graph_pool() -> bool:
    """Whether SGLang uses the memory of its graphs while none is replayed (0.5.21 and later)."""
    borrows = getattr(envs, "SGLANG_ENABLE_GRAPH_POOL_BORROW", None)
    return borrows is not None and bool(borrows.get())


def drop_graph_buffers(backend: Any) -> None:
    """Free what ``init_cuda_graph_state`` allocated on a backend that nobody else uses."""
    for name in [name for name in vars(backend) if name.startswith("cuda_graph_")]:
        delattr(backend, name)


def free_device_memory(device: torch.device) -> int | None:
    """Bytes that are free on a GPU, what PyTorch holds in reserve among them; None on no GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def end_failed_capture(device: torch.device, backend: GraphBackend) -> None:
    """Leave nothing of a capture that CUDA has broken off.

    Up to torch 2.13 the default random generator stays in capture mode then, so that the first
    sampled token would end the server, and the allocator goes on serving the graph's pool.

    Raises:
        RuntimeError: random numbers cannot be drawn all the same.
    """
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # it had ended
        torch._C._cuda_endAllocateToPool(index, backend.pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
    torch.empty(1, device=device).uniform_()
