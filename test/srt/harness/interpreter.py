"""Types of fewer than 32 bits in Triton's interpreter, computed as a GPU does.

The interpreter keeps bf16 as integers, which its ``dot`` multiplies as such; and where a mantissa
rounds up to the next power of two, its conversions lose the carry. Both are put right here, by
PyTorch's own conversions, which round to the nearest even; products are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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


def _converted(values: Any, given: Any, wanted: Any, rounding_mode: Any = None) -> Any:
    """``values``, of the Triton type ``given``, as the bits of the type ``wanted``."""
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    tensor = torch.from_numpy(bits.copy()).view(_TYPES[given]).to(_TYPES[wanted])
    size = tensor.element_size()
    return tensor.view(torch.uint8).numpy().view(_BITS[size]).reshape(np.shape(values))


def _dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    """``a @ b + d`` in the type of ``d``."""
    left, right = (
        x.data
        if x.dtype.scalar == tl.float32
        else _converted(x.data, x.dtype.scalar, tl.float32).view(np.float32)
        for x in (a, b)
    )
    return interpreter.TensorHandle(
        np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar
    )


@contextmanager
def small_types() -> Iterator[None]:
    """Conversions and dots of small types are right during the span."""
    with (
        mock.patch.object(interpreter, "_convert_float", _converted),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", _dot),
    ):
        yield
