"""A mode in which Gemma 4's text model runs on a CPU the code that it runs on CUDA.

``GEMMA4_CPU_BRANCHES=cuda TRITON_INTERPRET=1`` turns it on, in SGLang 0.5.23 alone:

- Every fused operation dispatches to its ``forward_cuda``.
- Four modules are as if imported on CUDA: norms, activations, rotary embeddings and K/V pools.
  Statements that their import skipped on a CPU are run now, unchanged.
- Inside the text model and the logits processor ``is_cuda`` of each tensor is True: for SGLang's
  layers, its wrappers of kernels, plugins.
- Triton's kernels run in its interpreter: the fused q/k/v norm, the softcap, the index builders,
  attention, which splits and blocks as on an H200.
- Compiled kernels have stand-ins that write the same memory and check the same arguments
  (``cuda_kernels``).

What it cannot show, beside what a stand-in cannot:

- whatever reads a *device*, as in ``tensor.device.type == "cuda"``: pinned memory, streams,
  synchronisation, CUDA graphs, allocation;
- programmatic dependent launch, and so ``TritonAttnBackend.use_pdl``;
- compiled Triton: types are NumPy's, ``tl.dot`` sums in float32, programs run one after another;
- matrix products: cuBLAS chooses among kernels by shape, so that a sliced weight may round
  differently there. Here it does not;
- more than one rank; images and sound, whose towers keep the CPU's paths, with ``forward_cuda`` of
  operations that they share;
- sampling, which comes after the logits.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sglang_gemma4_reference import cuda_kernels, interpreter

VARIABLE = "GEMMA4_CPU_BRANCHES"
SGLANG = "0.5.23"  # the release whose modules are named here
_CAPABILITY, _CORES = (9, 0), 132  # of an H200

_inside = 0


def is_wanted() -> bool:
    """Whether this process is to run in the mode.

    Raises:
        ValueError: the variable names another one.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "cuda"):
        raise ValueError(f"{VARIABLE}={value!r}: only 'cuda' is known")
    return value == "cuda"


def install() -> None:
    """Turn the mode on in this process, before a model is built.

    Raises:
        RuntimeError: another SGLang is installed, or Triton does not interpret.
    """
    if version("sglang") != SGLANG:
        raise RuntimeError(f"{VARIABLE} knows SGLang {SGLANG}, not {version('sglang')}")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"{VARIABLE} needs TRITON_INTERPRET=1")
    _compile_with_stand_ins()
    for name in ("layernorm", "activation", "rotary_embedding.base"):
        _run_what_the_import_skipped(import_module(f"sglang.srt.layers.{name}"))
    _choose_as_on_cuda()
    _interpret_tanh()
    interpreter.make_exact()
    _count_triton_kernels()
    _answer_is_cuda()


def _compile_with_stand_ins() -> None:
    """SGLang's own wrappers of the kernels that it compiles stay, down to ``load_jit``."""
    for name in ("activation.activation", "attention.rope", "kvcache.kvcache"):
        wrappers: Any = import_module(f"sglang.kernels.ops.{name}")
        wrappers.load_jit = cuda_kernels.load_jit
        wrappers.is_arch_support_pdl = lambda: _CAPABILITY >= (9, 0)


def _sgl_kernel() -> ModuleType:
    """The package of compiled kernels, as far as the modules below import it."""
    package = ModuleType("sgl_kernel")
    for name in ("rmsnorm", "fused_add_rmsnorm"):
        setattr(package, name, getattr(cuda_kernels, name))
    unused = ("gemma_rmsnorm", "gemma_fused_add_rmsnorm", "silu_and_mul", "gelu_and_mul")
    for name in (*unused, "gelu_tanh_and_mul"):
        setattr(package, name, cuda_kernels.not_of_gemma_4)
    return package


def _run_what_the_import_skipped(module: Any) -> None:
    """Run those of the module's top-level statements that test ``_is_cuda``, with True."""
    module._is_cuda = True
    skipped: list[ast.stmt] = [
        statement
        for statement in ast.parse(inspect.getsource(module)).body
        if isinstance(statement, ast.If)
        and any(isinstance(n, ast.Name) and n.id == "_is_cuda" for n in ast.walk(statement.test))
    ]
    code = compile(ast.Module(skipped, type_ignores=[]), inspect.getfile(module), "exec")
    with mock.patch.dict(sys.modules, {"sgl_kernel": _sgl_kernel()}):
        exec(code, module.__dict__)  # SGLang's own statements


def _choose_as_on_cuda() -> None:
    """Set what SGLang reads from its platform or its device when it chooses among kernels."""
    from sglang.kernels.ops.attention import extend_attention
    from sglang.srt.layers import activation
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.layers.rotary_embedding import base as rotary
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.platforms.interface import SRTPlatform

    memory_pool._is_cuda = True
    activation._jit_act_max_vec_bytes = 16  # read from the device where it is None
    # An out-of-tree platform is never given the kernel for heads of other widths than a GPU's.
    rotary.current_platform = SRTPlatform()
    extend_attention._is_cuda, extend_attention.CUDA_CAPABILITY = True, _CAPABILITY
    triton_backend.get_device_core_count = lambda *_: _CORES


def _interpret_tanh() -> None:
    """Triton's interpreter has no function of CUDA's device library; the softcap calls one."""
    import triton.language as tl
    from sglang.kernels.ops.activation import softcap

    softcap.libdevice = SimpleNamespace(tanh=lambda x: 2 * tl.sigmoid(2 * x) - 1)


def _count_triton_kernels() -> None:
    """Count each launch in ``cuda_kernels.calls``, by the kernel's name."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    @functools.wraps(launch)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        cuda_kernels.calls[self.fn.__name__] += 1
        return launch(self, *args, **kwargs)

    GridExecutor.__call__ = counted


def _answer_is_cuda() -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.models.gemma4_causal import Gemma4TextModel

    original: Any = torch.Tensor.is_cuda  # a descriptor, of the class
    answer: Any = property(lambda tensor: _inside > 0 or original.__get__(tensor))
    torch.Tensor.is_cuda = answer
    for model in (Gemma4TextModel, LogitsProcessor):
        # Not their ``forward``: a package that wraps it runs layers after it has returned.
        model.__call__ = _as_on_cuda(model.__call__)


def _as_on_cuda(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def inside(*args: Any, **kwargs: Any) -> Any:
        global _inside
        _inside += 1
        try:
            return forward(*args, **kwargs)
        finally:
            _inside -= 1

    return inside
