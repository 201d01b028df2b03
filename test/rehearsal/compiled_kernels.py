"""The compiled CUDA kernels that Gemma 4 calls, in PyTorch: what they check, and what they write.

``check`` refuses what the host code refuses that launches the kernel: types, strides, alignment,
equal row counts. ``compute`` writes where the kernel writes, in place where that does. The sources
of SGLang's kernels are in ``sglang/kernels/jit/csrc``, those of flashinfer's norms in
``flashinfer/norm/kernels`` (0.7.2, which SGLang 0.5.23 requires).

Roundings differ: sums are taken in another order, and the real ones are compiled with fast-math.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm

#: C++ template arguments (``sglang/kernels/jit/utils/compile/cpp_args.py``).
_DTYPES = {"fp32_t": torch.float32, "fp16_t": torch.float16, "bf16_t": torch.bfloat16}


class RefusedByKernelError(RuntimeError):
    """The host code of a CUDA kernel would not have launched it on these arguments."""


def _require(*held: tuple[bool, str]) -> None:
    for holds, what in held:
        if not holds:
            raise RefusedByKernelError(what)


def _is_aligned(rows: Tensor, alignment: int) -> bool:
    """Whether the first row, and so each one, begins at a multiple of so many bytes."""
    step = 0 if len(rows) == 1 else rows.stride(0) * rows.itemsize
    return rows.data_ptr() % alignment == 0 and step % alignment == 0


# ---- SGLang's


class Activation:
    """``elementwise/activation.cuh``: [rows, 2 * width] to [rows, width]."""

    def __init__(self, dtype: str, _early_start: str) -> None:
        self._dtype = _DTYPES[dtype]

    def check(self, rows: Tensor, out: Tensor, kind: str) -> None:
        vector = 16 // out.itemsize
        _require(
            (rows.dtype == out.dtype == self._dtype, f"{rows.dtype} and {out.dtype}"),
            (rows.is_contiguous() and out.is_contiguous(), "rows that are not contiguous"),
            (rows.shape == (len(out), 2 * out.shape[1]), "not two halves"),
            (out.shape[1] % vector == 0, f"width is not a multiple of {vector}"),
            (kind == "gelu_tanh", f"Gemma 4 has no {kind}"),
        )

    def compute(self, rows: Tensor, out: Tensor, _: str) -> None:
        gate, up = rows.float().chunk(2, dim=-1)
        out.copy_(gelu(gate, approximate="tanh") * up)


class FusedRope:
    """``elementwise/rope.cuh``: heads of 64, 128, 256 or 512, rotated in place."""

    def __init__(self, neox: str, width: str, _early_start: str, k_type: str, q_type: str) -> None:
        _require((neox == "true", "only NeoX's layout is written here"))
        self._width = int(width)
        self._types = [_DTYPES[q_type], _DTYPES[k_type]]

    def check(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        _require(
            ([q.dtype, k.dtype] == self._types, f"{q.dtype} and {k.dtype}"),
            (q.itemsize == k.itemsize, "q and k have types of other sizes"),
            (len(q) == len(k) == len(positions), "other numbers of rows"),
            (q.shape[2] == k.shape[2] == self._width, f"heads are not {self._width} wide"),
            (q.stride(2) == k.stride(2) == 1, "heads that are not contiguous"),
            (k.shape[1] == 1 or q.stride(1) == k.stride(1), "other steps from head to head"),
            (cos_sin.dtype == torch.float32, "a cache that is not float32"),
            (cos_sin.is_contiguous() and cos_sin.shape[1] == self._width, "another cache"),
        )

    def compute(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
        for heads in (q, k):
            x, y = heads.float().chunk(2, dim=-1)  # NeoX: halves are pairs
            heads.copy_(torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1))


class StoreCache:
    """``elementwise/kvcache.cuh``: row i of k and v into slot ``indices[i]``, but for one slot."""

    def __init__(self, k_bytes: str, v_bytes: str, threads: str, _early_start: str) -> None:
        self._bytes = [int(k_bytes), int(v_bytes)]
        self._parts = int(threads) // 32

    def check(self, k: Tensor, v: Tensor, *rest: Any) -> None:
        k_cache, v_cache, indices = rest[:3]
        for rows, cache, size in zip((k, v), (k_cache, v_cache), self._bytes, strict=True):
            part = size // self._parts
            # ``LoadStorePattern::get_vec_bytes`` of ``include/sgl_kernel/warp.cuh``
            vector = math.gcd(part, 4) if part % 128 else math.gcd(part // 32, 16)
            _require(
                (rows.dtype == cache.dtype == k.dtype, "other types"),
                (rows.shape[1] * rows.itemsize == size, f"rows are not of {size} bytes"),
                (rows.stride(1) == cache.stride(1) == 1, "rows that are not contiguous"),
                (_is_aligned(rows, vector), f"rows are not aligned to {vector} bytes"),
                (len(rows) == len(indices), "other numbers of rows"),
            )

    def compute(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> None:
        indices, size_limit, skipped = rest
        in_range = bool(((indices >= 0) & (indices < size_limit)).all())
        _require((in_range, f"an index is not in [0, {size_limit})"))
        written = indices != skipped
        k_cache[indices[written]] = k[written]
        v_cache[indices[written]] = v[written]


class ClampPosition:
    """``elementwise/clamp_position.cuh``."""

    def check(self, out: Tensor, lengths: Tensor) -> None:
        _require((out.dtype == lengths.dtype, "other types"))

    def compute(self, out: Tensor, lengths: Tensor) -> None:
        out.copy_((lengths - 1).clamp(min=0))


_COMPILED: dict[str, Any] = {
    "activation": Activation,
    "fused_rope": FusedRope,
    "kvcache": StoreCache,
}


def load_jit(name: str, *template_arguments: str) -> Any:
    """What stands for the kernels of one source file, compiled for these arguments."""
    if name.startswith("clamp_position"):
        return ClampPosition()
    if name not in _COMPILED:
        raise NotImplementedError(f"rehearsal: SGLang's {name} has no stand-in")
    return _COMPILED[name](*template_arguments)


# ---- flashinfer's norms


def is_dense(*rows: Tensor) -> bool:
    """Norms are compiled for contiguous rows, and again for others."""
    return all(tensor.is_contiguous() for tensor in rows)


def check_norm(weight: Tensor, *rows: Tensor) -> None:
    """What the kernels check that CuTe compiles for one width and kind of rows."""
    first = rows[0]
    width = first.shape[-1]
    alignment = math.gcd(128, width * first.itemsize) if is_dense(*rows) else 16
    for tensor in rows:
        _require(
            (tensor.dtype == weight.dtype, f"{tensor.dtype} beside {weight.dtype}"),
            (tensor.shape == first.shape, f"{tensor.shape} beside {first.shape}"),
            (tensor.stride(-1) == 1, "rows that are not contiguous"),
            (_is_aligned(tensor, alignment), f"rows are not aligned to {alignment} bytes"),
        )
    _require((weight.shape == (width,), f"{tuple(weight.shape)} weights"))


def rmsnorm(input: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    out.copy_(rms_norm(input.float(), weight.shape, weight.float(), eps))


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """In place: ``residual += input``, then ``input`` is its norm."""
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(rms_norm(total, weight.shape, weight.float(), eps))
