"""Kernels that are not PyTorch's: Triton's, SGLang's own and flashinfer's.

Triton compiles and launches for real; no kernel of SGLang or flashinfer is compiled, which takes
minutes, so their stand-ins check the arguments that the real host code checks. Every compilation of
this process is recorded with its place.
"""

from __future__ import annotations

import ctypes
import enum
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

import triton
from rehearsal import operations, triton_kernels
from sglang_gemma4_reference import cuda_kernels

#: Each kernel that was compiled in this process, by its arguments' kinds, and where.
compiled: dict[str, str] = {}


def _note_compilation(name: str) -> None:
    if name not in compiled:
        compiled[name] = operations.place_of_call()


def _run_kernel(name: str, compute: Callable[..., Any], args: Any, kwargs: Any) -> None:
    if operations.current is not None:
        operations.current.run_kernel(name, compute, args, kwargs)


# ---- Triton


def follow_triton() -> None:
    """Give Triton's kernels values, and record what is compiled.

    Raises:
        NotImplementedError: at the launch of a kernel that ``triton_kernels`` does not know.
    """
    known = {compute.__name__: compute for compute in triton_kernels.KERNELS}
    stock = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = stock(self, *args, grid=grid, warmup=warmup, **dict(kwargs))
        if warmup or operations.current is None:
            return kernel
        name = self.fn.__name__
        if name not in known:
            raise NotImplementedError(f"rehearsal: Triton's kernel {name} has no stand-in")
        options = kwargs.keys() - set(self.arg_names)
        given = {key: kwargs[key] for key in kwargs.keys() - options}
        named = inspect.signature(self.fn).bind(*args, **given)
        named.apply_defaults()
        _run_kernel(
            name, lambda **arguments: known[name](SimpleNamespace(**arguments)), (), named.arguments
        )
        return kernel

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        _note_compilation(f"{fn.name} {compile['specialization_data']}")

    JITFunction.run = run
    triton.knobs.runtime.jit_post_compile_hook = note


# ---- SGLang's, which nvcc compiles when they are first called


class _ClampPosition:
    def clamp_position(self, out: torch.Tensor, lengths: torch.Tensor) -> None:
        out.copy_((lengths - 1).clamp(min=0))


class _Module:
    """A compiled module: each call is one launch, and then computed."""

    def __init__(self, stand_in: object) -> None:
        self._stand_in = stand_in

    def __getattr__(self, name: str) -> Callable[..., None]:
        compute = getattr(self._stand_in, name)

        def call(*args: Any) -> None:
            for tensor in operations.tensors_in(args):
                if not tensor.is_cuda:
                    raise RuntimeError(f"{name}: a tensor is on the {tensor.device}")
            _launch()
            _run_kernel(name, compute, args, {})

        return call


def _launch() -> None:
    code = operations.RUNTIME.rehearsal_launch(operations.current_stream())
    if code:
        raise RuntimeError(f"CUDA error {code} at the launch of a kernel")


def replace_sglangs_kernels() -> None:
    """After the modules that call them were imported."""
    stock: Any = import_module("sglang.kernels.jit.utils").load_jit

    def load_jit(name: str, *template: str, **_: Any) -> _Module:
        _note_compilation(f"{name} {template}")
        if name.startswith("clamp_position"):
            return _Module(_ClampPosition())
        return _Module(cuda_kernels.load_jit(name, *template))

    for module in list(sys.modules.values()):
        if getattr(module, "load_jit", None) is stock:
            module.load_jit = load_jit  # type: ignore[attr-defined]


# ---- flashinfer's norms, which it compiles for each width


def _check_norm(
    name: str, weight: torch.Tensor, rows: dict[str, torch.Tensor], *, early_start: bool
) -> None:
    """What flashinfer's compiled host code checks (``flashinfer/norm/kernels``)."""
    first = next(iter(rows.values()))
    contiguous = all(tensor.is_contiguous() for tensor in rows.values())
    width = first.shape[-1]
    _note_compilation(f"{name} {first.dtype} {width} {early_start} {contiguous}")
    for which, tensor in (*rows.items(), ("weight", weight)):
        what = f"flashinfer's {name}: {which}"
        if not tensor.is_cuda:
            raise RuntimeError(f"{what} is on the {tensor.device}")
        if tensor.dtype != first.dtype:
            raise RuntimeError(f"{what} is {tensor.dtype}, not {first.dtype}")
        if tensor.shape[-1] != width or tensor.stride(-1) != 1:
            raise RuntimeError(f"{what}: {tuple(tensor.shape)}, strides {tensor.stride()}")
        alignment = 128 if contiguous and which != "weight" else 16
        if tensor.data_ptr() % alignment:
            raise RuntimeError(f"{what} is not aligned to {alignment} bytes")
    _launch()


def replace_flashinfers_norms() -> None:
    """SGLang 0.5.23 calls flashinfer's CuTe norms where flashinfer is installed."""
    norm: Any = import_module("flashinfer.norm")

    def rmsnorm_cute(
        input: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float = 1e-6,
        weight_bias: float = 0.0,
        enable_pdl: bool = False,
    ) -> None:
        assert weight_bias == 0.0
        _check_norm("rmsnorm", weight, {"input": input, "out": out}, early_start=enable_pdl)
        _run_kernel("rmsnorm", cuda_kernels.rmsnorm, (input, weight, eps, out), {})

    def fused_add_rmsnorm_cute(
        input: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        weight_bias: float = 0.0,
        enable_pdl: bool = False,
    ) -> None:
        assert weight_bias == 0.0
        rows = {"input": input, "residual": residual}
        _check_norm("fused_add_rmsnorm", weight, rows, early_start=enable_pdl)
        compute = cuda_kernels.fused_add_rmsnorm
        _run_kernel("fused_add_rmsnorm", compute, (input, residual, weight, eps), {})

    norm.rmsnorm_cute = rmsnorm_cute
    norm.fused_add_rmsnorm_cute = fused_add_rmsnorm_cute


# ---- what SGLang asks of cuda-python, which links a runtime of its own


class _Bindings:
    """The names are CUDA's."""

    cudaError_t = enum.IntEnum(  # noqa: N815
        "cudaError_t", {"cudaSuccess": 0, "cudaErrorUnknown": 999}
    )
    cudaStreamCaptureStatus = enum.IntEnum(  # noqa: N815
        "cudaStreamCaptureStatus",
        {
            "cudaStreamCaptureStatusNone": 0,
            "cudaStreamCaptureStatusActive": 1,
            "cudaStreamCaptureStatusInvalidated": 2,
        },
    )

    @classmethod
    def cudaStreamGetCaptureInfo(cls, stream: Any) -> tuple[Any, Any, int]:  # noqa: N802
        status = ctypes.c_int()
        handle = ctypes.c_void_p(int(stream))
        code = operations.RUNTIME.cudaStreamIsCapturing(handle, ctypes.byref(status))
        error = cls.cudaError_t(999 if code else 0)
        return error, cls.cudaStreamCaptureStatus(status.value), 0


def replace_cuda_python() -> None:
    """In SGLang's breakable graphs."""
    folder = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph"
    for name in ("breakable_cuda_graph", "cuda_utils"):
        module: Any = import_module(f"{folder}.{name}")
        module.rt = _Bindings


def install() -> None:
    """All of it, after ``import sglang``'s modules and before a model is built."""
    follow_triton()
    replace_sglangs_kernels()
    replace_flashinfers_norms()
    replace_cuda_python()
