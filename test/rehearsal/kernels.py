"""Kernels that are not PyTorch's: Triton's, SGLang's own and flashinfer's.

Triton compiles and launches for real; no kernel of SGLang or flashinfer is compiled, which takes
minutes, so their stand-ins check the arguments that the real host code checks. Every compilation of
this process is recorded with its place.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

import triton
from rehearsal import compiled_kernels, operations, triton_kernels

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


# ---- kernels that are not compiled here


def _launch(name: str, args: Any, compute: Callable[..., None]) -> None:
    """Count a launch on arguments that have been checked, and compute."""
    for tensor in operations.tensors_in(args):
        if not tensor.is_cuda:
            raise RuntimeError(f"{name}: a tensor is on the {tensor.device}")
    code = operations.RUNTIME.rehearsal_launch(operations.current_stream())
    if code:
        raise RuntimeError(f"CUDA error {code} at the launch of {name}")
    _run_kernel(name, compute, args, {})


class _Module:
    """A module of SGLang's that nvcc compiles when it is first called; it has one kernel."""

    def __init__(self, stand_in: Any) -> None:
        self._stand_in = stand_in

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self._stand_in.check(*args)
            _launch(name, args, self._stand_in.compute)

        return call


def replace_sglangs_kernels() -> None:
    """After the modules that call them were imported."""
    stock: Any = import_module("sglang.kernels.jit.utils").load_jit

    def load_jit(name: str, *template: str, **_: Any) -> _Module:
        _note_compilation(f"{name} {template}")
        return _Module(compiled_kernels.load_jit(name, *template))

    for module in list(sys.modules.values()):
        if getattr(module, "load_jit", None) is stock:
            module.load_jit = load_jit  # type: ignore[attr-defined]


def replace_flashinfers_norms() -> None:
    """SGLang 0.5.23 calls flashinfer's CuTe norms where flashinfer is installed."""
    norm: Any = import_module("flashinfer.norm")

    def note(name: str, early_start: object, *rows: torch.Tensor) -> None:
        dense = compiled_kernels.is_dense(*rows)
        first = rows[0]
        _note_compilation(f"{name} {first.dtype} {first.shape[-1]} {early_start} {dense}")

    def rmsnorm_cute(input: Any, weight: Any, out: Any, eps: float, *rest: Any, **how: Any) -> None:
        note("rmsnorm", (rest, how), input, out)
        compiled_kernels.check_norm(weight, input, out)
        _launch("rmsnorm", (input, weight, out, eps), compiled_kernels.rmsnorm)

    def fused_add_rmsnorm_cute(
        input: Any, residual: Any, weight: Any, eps: float, *rest: Any, **how: Any
    ) -> None:
        note("fused_add_rmsnorm", (rest, how), input, residual)
        compiled_kernels.check_norm(weight, input, residual)
        compute = compiled_kernels.fused_add_rmsnorm
        _launch("fused_add_rmsnorm", (input, residual, weight, eps), compute)

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


@functools.cache
def install() -> None:
    """All of it, after ``import sglang``'s modules and before a model is built.

    Once in a process: a kernel that were followed twice would be computed twice, in place.
    """
    follow_triton()
    replace_sglangs_kernels()
    replace_flashinfers_norms()
    replace_cuda_python()
