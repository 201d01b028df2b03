"""SGLang's captured decode steps, and its capture and replay of CUDA graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor import runner as runners
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
    DecodeInputBuffers as DecodeInputBuffers,
)
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

from sglang_gemma4_yoco.compat import server
from sglang_gemma4_yoco.compat.server import ModelRunner

_RESERVE = 1 << 30  # bytes that must be free before a capture, which takes less than a tenth


def get_captured_steps(runner: ModelRunner) -> DecodeCudaGraphRunner | None:
    """Return SGLang's runner of captured decode steps, one graph per batch size, or None."""
    graphs = runner.decode_cuda_graph_runner
    if server.get_cuda_graph_backend("decode") == "full" and isinstance(
        graphs, DecodeCudaGraphRunner
    ):
        return graphs
    return None


def make_graph_backend(decode_steps: DecodeCudaGraphRunner) -> Any:
    """Return an SGLang graph backend with its own memory pool.

    In the pool of SGLang's graphs, memory that is free in a capture may be in use in a replay.
    """
    kind: Any = type(decode_steps.backend)
    backend = kind(decode_steps)
    backend._pool = decode_steps.device_module.graph_pool_handle()
    return backend


@contextmanager
def capture_session(decode_steps: DecodeCudaGraphRunner, backend: Any) -> Iterator[None]:
    """Let ``backend`` capture in the block, which all ranks enter together."""
    with (
        # As SGLang does around its own captures: freeing memory in one may abort it.
        runners.freeze_gc(bool(server.read_argument("enable_cudagraph_gc"))),
        model_capture_mode(),
        graph_capture(stream=decode_steps.stream) as captured,
        backend.capture_session(captured.stream),
    ):
        yield


def find_memory_reason(device: torch.device) -> str | None:
    """Return why nothing can be captured, or None; a failed capture would stop every rank."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # PyTorch's cached blocks are free
    free, _ = torch.cuda.mem_get_info(device)
    if free >= _RESERVE:
        return None
    # Without the number: ranks compare their reasons, and the number differs.
    return f"less than {_RESERVE >> 20} MiB of GPU memory is free: lower --mem-fraction-static"
