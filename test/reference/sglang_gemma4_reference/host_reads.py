"""Detection, on a CPU, of operations for which a GPU's host would wait.

A read of a device's value stalls the host until all queued kernels have run. Each such read goes
through one of a few PyTorch operations, or through one of a few methods of a tensor that run no
operation on a CPU.

Not detected: reads by compiled extensions, and copies that name no device. A copy to a named device
counts even if the tensor is already there, since on a CPU it always is.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

#: The result, or its shape, depends on values, for which the host waits.
READING_OPERATIONS = {
    aten._local_scalar_dense,  # item(), int(), bool(), a tensor as a slice's bound or as a size
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.allclose,
    aten._unique,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# Detected before the dispatcher: on a CPU tensor these run no operation.
_READING_FUNCTIONS = {
    torch.Tensor.tolist,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
}
# From host values, into pageable memory: CUDA copies those while the host waits.
_COPYING_FUNCTIONS = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}


@contextmanager
def noted(note: Callable[[str], None]) -> Iterator[None]:
    """Call ``note`` with the name of each such operation before it runs, in the ``with`` block."""
    with _Functions(note), _Operations(note):
        yield


@contextmanager
def counted(*passed_over: str) -> Iterator[Counter[tuple[str, str]]]:
    """Count each (operation, ``caller``) in the ``with`` block."""
    seen: Counter[tuple[str, str]] = Counter()

    def note(kind: str) -> None:
        seen[kind, caller(*passed_over)] += 1

    with noted(note):
        yield seen


def caller(*passed_over: str) -> str:
    """Return ``path:function`` of the innermost code outside of PyTorch and the given files."""
    frame = sys._getframe(1)
    torch_home = str(Path(torch.__file__).parent)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(torch_home)
        or frame.f_code.co_filename in (__file__, *passed_over)
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_code.co_name}"


class _Operations(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch gives it no annotations
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        by_mask = packet in INDEXING and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        # Without output_size the repeats are summed up on the host.
        repeats = func is aten.repeat_interleave.Tensor and not (kwargs or {}).get("output_size")
        if packet in READING_OPERATIONS or by_mask or repeats:
            self._note(packet.__name__)
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READING_FUNCTIONS:
            self._note(func.__name__)
        elif func is torch.Tensor.to and _device(args, kwargs) is not None:
            if not kwargs.get("non_blocking"):
                self._note("to(device)")
        elif func in _COPYING_FUNCTIONS and kwargs.get("device") is not None:
            self._note(f"{func.__name__}(device)")
        return func(*args, **kwargs)


def _device(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the device that ``Tensor.to`` moves to, or None."""
    given = [kwargs.get("device"), *args[1:2]]
    return next((d for d in given if isinstance(d, (str, torch.device))), None)


@contextmanager
def refusing_waits(owner: Any, method: str) -> Iterator[None]:
    """Let CUDA refuse every wait of the host for the device inside this method, in the block."""
    # Imported late, so that it is the copy of the package that is under test.
    from sglang_gemma4_yoco.patched import patched

    stock = getattr(owner, method)

    def refusing(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return stock(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with patched(owner, **{method: refusing}):
        yield
