"""Attention backends: a forward's current one, the tail's own, and its metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend as AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend as HybridAttnBackend
from sglang.srt.model_executor import forward_context as forward_context
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    is_in_tc_piecewise_cuda_graph,
)
from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

from sglang_gemma4_yoco.compat import batch, server
from sglang_gemma4_yoco.compat.backends import TRITON, get_path
from sglang_gemma4_yoco.compat.batch import ForwardBatch
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.compat.text_model import RadixAttention, TextLayer
from sglang_gemma4_yoco.patched import patched

if TYPE_CHECKING:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

#: The tail's attention backend, by its name in SGLang's registry.
TAIL_BACKEND = "triton"


def is_capturing() -> bool:
    """Return True if this forward is captured in a CUDA graph, or runs in a piecewise one.

    A captured forward runs its Python code once, for a padded batch. Decisions for that batch would
    be replayed for all others.
    """
    return bool(get_is_capture_mode() or is_in_tc_piecewise_cuda_graph())


def get_current_backend() -> AttentionBackend | None:
    """Return the attention backend of this forward, or None outside of a forward."""
    if not forward_context.has_forward_context():
        return None
    return forward_context.get_forward_context().attn_backend


def use_backend(backend: AttentionBackend) -> AbstractContextManager[None]:
    """Make ``backend`` the current attention backend in the ``with`` block."""
    current = forward_context.ForwardContext(attn_backend=backend)
    if forward_context.has_forward_context():
        current = dataclasses.replace(forward_context.get_forward_context(), attn_backend=backend)
    return forward_context.forward_context(current)


def frees_tables_early(backend: AttentionBackend) -> bool:
    """Return True if the scheduler may rewrite its tables once ``backend`` has a prefill's
    metadata.

    Backends declare it; the scheduler waits for the whole forward of the others.
    """
    early = backend.shared_read_ends(batch.ForwardMode.EXTEND).name == "PRE_REPLAY"
    return early and not server.read_variable(server.BARRIER_VARIABLE)


def list_parts(backend: AttentionBackend) -> list[AttentionBackend]:
    """Return a hybrid's backends for prefill and decode, or a list of the backend itself."""
    if type(backend) is HybridAttnBackend:
        return [backend.prefill_backend, backend.decode_backend]
    return [backend]


def build_backend(runner: ModelRunner, layers: Iterable[TextLayer]) -> TritonAttnBackend:
    """Return a second backend over the runner's memory pools, of the class registered as Triton's.

    Its window is that of these decoder layers, as for stock's rows. For Gemma 3n the layers'
    ``sliding_window_size`` is 512, while the runner's is 511. Unnecessary once SGLang gives Gemma
    3n's layers the runner's window (docs/upstream/gemma3n_window.md).
    """
    backend: TritonAttnBackend = ATTENTION_BACKENDS[TAIL_BACKEND](runner)
    window = find_window(layers)
    if window > 0:
        backend.sliding_window_size = window - 1  # without a row's own key
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = TAIL_BACKEND
    return backend


@cache
def is_triton(kind: type) -> bool:
    """Return True for SGLang's own backend on Triton, and for classes derived from it."""
    return any(get_path(base) == TRITON for base in kind.__mro__)


def _find_short_window(backend: AttentionBackend) -> int:
    """Return the window of a decode step that has one key fewer than an extend row's, or 0.

    Triton's metadata of a decode step takes min(length, W - 1) keys for a window of W. In extend
    these are the cached keys before the row, which itself is the W-th; in decode the row's own key
    is among them. With W = 3, the row at position 5 sees keys 3, 4, 5 in extend and 4, 5 in decode.
    Unnecessary, as is ``widen_window``, once SGLang's window is the same in both (docs/upstream.md,
    change 4).
    """
    if not is_triton(backend.__class__):
        return 0
    return max(0, getattr(backend, "sliding_window_size", None) or 0)


def init_tail_metadata(backend: AttentionBackend, forward_batch: ForwardBatch) -> None:
    """Build ``backend``'s attention metadata for the tail's batch, over the whole window.

    Reads nothing from the device.
    """
    with ExitStack() as stack:
        if forward_batch.forward_mode is batch.ForwardMode.DECODE:
            stack.enter_context(widen_window(backend))
        window = _find_short_window(backend)
        if window > 0:
            stack.enter_context(_allocate_windows(forward_batch, window))
        backend.init_forward_metadata(forward_batch)


def widen_window(backend: AttentionBackend) -> AbstractContextManager[None]:
    """Make metadata of decode steps in the block with the window of an extend row."""
    window = _find_short_window(backend)
    if window == 0:
        return nullcontext()
    return patched(backend, sliding_window_size=window + 1)


def _allocate_windows(forward_batch: ForwardBatch, window: int) -> AbstractContextManager[None]:
    """Give Triton's metadata a buffer of the maximum size for the windows' keys.

    Otherwise SGLang reads the number of keys from the device to allocate it. It writes request
    after request and records their starts, so the rest is not read. SGLang passes a buffer in the
    same way when it captures a CUDA graph. Unnecessary once it allocates this buffer without
    reading the device.
    """
    from sglang.srt.layers.attention import triton_backend  # only Triton needs it

    buffer = torch.empty(
        forward_batch.batch_size * window,
        dtype=torch.int64,
        device=forward_batch.seq_lens.device,
    )
    update = partial(triton_backend.update_sliding_window_buffer, window_kv_indices=buffer)
    return patched(triton_backend, update_sliding_window_buffer=update)


def count_keys_in_window(attention: RadixAttention) -> int:
    """Return the number of keys in a row's window, its own included; 0 without a window."""
    return max(0, attention.sliding_window_size + 1)


def find_window(layers: Iterable[TextLayer]) -> int:
    """Return the largest window of these decoder layers, in keys; 0 if none has one."""
    return max(count_keys_in_window(layer.self_attn.attn) for layer in layers)
