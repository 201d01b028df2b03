"""A faster Triton interpreter, which computes types of fewer than 32 bits as a GPU does.

Before a kernel runs, the interpreter wraps each function of ``triton.language``, and does so again,
with the same result, before each function that the kernel calls. That takes nearly half of the
time; here it is done once.

The interpreter stores bf16 as integers, which its ``dot`` multiplies as integers; and if a mantissa
rounds up to the next power of two, its conversions lose the carry. Both are corrected here with
PyTorch's own conversions, which round to the nearest even; products are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def _converted(values: Any, given: Any, wanted: Any, *_: Any) -> Any:
    """Return ``values``, of the Triton type ``given``, as the bits of the type ``wanted``."""
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    tensor = torch.from_numpy(bits.copy()).view(_TYPES[given]).to(_TYPES[wanted])
    size = tensor.element_size()
    return tensor.view(torch.uint8).numpy().view(_BITS[size]).reshape(np.shape(values))


def _dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    """Return ``a @ b + d`` in the type of ``d``."""
    left, right = (
        x.data
        if x.dtype.scalar == tl.float32
        else _converted(x.data, x.dtype.scalar, tl.float32).view(np.float32)
        for x in (a, b)
    )
    return interpreter.TensorHandle(
        np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar
    )


def make_exact() -> None:
    """Correct conversions and dots of small types in this process."""
    interpreter._convert_float = _converted
    interpreter.InterpreterBuilder.create_dot = _dot


def _wrapping_once(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    wrapped: set[ModuleType] = set()

    def patch_lang(fn: Any) -> Any:
        seen = {v for v in fn.__globals__.values() if isinstance(v, ModuleType)} & {tl, tl.core}
        if seen and seen <= wrapped:
            return interpreter._LangPatchScope()
        outermost = not wrapped
        wrapped.update(seen)
        scope = stock(fn)
        if outermost:
            stock_restore = scope.restore

            def restore() -> None:
                wrapped.clear()
                stock_restore()

            scope.restore = restore
        return scope

    return patch_lang


def make_quick() -> None:
    """Speed up the interpreter in this process."""
    interpreter._patch_lang = _wrapping_once(interpreter._patch_lang)
