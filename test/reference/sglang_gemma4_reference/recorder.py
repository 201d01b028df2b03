"""A stand-in for CUDA graphs on a CPU: operations, recorded and replayed.

As with a CUDA graph:

- A replay runs none of the recorded Python code. It reads and writes tensors where they were then;
  a weight that has been given other memory since is not followed.
- Memory that was allocated before is not kept for the graph. If nothing else holds it any more, a
  replay raises; a GPU would read arbitrary values.
- Memory that was allocated while recording belongs to the graph. It is full of NaN (integers: of 1)
  before each replay and, but for the outputs, after it.
- Operations that a capture forbids raise: reads of values (``host_reads``), shapes that depend on
  values, tensors made of the host's numbers, tensors that are given other memory.

A Triton kernel in Triton's interpreter is one node, and so is what goes through ``as_one_node``.
Collectives that fill a tensor argument are nodes too; others raise.

It cannot show: streams, events and races; CUDA's own failures while capturing; workspaces of
libraries; registration of custom all-reduce; launch grids; random numbers; code for CUDA alone.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from sglang_gemma4_reference import host_reads

aten = torch.ops.aten

# They would give a tensor memory other than the graph's.
_REBINDING = {aten.resize_, aten.resize_as_, aten.set_}
# They change only the tensor's shape in place: later calls are recorded with the new one.
_RESHAPING = {aten.t_, aten.transpose_, aten.squeeze_, aten.unsqueeze_, aten.as_strided_}
# They allocate and write nothing, so a replay leaves the memory as it was.
_BLANK = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted),
    *(aten.new_empty, aten.new_empty_strided),
}
# Collectives that fill a tensor that they are given.
_FILLING = {"allreduce_", "_allgather_base_", "broadcast_", "_reduce_scatter_base_"}

T = TypeVar("T")

_recording: ContextVar[Recording | None] = ContextVar("_recording", default=None)

#: The latest replays of this process: for observers of a forward, since no module runs in one.
replays: deque[RecordedGraph] = deque(maxlen=16)


class CaptureError(RuntimeError):
    """The recorded code did something that a capturing CUDA stream refuses."""


class FreedMemoryError(RuntimeError):
    """A replay would read or write memory that its owner has released."""


def is_recording() -> bool:
    """Return True while this thread's operations are being recorded."""
    return _recording.get() is not None


def note(what: Hashable, count: int) -> bool:
    """Count something in the graph's ``notes``; return False if nothing is being recorded."""
    recording = _recording.get()
    if recording is None:
        return False
    recording.graph.notes[what] += count
    return True


def as_one_node(kernel: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call ``kernel``, as one node of the graph if it is being recorded.

    Args:
        kernel: may read and write its arguments, on the host too. All tensors that it touches must
            be arguments, bare or in lists, tuples and dictionaries.
    """
    recording = _recording.get()
    if recording is None:
        return kernel(*args, **kwargs)
    output: T = recording.node(kernel, args, kwargs)
    return output


@contextmanager
def unseen() -> Iterator[None]:
    """Hide the device's work in the ``with`` block from all of PyTorch's modes."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


# ---------------------------------------------------------------- memory


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree of lists, tuples, dictionaries and dataclasses, in its order."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                found += tensors_in(getattr(leaf, field.name))
    return found


def _memory(tensor: torch.Tensor) -> int:
    """Return an id that all tensors on the same memory share while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def _owners(memory: int) -> int:
    return int(torch._C._storage_Use_Count(memory))


# PyTorch itself holds a storage once Python has accessed it.
_UNSEEN = _owners(_memory(alone := torch.empty(1))) - 1


def _in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor on the same memory, which stays there if this one is rebound."""
    return tensor.data


@dataclass
class _Foreign:
    """Memory that the recorded code touched and had not allocated.

    Attributes:
        tensor: the first tensor that was seen on it.
        call: the operation in which it was seen.
        held: the number of the graph's tensors that use it.
    """

    tensor: torch.Tensor
    call: str
    held: int

    def is_let_go(self) -> bool:
        """Return True if only graphs hold the memory."""
        memory = _memory(self.tensor)
        held = sum(graph.held(memory) for graph in _graphs)
        return _owners(memory) - _UNSEEN <= held


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]

    def again(self) -> None:
        """Run the node, and put its results where they were when it was recorded."""
        out = self.function(*self.args, **self.kwargs)
        for then, now in zip(self.outputs, tensors_in(out), strict=True):
            if _memory(then) != _memory(now):
                then.copy_(now)


# ---------------------------------------------------------------- recording

_graphs: weakref.WeakSet[RecordedGraph] = weakref.WeakSet()


class RecordedGraph:
    """Operations on tensors, recorded once: a CPU's ``torch.cuda.CUDAGraph``.

    Attributes:
        outputs: the recorded function's result, which each replay overwrites.
        notes: what observers counted while it was recorded.
    """

    def __init__(self) -> None:
        self.outputs: Any = None
        self.notes: Counter[Hashable] = Counter()
        self._calls: list[_Call] = []
        self._own: dict[int, torch.Tensor] = {}
        self._foreign: dict[int, _Foreign] = {}
        self._constants: dict[int, torch.Tensor] = {}
        _graphs.add(self)

    @classmethod
    def of(cls, function: Callable[[], Any]) -> RecordedGraph:
        """Record one call of ``function``.

        As on a GPU nothing can be read from its outputs before the first replay.

        Raises:
            CaptureError: it cannot be recorded.
        """
        graph = cls()
        with Recording(graph):
            graph.outputs = function()
        graph.spoil()
        return graph

    def __len__(self) -> int:
        """Return the number of nodes of a replay."""
        return len(self._calls)

    def held(self, memory: int) -> int:
        """Return the number of the graph's tensors on this memory, if it is not the graph's own."""
        if memory in self._foreign:
            return self._foreign[memory].held
        return 0

    def undeclared(self, *declared: Any) -> list[tuple[torch.Tensor, str]]:
        """Return accidental captures: a tensor of each foreign memory, and the call on it.

        Args:
            declared: (trees of) tensors that stay where they are for as long as the graph lives.
        """
        known = {*map(_memory, tensors_in(declared)), *self._constants}
        captured = [self._foreign[memory] for memory in self._foreign if memory not in known]
        return [(foreign.tensor, foreign.call) for foreign in captured]

    def replay(self) -> None:
        """Run the graph on the current contents of its tensors.

        Raises:
            FreedMemoryError: memory that it uses is no longer held; nothing was run.
        """
        self.begin()
        self.run()
        with unseen():
            self.spoil(keep=tensors_in(self.outputs))

    def begin(self) -> None:
        """Prepare a replay: overwrite the graph's memory from the one before.

        Raises:
            FreedMemoryError: memory that it uses is no longer held.
        """
        self._must_be_held()
        replays.append(self)
        with unseen():
            self.spoil()

    def run(self, first: int = 0, end: int | None = None) -> None:
        """Run these nodes on the current contents of their tensors."""
        with unseen(), torch.inference_mode():
            for call in self._calls[first:end]:
                call.again()

    def spoil(self, keep: Iterable[torch.Tensor] = ()) -> None:
        """Overwrite all memory of the graph but that of the tensors in ``keep``."""
        kept = {_memory(tensor) for tensor in keep}
        with torch.inference_mode():
            for memory, tensor in self._own.items():
                if memory not in kept:
                    number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
                    whole = tensor.new_empty(0).set_(tensor.untyped_storage())
                    whole.fill_(float("nan") if number else 1)

    def _must_be_held(self) -> None:
        for memory, foreign in self._foreign.items():
            if memory not in self._constants and foreign.is_let_go():
                raise FreedMemoryError(
                    f"{foreign.call} was recorded with a tensor of shape "
                    f"{tuple(foreign.tensor.shape)} that is no longer held"
                )

    # -- while recording ---------------------------------------------------------------------

    def constant(self, tensor: torch.Tensor) -> None:
        """Note a number of the host, which a node keeps as a constant."""
        self._constants[_memory(tensor)] = _in_place(tensor)

    def allocated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note memory that the graph allocated."""
        for tensor in tensors:
            self._own.setdefault(_memory(tensor), _in_place(tensor))

    def add(self, function: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """Append a node."""
        held = functools.partial(self._held, call=_name(function))
        args, kwargs = tree_map_only(torch.Tensor, held, (args, kwargs))
        outputs = tuple(held(tensor) for tensor in tensors_in(out))
        self._calls.append(_Call(function, args, kwargs, outputs))

    def _held(self, tensor: torch.Tensor, call: str) -> torch.Tensor:
        """Return the node's own tensor on this memory."""
        memory, here = _memory(tensor), _in_place(tensor)
        if memory in self._foreign:
            self._foreign[memory].held += 1
        elif memory not in self._own and tensor.numel():
            self._foreign[memory] = _Foreign(here, call, held=1)
        return here


class Recording(TorchDispatchMode):
    """Mode that records every operation of this thread as a node of the graph."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch gives it no annotations
        self.graph = graph
        self._span = ExitStack()

    def __enter__(self) -> Recording:
        if is_recording():
            raise CaptureError("a recording inside a recording")
        with ExitStack() as stack:
            stack.callback(_recording.reset, _recording.set(self))
            stack.enter_context(_interpreted_kernels_as_nodes(self))
            stack.enter_context(host_reads.noted(_refuse))
            super().__enter__()  # type: ignore[no-untyped-call] # torch gives it no annotations
            self._span = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._span.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        if func.namespace == "c10d":
            if packet.__name__ not in _FILLING:
                _refuse(str(func))
            # Its schema does not declare that it writes.
            return self.node(functools.partial(_completed, func), args, kwargs or {})
        if packet in _REBINDING:
            _refuse(str(func))
        if packet is aten.lift_fresh:
            if args[0].dim():
                _refuse("a tensor of the host's numbers")
            self.graph.constant(args[0])
        if packet in _RESHAPING or packet is aten.lift_fresh:
            return func(*args, **(kwargs or {}))
        return self._note(
            func, args, kwargs or {}, writes=func._schema.is_mutable, blank=packet in _BLANK
        )

    def node(self, kernel: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Record a call of ``kernel`` as one node."""
        span = _recording.set(None)  # the kernels that it calls are part of it
        try:
            with unseen():
                return self._note(kernel, args, kwargs, writes=True, blank=False)
        finally:
            _recording.reset(span)

    def _note(
        self, function: Any, args: Any, kwargs: dict[str, Any], *, writes: bool, blank: bool
    ) -> Any:
        inputs = tensors_in((args, kwargs))
        out = function(*args, **kwargs)
        given = {_memory(tensor) for tensor in inputs}
        fresh = [tensor for tensor in tensors_in(out) if _memory(tensor) not in given]
        self.graph.allocated(fresh)
        if writes or (fresh and not blank):  # else a view, or bare memory
            self.graph.add(function, args, kwargs, out)
        return out


def _completed(collective: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operation of ``c10d``, and wait for its work."""
    out = collective(*args, **kwargs)
    out[-1].wait()
    return out


def _refuse(what: str) -> None:
    raise CaptureError(f"{what} while a graph is recorded, in {host_reads.caller(__file__)}")


def _name(function: Any) -> str:
    if isinstance(function, functools.partial):
        if function.args:
            return _name(function.args[0])
        return _name(function.func)
    function = getattr(function, "fn", function)  # of a launch in Triton's interpreter
    return str(getattr(function, "__name__", function))


@contextmanager
def _interpreted_kernels_as_nodes(recording: Recording) -> Iterator[None]:
    """Record each launch of a kernel in Triton's interpreter as one node."""
    from triton.runtime.interpreter import GridExecutor

    stock = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        launched = functools.partial(stock, self)
        if _recording.get() is recording:
            recording.node(launched, args, kwargs)
        else:
            launched(*args, **kwargs)

    GridExecutor.__call__ = launch
    try:
        yield
    finally:
        GridExecutor.__call__ = stock
