"""SGLang's graph backend on a CPU: ``FullCudaGraphBackend``'s counterpart, with ``recorder``.

Graphs of one memory pool share its memory, as on a GPU: what an earlier graph has freed by the end
of its capture, a later one uses for its own tensors. So a replay of the earlier one overwrites the
outputs of the later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool
from sglang.srt.runtime_context import get_flags, get_parallel

from sglang_gemma4_reference.recorder import RecordedGraph

_WARM_UPS = 2


class Pool:
    """Memory pool of graphs, which frees those that nothing else holds."""

    def __init__(self) -> None:
        self._recorded: WeakValueDictionary[int, RecordedGraph] = WeakValueDictionary()

    @property
    def graphs(self) -> list[RecordedGraph]:
        """Return the graphs of this pool that are not freed, in the order of recording."""
        return list(self._recorded.values())

    def add(self, graph: RecordedGraph) -> None:
        """Add a graph that was recorded in this pool."""
        self._recorded[id(graph)] = graph

    def remove(self, graph: RecordedGraph) -> None:
        """Remove a graph that is no longer replayed."""
        del self._recorded[id(graph)]

    def replay(self, graph: RecordedGraph) -> None:
        """Replay a graph, which overwrites the outputs of later ones."""
        graph.replay()
        self.spoil_later(graph)

    def spoil_later(self, graph: RecordedGraph) -> None:
        """Overwrite the outputs of the graphs that were recorded after this one."""
        graphs = self.graphs
        for later in graphs[graphs.index(graph) + 1 :]:
            later.spoil()


class RecordedGraphBackend(BaseCudaGraphBackend):
    """Backend with one recorded graph per shape; the interface is ``FullCudaGraphBackend``'s."""

    def __init__(
        self,
        cuda_graph_runner: Any,
        *,
        enable_memory_saver: bool = False,
        reuse_output_buffer: bool = False,
    ) -> None:
        if enable_memory_saver or reuse_output_buffer:
            raise NotImplementedError(
                "enable_memory_saver and reuse_output_buffer are not supported"
            )
        self._device_module = cuda_graph_runner.device_module
        self._tp_group = get_parallel().tp_group
        self._graphs: dict[Any, RecordedGraph] = {}
        self._pool: Pool | None = None

    @property
    def graphs(self) -> dict[Any, RecordedGraph]:
        """Return the graphs by their shape's key, in the order of their recording."""
        return dict(self._graphs)

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:  # noqa: ARG002 - SGLang's
        """Enter the span of ``capture_one``; the pool is the common one unless ``_pool`` is set."""
        if self._pool is None:
            self._pool = get_or_create_global_graph_memory_pool(self._device_module)
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,  # noqa: ARG002 - not held on to, as on CUDA
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        """Run ``forward_fn`` twice, all ranks together, then record it."""
        if self._pool is None:
            raise RuntimeError("capture_one() outside of capture_session()")
        for _ in range(_WARM_UPS):
            self._tp_group.barrier()
            forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        graph = RecordedGraph.of(forward_fn)
        self._pool.add(graph)
        self._graphs[shape_key] = graph

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:  # noqa: ARG002 - SGLang's
        """Return True if there is a graph of this shape."""
        return shape_key in self._graphs

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        """Do nothing: a replay needs no preparation."""
        yield

    def replay(
        self,
        shape_key: Any,
        static_forward_batch: Any,  # noqa: ARG002 - SGLang's
        **_: Any,
    ) -> Any:
        """Run the graph of this shape, and return its outputs, which the next replay overwrites."""
        graph = self._graphs[shape_key]
        assert self._pool is not None
        self._pool.replay(graph)
        return graph.outputs

    def cleanup(self) -> None:
        """Drop all graphs."""
        if self._pool is not None:
            for graph in self._graphs.values():
                self._pool.remove(graph)
        self._graphs.clear()
        self._pool = None


def runner_of_decode_steps(model_runner: Any) -> DecodeCudaGraphRunner:
    """Return SGLang's own runner, which captures decode steps as they are and compiles none."""
    with get_flags().capture.override(enable_torch_compile=False):
        return DecodeCudaGraphRunner(model_runner)
