"""Results of device operations, computed on the CPU in the device's memory.

Every operation runs for real first, on the runtime of ``device``: its checks, its allocations, its
launches, its waits. With ``floats=False`` only integers and booleans are computed afterwards:
indices, lengths, positions, tables. What a float holds then is arbitrary, and a model of any size
costs nothing.

While a graph is captured nothing is computed; each launch of the graph computes what it noted.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from rehearsal import device
from sglang_gemma4_reference.host_reads import INDEXING, READING_OPERATIONS

RUNTIME = device.load_runtime()
aten = torch.ops.aten
#: They allocate or describe memory, and write nothing.
WRITES_NOTHING = {
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
    *("set_", "resize_", "detach", "alias", "lift_fresh", "record_stream", "is_pinned"),
    *("_local_scalar_dense", "weak_ref_tensor"),
}
#: The shape of their results depends on values, so the real ones wait for the device and read it.
DEPENDS_ON_VALUES = READING_OPERATIONS - {aten._local_scalar_dense} | {aten.repeat_interleave}
PRODUCTS = {aten.mm, aten.linear}


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def current_stream() -> int:
    return int(torch._C._cuda_getCurrentRawStream(0))


def captured_graph() -> int:
    """Return the graph that the current stream captures, or 0."""
    return int(RUNTIME.rehearsal_captured_graph(current_stream()))


def on_cpu(value: Any) -> Any:
    """Return a CPU tensor on a CUDA tensor's memory, the CPU for a device, others unchanged."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        return None
    if not isinstance(value, Tensor) or not value.is_cuda:
        return value
    storage = value.untyped_storage()
    with torch.inference_mode(False):
        if not storage.nbytes():
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        address = storage.data_ptr() + RUNTIME.rehearsal_host_offset()
        memory = (ctypes.c_uint8 * storage.nbytes()).from_address(address)
        bytes_of_it = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        made = torch.empty(0, dtype=value.dtype)
        return made.set_(bytes_of_it, value.storage_offset(), value.size(), value.stride())


@functools.cache
def _describe_line(filename: str, line: int, function: str) -> str:
    """Return a line of the program; empty for PyTorch's, Triton's and the rehearsal's own."""
    skipped = ("/torch/", "/triton/", "/contextlib.py", f"{device.HERE}/", "<")
    if any(part in filename for part in skipped):
        return ""
    short = "/".join(Path(filename).parts[-3:])
    return f"{short}:{line} {function}"


def place_of_call() -> str:
    """Return the five innermost lines of the program."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < 5:
        code = frame.f_code
        described = _describe_line(code.co_filename, frame.f_lineno, code.co_name)
        if described:
            found.append(described)
        frame = frame.f_back
    return " < ".join(found)


class Computed(TorchDispatchMode):
    """Mode in which operations have results."""

    def __init__(self, *, floats: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.floats = floats
        #: The computations of each graph, at its launch.
        self.graphs: dict[int, list[Callable[[], object]]] = defaultdict(list)
        #: Places where the host waited for the device, and the reasons.
        self.waits: Counter[str] = Counter()
        #: Number of matrix products by their rows, which are a layer's.
        self.product_rows: Counter[int] = Counter()
        #: Called for each operation or kernel: its name, its inputs and its outputs.
        self.accesses: Any = None
        self.events: Any = None
        self._failure: BaseException | None = None
        self._is_computing = False
        self._listener = device.LISTENER(self._hear)
        RUNTIME.rehearsal_listen(self._listener)

    def _hear(self, kind: int, what: bytes, stream: int, handle: int) -> None:
        """Handle an event of the runtime; keep exceptions, which would be lost in its C code."""
        if self._is_computing:
            return
        try:
            if kind == device.Kind.HOST_WAIT:
                self.waits[f"{what.decode()}: {place_of_call()}"] += 1
            if kind == device.Kind.GRAPH_LAUNCH:
                with self._computing():
                    for call in self.graphs[handle]:
                        call()
            if self.events is not None:
                self.events(device.Kind(kind), what.decode(), stream, handle)
        except BaseException as failure:  # noqa: BLE001 - raised by the next operation
            self._failure = failure

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        packet = func.overloadpacket
        used = tensors_in((args, kwargs))
        on_device = any(tensor.is_cuda for tensor in used)
        if on_device and packet in INDEXING:
            args = (args[0], self._without_masks(args[1]), *args[2:])
        if on_device and packet in DEPENDS_ON_VALUES:
            return self._compute_after_waiting(func, args, kwargs)
        if func.namespace == "sglang":  # written in Python: the operations that it calls are seen
            with self:
                key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
                return func.redispatch(key, *args, **kwargs)
        result = func(*args, **kwargs)
        if packet in PRODUCTS:
            self.product_rows[used[0].shape[0]] += 1
        written = tensors_in(result)
        if packet.__name__ in WRITES_NOTHING or func.is_view:
            return result
        if self.accesses is not None:
            self._tell_accesses(func, args, kwargs, written)
        if on_device or any(tensor.is_cuda for tensor in written):
            self._compute_or_note(func, args, kwargs, written)
        return result

    # ---- computation

    def _compute_or_note(self, func: Any, args: Any, kwargs: Any, written: Any) -> None:
        outputs, arguments, keywords = tree_map(on_cpu, (written, args, kwargs))

        def call() -> None:
            results = tensors_in(func(*arguments, **keywords))
            for output, found in zip(outputs, results, strict=bool(results)):
                if output.data_ptr() != found.data_ptr():
                    output.copy_(found)

        self._now_or_at_the_launch(call, written)

    def run_kernel(self, name: str, compute: Callable[..., Any], arguments: Any) -> None:
        """Let ``compute`` write the results of a kernel that is not PyTorch's, after its launch."""
        used = tensors_in(arguments)
        if self.accesses is not None:
            self.accesses(name, [], used)
        here = tree_map(on_cpu, arguments)
        self._now_or_at_the_launch(lambda: compute(*here), used)

    def _now_or_at_the_launch(self, call: Callable[[], object], tensors: Sequence[Tensor]) -> None:
        is_float = any(tensor.is_floating_point() for tensor in tensors)
        if is_float and not self.floats:
            return
        graph = captured_graph()
        if graph:
            self.graphs[graph].append(call)
        else:
            with self._computing():
                call()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Mark the rehearsal's own work: no operation of the program, and no wait of it."""
        before, self._is_computing = self._is_computing, True
        try:
            with _disable_current_modes(), torch.inference_mode():
                yield
        finally:
            self._is_computing = before

    # ---- waits for the device

    def _compute_after_waiting(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Wait, then compute, as real operations whose result's size depends on values."""
        places = {tensor.device.type for tensor in tensors_in((args, kwargs)) if tensor.dim()}
        if len(places) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, got {places}")
        torch.zeros(1, device="cuda").item()
        arguments, keywords = tree_map(on_cpu, (args, kwargs))
        result = func(*arguments, **keywords)
        with self._computing():
            return tree_map_only(Tensor, lambda tensor: tensor.to("cuda"), result)

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
            else:
                with self:
                    found += index.nonzero().unbind(1)
        return found

    # ---- reads and writes

    def _tell_accesses(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        read: list[Tensor] = []
        written: list[Tensor] = []
        schema = {argument.name: argument for argument in func._schema.arguments}
        given = dict(zip(schema, args, strict=False)) | kwargs
        for name, value in given.items():
            alias = schema[name].alias_info
            is_written = alias is not None and alias.is_write
            (written if is_written else read).extend(tensors_in(value))
        known = {tensor.untyped_storage().data_ptr() for tensor in (*read, *written)}
        written += [r for r in results if r.untyped_storage().data_ptr() not in known]
        self.accesses(func.overloadpacket.__name__, read, written)


#: The mode of this process.
current: Computed | None = None


@contextmanager
def computed(*, floats: bool) -> Iterator[Computed]:
    """Compute the results of operations in the ``with`` block; see the module."""
    global current
    current = Computed(floats=floats)
    try:
        with current:
            yield current
    finally:
        RUNTIME.rehearsal_listen(None)
        current = None
