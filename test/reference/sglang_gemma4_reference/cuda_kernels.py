"""The compiled CUDA kernels that Gemma 4 calls, in PyTorch: what they write, and what they check.

Each stand-in writes where its kernel writes, in place where that does, and refuses what the host
code that launches the kernel refuses: dtypes, strides, contiguity, alignment, equal row counts. The
sources are named at each; those of SGLang are in ``sglang/kernels/jit/csrc``. What a kernel assumes
and never checks is refused as well, in a message that calls it an assumption.

What they cannot show:

- speed, launches, streams, and whatever comes from one kernel starting before another has ended;
- a read or write outside of a tensor: a wrong row count that no check sees is a crash there, here
  an exception of PyTorch's or nothing;
- roundings: sums are taken in another order, ``tanh`` and ``rsqrt`` are the CPU's, and the kernels
  are compiled with fast-math;
- float32 in ``rmsnorm``, which tests compare with an oracle in: served models are bfloat16, and the
  compiled norms may have been built for two-byte types alone;
- devices: that two tensors are on the same one. Here all are on the CPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import gelu

#: How often each kernel ran, by SGLang's name for it.
calls: Counter[str] = Counter()
#: The norms that flashinfer has compiled, which each process does when it first needs one: the
#: kernel, its width, and whether its rows are contiguous.
norms: set[tuple[str, int, bool]] = set()

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INDICES = (torch.int32, torch.int64)


class RefusedByKernelError(RuntimeError):
    """The host code of a CUDA kernel would not have launched it on these arguments."""


def _require(holds: bool, kernel: str, what: str) -> None:
    if not holds:
        raise RefusedByKernelError(f"{kernel}: {what}")


class _Matcher:
    """``TensorMatcher`` of ``include/sgl_kernel/tensor.h``, for one call of one kernel.

    A size with a name must be the same number wherever the name is.
    """

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self._sizes: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def verify(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: Sequence[str | int | None],
        *,
        dtypes: Sequence[torch.dtype],
        strides: Sequence[str | int | None] | None = None,
        alignment: int = 1,
    ) -> None:
        """Check one argument.

        Args:
            shape: per dimension its size, the name of a size, or None for any.
            strides: likewise, in elements; None demands a contiguous tensor.
            alignment: in bytes, of the first element and of all strides but the last. Memory that
                PyTorch allocates on CUDA begins at a multiple of 512.
        """
        self._require(tensor.dim() == len(shape), f"{name} has {tensor.dim()} dimensions")
        for size, want in zip(tensor.shape, shape, strict=True):
            self._bind(name, "size", size, want)
        if strides is None:
            self._require(tensor.is_contiguous(), f"{name} is not contiguous")
        else:
            for size, stride, want in zip(tensor.shape, tensor.stride(), strides, strict=True):
                # The stride of a dimension of size 1 has no effect, but may be the first to name.
                if size != 1 or (isinstance(want, str) and want not in self._sizes):
                    self._bind(name, "stride", stride, want)
        self._require(tensor.dtype in dtypes, f"{name} is {tensor.dtype}, not one of {dtypes}")
        steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        offsets = [tensor.storage_offset(), *(step for size, step in steps if size != 1)]
        self._require(
            all(offset * tensor.itemsize % alignment == 0 for offset in offsets),
            f"{name} is not aligned to {alignment} bytes",
        )

    def _bind(self, name: str, what: str, got: int, want: str | int | None) -> None:
        if want is None:
            return
        number = self._sizes.setdefault(want, got) if isinstance(want, str) else want
        self._require(got == number, f"{name} has a {what} of {got}, where {want} is {number}")

    def _require(self, holds: bool, what: str) -> None:
        _require(holds, self._kernel, what)


# -- sgl_kernel ------------------------------------------------------------------------------------


def _check_norm_rows(kernel: str, weight: torch.Tensor, **rows: torch.Tensor) -> None:
    """What the kernel that ``sgl_kernel/elementwise.py`` chooses by the type of ``input`` checks.

    In two bytes it is flashinfer's, written in CuTe (0.7.2, ``norm/kernels``, which SGLang 0.5.23
    requires). It is compiled for dense rows, aligned to 128 bytes as far as the width is, and again
    for others, aligned to 16. In float32 it is sgl-kernel's own, for dense rows.
    """
    match, width, alignment = _Matcher(kernel), rows["input"].shape[-1], 1
    strides, aligned_weight = None, 1
    if rows["input"].itemsize == 2:
        dense = all(tensor.is_contiguous() for tensor in rows.values())
        alignment = math.gcd(128, 2 * width) if dense else 16
        strides, aligned_weight = (None, 1), 16
        norms.add((kernel, width, dense))
    for name, tensor in rows.items():
        shape = ("rows", "width")
        match.verify(name, tensor, shape, strides=strides, dtypes=_FLOATS, alignment=alignment)
    match.verify("weight", weight, ("width",), dtypes=_FLOATS, alignment=aligned_weight)
    dtypes = {tensor.dtype for tensor in (weight, *rows.values())}
    _require(len(dtypes) == 1, kernel, f"all arguments have one type, not {dtypes}")


def _rms_normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of float32 rows, in float32."""
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.float()


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sgl_kernel.rmsnorm``: [rows, width], into a new tensor unless one is given."""
    calls["rmsnorm"] += 1
    out = torch.empty_like(input) if out is None else out
    _check_norm_rows("rmsnorm", weight, input=input, out=out)
    return out.copy_(_rms_normed(input.float(), weight, eps))


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
) -> None:
    """``sgl_kernel.fused_add_rmsnorm``: in place, ``residual += input``, ``input = its norm``."""
    calls["fused_add_rmsnorm"] += 1
    _check_norm_rows("fused_add_rmsnorm", weight, input=input, residual=residual)
    apart = input.untyped_storage().data_ptr() != residual.untyped_storage().data_ptr()
    _require(apart, "fused_add_rmsnorm", "input and residual are assumed to lie apart")
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(_rms_normed(total, weight, eps))


def not_of_gemma_4(*_: Any, **__: Any) -> Any:
    """For names that SGLang imports beside these, and that no Gemma 4 calls."""
    raise NotImplementedError("this kernel has no stand-in: Gemma 4's text model never calls it")


# -- kernels that SGLang compiles when they are first called ---------------------------------------


class Activation:
    """``elementwise/activation.cuh``."""

    def __init__(self, dtype: str, _early_start: str) -> None:
        self._dtype = _DTYPES[dtype]

    def run_activation(self, rows: torch.Tensor, out: torch.Tensor, kind: str) -> None:
        """``out = gelu(left half) * right half``; [rows, 2 * width] to [rows, width]."""
        calls["run_activation"] += 1
        match = _Matcher("run_activation")
        match.verify("out", out, ("rows", "width"), dtypes=[self._dtype])
        match.verify("input", rows, ("rows", "both"), dtypes=[self._dtype])
        _require(match["both"] == 2 * match["width"], "run_activation", "not two halves")
        vector = 16 // out.itemsize
        _require(
            match["width"] % vector == 0, "run_activation", f"width is no multiple of {vector}"
        )
        _require(kind == "gelu_tanh", "run_activation", f"Gemma 4 has no {kind}")
        gate, up = rows.float().chunk(2, dim=-1)
        out.copy_(gelu(gate, approximate="tanh") * up)


class FusedRope:
    """``elementwise/rope.cuh``: heads of 64, 128, 256 or 512, with a float32 cache."""

    def __init__(self, neox: str, width: str, _early_start: str, k_type: str, q_type: str) -> None:
        _require(neox == "true", "run_rope", "only NeoX's layout is written here")
        self._width = int(width)
        self._q_type, self._k_type = _DTYPES[q_type], _DTYPES[k_type]

    def run_rope(
        self, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Rotate in place, as many rows of ``k`` and ``positions`` as of ``q``."""
        calls["run_rope"] += 1
        match = _Matcher("run_rope")
        for name, heads, dtype in (("q", q, self._q_type), ("k", k, self._k_type)):
            # One head stride for both, a row stride for each.
            match.verify(
                name,
                heads,
                ("rows", f"{name} heads", self._width),
                strides=(f"{name} stride", "head stride", 1),
                dtypes=[dtype],
            )
        match.verify("cos_sin_cache", cos_sin, (None, self._width), dtypes=[torch.float32])
        match.verify("positions", positions, ("rows",), dtypes=_INDICES)
        _require(q.itemsize == k.itemsize, "run_rope", "q and k have types of other sizes")
        rotation = cos_sin[positions]
        for heads in (q, k):
            heads.copy_(_rotated(heads.float(), rotation))


def _rotated(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """[rows, heads, width] by [rows, width] of cosines and sines; NeoX: halves are pairs."""
    cos, sin = rotation[:, None].chunk(2, dim=-1)
    x, y = heads[..., : rotation.shape[-1]].chunk(2, dim=-1)
    rotated = torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1)
    return torch.cat((rotated, heads[..., rotation.shape[-1] :]), dim=-1)


class StoreCache:
    """``elementwise/kvcache.cuh``."""

    def __init__(self, k_bytes: str, v_bytes: str, threads: str, _early_start: str) -> None:
        self._bytes = {"k": int(k_bytes), "v": int(v_bytes)}
        self._parts = int(threads) // 32
        parts_fit = all(width % self._parts == 0 for width in self._bytes.values())
        _require(parts_fit, "store_cache", f"rows of {self._bytes} bytes in {self._parts} parts")

    def store_cache(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        indices: torch.Tensor,
        size_limit: int,
        skipped: int,
    ) -> None:
        """Copy row i of k and v to the slot ``indices[i]``, but for the slot ``skipped``."""
        kernel = "store_cache"
        calls[kernel] += 1
        match = _Matcher(kernel)
        places = {"k": (k, k_cache), "v": (v, v_cache)}
        for name, (rows, cache) in places.items():
            alignment = _vector_bytes(self._bytes[name] // self._parts)
            for which, tensor, count in (("", rows, "rows"), (" cache", cache, None)):
                match.verify(
                    name + which,
                    tensor,
                    (count, f"{name} width"),
                    strides=(None, 1),
                    dtypes=[k.dtype],
                    alignment=alignment,
                )
            width = match[f"{name} width"] * k.itemsize
            _require(width == self._bytes[name], kernel, f"{name} has rows of {width} bytes")
        match.verify("indices", indices, ("rows",), strides=(None,), dtypes=_INDICES)
        in_range = bool(((indices >= 0) & (indices < size_limit)).all())
        _require(in_range, kernel, f"an index is not in [0, {size_limit})")
        written = indices != skipped
        for rows, cache in places.values():
            cache[indices[written]] = rows[written]


def _vector_bytes(width: int) -> int:
    """``LoadStorePattern::get_vec_bytes`` of ``include/sgl_kernel/warp.cuh``, at most 16 bytes."""
    return math.gcd(width, 4) if width % 128 else math.gcd(width // 32, 16)


# C++ template arguments (``sglang/kernels/jit/utils/compile/cpp_args.py``).
_DTYPES = {"fp32_t": torch.float32, "fp16_t": torch.float16, "bf16_t": torch.bfloat16}

_COMPILED = {
    "activation": Activation,
    "fused_rope": FusedRope,
    "kvcache": StoreCache,
}


def load_jit(name: str, *template_arguments: str, **_: Any) -> Any:
    """``sglang.kernels.jit.utils.load_jit``: a module with the kernels of one source file."""
    if name not in _COMPILED:
        raise NotImplementedError(
            f"{name} has no stand-in: no Gemma 4 text model has called it yet"
        )
    return _COMPILED[name](*template_arguments)
