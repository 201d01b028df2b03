"""Attention backends: a forward's current one, the tail's own, and its metadata."""

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend as AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend as HybridAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention as RadixAttention
from sglang.srt.model_executor import forward_context as forward_context
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    is_in_tc_piecewise_cuda_graph,
)
from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

from sglang_gemma4_yoco.compat import batch, server
from sglang_gemma4_yoco.compat.backends import TRITON, get_path
from sglang_gemma4_yoco.patched import patched

#: The tail's attention backend, by its name in SGLang's registry.
TAIL_BACKEND = "triton"


def is_capturing() -> bool:
    """Return True if this forward is captured in a CUDA graph, or runs in a piecewise one.

    A captured forward runs its Python code once, for a padded batch. Decisions for that batch would
    be replayed for all others.
    """
    return bool(get_is_capture_mode() or is_in_tc_piecewise_cuda_graph())


def get_current_backend() -> Any | None:
    """Return the attention backend of this forward, or None outside of a forward."""
    if not forward_context.has_forward_context():
        return None
    return forward_context.get_forward_context().attn_backend


def use_backend(backend: Any) -> AbstractContextManager[None]:
    """Make ``backend`` the current attention backend in the ``with`` block."""
    if forward_context.has_forward_context():
        before = forward_context.get_forward_context()
        current = dataclasses.replace(before, attn_backend=backend)
    else:
        current = forward_context.ForwardContext(attn_backend=backend)
    switched: AbstractContextManager[None] = forward_context.forward_context(current)
    return switched


def frees_tables_early(backend: Any) -> bool:
    """Return True if the scheduler may rewrite its tables once ``backend`` has a prefill's
    metadata.

    Backends declare it; the scheduler waits for the whole forward of the others.
    """
    early = backend.shared_read_ends(batch.ForwardMode.EXTEND).name == "PRE_REPLAY"
    return early and not server.read_variable(server.BARRIER_VARIABLE)


def list_parts(backend: Any) -> list[Any]:
    """Return a hybrid's backends for prefill and decode, or a list of the backend itself."""
    if type(backend) is HybridAttnBackend:
        return [backend.prefill_backend, backend.decode_backend]
    return [backend]


def build_backend(runner: Any, layers: Iterable[Any]) -> Any:
    """Return a second backend over the runner's memory pools, of the class registered as Triton's.

    Its window is that of these decoder layers, as for stock's rows. For Gemma 3n the layers'
    ``sliding_window_size`` is 512, while the runner's is 511. Unnecessary once SGLang gives Gemma
    3n's layers the runner's window (docs/upstream/gemma3n_window.md).
    """
    backend = ATTENTION_BACKENDS[TAIL_BACKEND](runner)
    window = find_window(layers)
    if window > 0:
        backend.sliding_window_size = window - 1  # without a row's own key
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = TAIL_BACKEND
    return backend


@cache
def is_triton(kind: type) -> bool:
    """Return True for SGLang's own backend on Triton, and for classes derived from it."""
    return any(get_path(base) == TRITON for base in kind.__mro__)


def _counts_the_window_short(backend: Any) -> bool:
    """Return True if a decode step's window has one key fewer than an extend row's.

    Triton's metadata of a decode step takes min(length, W - 1) keys for a window of W. In extend
    these are the cached keys before the row, which itself is the W-th; in decode the row's own key
    is among them. With W = 3, the row at position 5 sees keys 3, 4, 5 in extend and 4, 5 in decode.
    Unnecessary, as is ``widen_window``, once SGLang's window is the same in both (docs/upstream.md,
    change 4).
    """
    windowed = (getattr(backend, "sliding_window_size", None) or 0) > 0
    return windowed and is_triton(backend.__class__)


def init_tail_metadata(backend: Any, forward_batch: Any) -> None:
    """Build ``backend``'s attention metadata for the tail's batch, over the whole window.

    Reads nothing from the device.
    """
    with ExitStack() as stack:
        if forward_batch.forward_mode is batch.ForwardMode.DECODE:
            stack.enter_context(widen_window(backend))
        if _counts_the_window_short(backend):
            stack.enter_context(_allocate_windows(backend, forward_batch.batch_size))
        backend.init_forward_metadata(forward_batch)


def widen_window(backend: Any) -> AbstractContextManager[None]:
    """Make metadata of decode steps in the block with the window of an extend row."""
    if not _counts_the_window_short(backend):
        return nullcontext()
    return patched(backend, sliding_window_size=backend.sliding_window_size + 1)


def _allocate_windows(backend: Any, requests: int) -> AbstractContextManager[None]:
    """Give Triton's metadata a buffer of the maximum size for the windows' keys.

    Otherwise SGLang reads the number of keys from the device to allocate it. It writes request
    after request and records their starts, so the rest is not read. SGLang passes a buffer in the
    same way when it captures a CUDA graph. Unnecessary once it allocates this buffer without
    reading the device.
    """
    from sglang.srt.layers.attention import triton_backend  # only Triton needs it

    room = requests * backend.sliding_window_size
    buffer = torch.empty(room, dtype=torch.int64, device=backend.device)
    update = partial(triton_backend.update_sliding_window_buffer, window_kv_indices=buffer)
    return patched(triton_backend, update_sliding_window_buffer=update)


def count_keys_in_window(attention: Any) -> int:
    """Return the number of keys in a row's window, its own included; 0 without a window."""
    size: int | None = getattr(attention, "sliding_window_size", None)
    if size is None or size < 0:
        return 0
    return size + 1


def find_window(layers: Iterable[Any]) -> int:
    """Return the largest window of these decoder layers, in keys; 0 if none has one."""
    return max(count_keys_in_window(layer.self_attn.attn) for layer in layers)
