"""Gemma 4's compiled CUDA kernels, in PyTorch: their checks of arguments, and their results.

``check_...`` refuses what the host code refuses that launches the kernel: types, strides,
alignment, equal row counts. The function beside it writes where the kernel writes, in place where
that does. Both get the kernel's arguments, and then those of its C++ template. The sources of
SGLang's kernels are in ``sglang/kernels/jit/csrc/elementwise``, those of flashinfer's norms in
``flashinfer/norm/kernels`` (0.7.2, which SGLang 0.5.23 requires).

Roundings differ: sums are taken in another order, and the real ones are compiled with fast-math.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb
from torch import Tensor
from torch.nn.functional import gelu, rms_norm

#: C++ template arguments (``sglang/kernels/jit/utils/compile/cpp_args.py``).
_DTYPES = {"fp32_t": torch.float32, "fp16_t": torch.float16, "bf16_t": torch.bfloat16}


def _is_aligned(rows: Tensor, alignment: int) -> bool:
    """Return True if the first row, and so each one, begins at a multiple of ``size`` bytes."""
    bytes_between = rows.stride(0) * rows.itemsize
    return rows.data_ptr() % alignment == 0 and (len(rows) == 1 or bytes_between % alignment == 0)


# ---- SGLang's


def check_activation(rows: Tensor, out: Tensor, kind: str, dtype: str, _early_start: str) -> None:
    """``activation.cuh``: [rows, 2 * width] to [rows, width]."""
    assert kind == "gelu_tanh", f"Gemma 4 has no {kind}"
    assert rows.dtype == out.dtype == _DTYPES[dtype]
    assert rows.is_contiguous()
    assert out.is_contiguous()
    assert rows.shape == (len(out), 2 * out.shape[1])
    assert out.shape[1] * out.itemsize % 16 == 0


def activation(rows: Tensor, out: Tensor, *_: Any) -> None:
    gate, up = rows.float().chunk(2, dim=-1)
    out.copy_(gelu(gate, approximate="tanh") * up)


def check_fused_rope(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, neox: str, width: str, *rest: str
) -> None:
    """``rope.cuh``: heads of 64, 128, 256 or 512, rotated in place."""
    _early_start, k_type, q_type = rest
    assert neox == "true", "only NeoX's layout is written here"
    assert q.dtype == _DTYPES[q_type]
    assert k.dtype == _DTYPES[k_type]
    assert q.itemsize == k.itemsize
    assert len(q) == len(k) == len(positions), "other numbers of rows"
    assert q.shape[2] == k.shape[2] == cos_sin.shape[1] == int(width)
    assert q.stride(2) == k.stride(2) == 1
    assert k.shape[1] == 1 or q.stride(1) == k.stride(1)
    assert cos_sin.dtype == torch.float32
    assert cos_sin.is_contiguous()


def fused_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, *_: Any) -> None:
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    for heads in (q, k):
        heads.copy_(apply_rotary_emb(heads.float(), cos, sin, is_neox_style=True))


def check_kvcache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> None:
    """``kvcache.cuh``: row i of k and v into slot ``indices[i]``, but for one slot."""
    indices, _limit, _skipped, k_bytes, v_bytes, threads, _early_start = rest
    for rows, cache, size in ((k, k_cache, int(k_bytes)), (v, v_cache, int(v_bytes))):
        part = size * 32 // int(threads)
        # ``LoadStorePattern::get_vec_bytes`` of ``include/sgl_kernel/warp.cuh``
        vector = math.gcd(part, 4) if part % 128 else math.gcd(part // 32, 16)
        assert rows.dtype == cache.dtype == k.dtype
        assert rows.shape[1] * rows.itemsize == size
        assert rows.stride(1) == cache.stride(1) == 1
        assert _is_aligned(rows, vector), f"rows are not aligned to {vector} bytes"
        assert len(rows) == len(indices), "other numbers of rows"


def kvcache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> None:
    indices, limit, skipped = rest[:3]
    assert bool((indices >= 0).all())
    assert bool((indices < limit).all())
    written = indices != skipped
    k_cache[indices[written]] = k[written]
    v_cache[indices[written]] = v[written]


def check_clamp_position(out: Tensor, lengths: Tensor, *_: str) -> None:
    """``clamp_position.cuh``."""
    assert out.dtype == lengths.dtype


def clamp_position(out: Tensor, lengths: Tensor, *_: str) -> None:
    out.copy_((lengths - 1).clamp(min=0))


# ---- flashinfer's norms, which CuTe compiles for one width, and for dense rows or others


def check_rmsnorm(*arguments: Any) -> None:
    *tensors, _eps = arguments
    rows = [tensor for tensor in tensors if tensor.dim() > 1]
    [weight] = [tensor for tensor in tensors if tensor.dim() == 1]
    is_dense = all(each.is_contiguous() for each in rows)
    alignment = math.gcd(128, weight.nbytes) if is_dense else 16
    for each in rows:
        assert each.dtype == weight.dtype
        assert each.shape == rows[0].shape
        assert each.shape[-1:] == weight.shape
        assert each.stride(-1) == 1
        assert _is_aligned(each, alignment), f"rows are not aligned to {alignment} bytes"


check_fused_add_rmsnorm = check_rmsnorm


def rmsnorm(input: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    out.copy_(rms_norm(input.float(), weight.shape, weight.float(), eps))


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """In place: ``residual += input``, then ``input`` is its norm."""
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(rms_norm(total, weight.shape, weight.float(), eps))
