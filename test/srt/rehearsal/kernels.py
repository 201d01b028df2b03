"""Kernels that are not PyTorch's: Triton's, SGLang's own and flashinfer's.

Triton compiles and launches for real; no kernel of SGLang or flashinfer is compiled, which takes
minutes, so their stand-ins check the arguments that the real host code checks. Every compilation of
this process is recorded.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from triton.runtime.jit import JITFunction

import triton
from rehearsal import compiled_kernels, operations, triton_kernels
from sglang_gemma4_yoco.patched import patched

#: Each kernel that was compiled in this process, with its arguments' kinds: in order, and once.
compiled: dict[str, None] = {}


def follow_triton() -> None:
    """Compute the results of Triton's kernels, and record compilations.

    Raises:
        AttributeError: at the launch of a kernel that ``triton_kernels`` does not have.
    """
    stock = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = stock(self, *args, grid=grid, warmup=warmup, **dict(kwargs))
        mode = operations.current
        # PyTorch's own are launched within operations, which are computed as a whole.
        if warmup or mode is None or self.fn.__module__.startswith("torch."):
            return kernel
        compute = getattr(triton_kernels, self.fn.__name__)
        given = {key: kwargs[key] for key in kwargs.keys() & set(self.arg_names)}
        named = self.signature.bind(*args, **given)
        named.apply_defaults()
        arguments = (named.arguments,)
        mode.run_kernel(self.fn.__name__, lambda a: compute(SimpleNamespace(**a)), arguments)
        return kernel

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        compiled[f"{fn.name} {compile['specialization_data']}"] = None

    JITFunction.run = run
    triton.knobs.runtime.jit_post_compile_hook = note


def _launch(name: str, *arguments: Any) -> None:
    """Check a compiled kernel's arguments, count its launch, and compute its results."""
    getattr(compiled_kernels, f"check_{name}")(*arguments)
    tensors = operations.tensors_in(arguments)
    assert all(tensor.is_cuda for tensor in tensors), f"{name}: a tensor is on the CPU"
    code = operations.RUNTIME.rehearsal_launch(operations.current_stream())
    assert not code, f"CUDA error {code} at the launch of {name}"
    if operations.current is not None:
        compute = getattr(compiled_kernels, name)
        operations.current.run_kernel(name, compute, arguments)


def replace_sglangs_kernels() -> None:
    """Replace SGLang's kernels, after the modules that call them were imported."""
    stock: Any = import_module("sglang.kernels.jit.utils").load_jit

    class Compiled:
        """Module that nvcc compiles when it is first called; one of its kernels is known."""

        def __init__(self, name: str, *template: str, **_: Any) -> None:
            compiled[f"{name} {template}"] = None
            self._call = lambda *arguments: _launch(name, *arguments, *template)

        def __getattr__(self, name: str) -> Callable[..., None]:
            return self._call

    for module in list(sys.modules.values()):
        if getattr(module, "load_jit", None) is stock:
            module.load_jit = Compiled  # type: ignore[attr-defined]


def replace_flashinfers_norms() -> None:
    """Replace flashinfer's CuTe norms, which SGLang 0.5.23 calls where flashinfer is installed."""
    norm: Any = import_module("flashinfer.norm")

    def follow(name: str) -> Callable[..., None]:
        def call(*arguments: Any, **early_start: Any) -> None:
            tensors = operations.tensors_in(arguments)
            rows = tensors[0]
            is_dense = [tensor.is_contiguous() for tensor in tensors]
            kind = (rows.dtype, rows.shape[-1], arguments[4:], early_start, is_dense)
            compiled[f"{name} {kind}"] = None
            _launch(name, *arguments[:4])

        return call

    for name in ("rmsnorm", "fused_add_rmsnorm"):
        setattr(norm, f"{name}_cute", follow(name))


def replace_cuda_python() -> None:
    """Replace cuda-python, whose own runtime SGLang's breakable graphs ask about a capture."""
    folder = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph"
    module: Any = import_module(f"{folder}.breakable_cuda_graph")

    def find_status(stream: int) -> Any:
        status = ctypes.c_int()
        operations.RUNTIME.cudaStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
        return module.rt.cudaStreamCaptureStatus(status.value)

    module._capture_status = find_status


def compute_pooled_images() -> None:
    """Compute the pooler's floats, from which the number of an image's tokens is found."""
    pooler: Any = import_module("sglang.srt.models.gemma4_vision").Gemma4VisionPooler
    stock = pooler.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with patched(operations.current, floats=True):
            return stock(*args, **kwargs)

    pooler.forward = forward


@functools.cache
def install() -> None:
    """Install all of this, after ``import sglang``'s modules and before a model is built.

    Once in a process: a kernel that were followed twice would be computed twice, in place.
    """
    follow_triton()
    replace_sglangs_kernels()
    replace_flashinfers_norms()
    replace_cuda_python()
    compute_pooled_images()
