"""SGLang's captured prefills: how their capture is repaired, and what its graphs consist of."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph import (  # noqa: E501
    BreakableCUDAGraph,
    _current_capture_var,
    _weak_ref_if_tensor,
)
from sglang.srt.model_executor.runner_utils.pool import graph_pool_replay_scope

from sglang_gemma4_yoco.compat import server
from sglang_gemma4_yoco.replaced import replaced

#: Its CUDA graph backend that captures prefills in segments, with attentions between them.
BREAKABLE = "breakable"
#: Why capturing prefills ends a server of a model with shared layers; docs/upstream has a report.
SHARED_LAYER_IDS = "it takes layers that share K and V for an error"


def are_named() -> bool:
    """Return True if the operator has named these graphs; SGLang may choose them by itself."""
    named = getattr(server.get_published_arguments(), "cuda_graph_backend_prefill", None)
    return bool(named == BREAKABLE)


@contextmanager
def index_shared_layers() -> Iterator[None]:
    """In the ``with`` block SGLang leaves attention layers unindexed where two have the same id.

    In 0.5.22 a break then finds the donor, which has the same heads, window and scale.
    """
    stock = cuda_graph_setup.index_attention_layers_by_global_id

    def tolerant(attention_layers: Any, companions: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(attention_layers, companions, *args, **kwargs)
        except ValueError:
            return attention_layers, companions

    with replaced(cuda_graph_setup, index_attention_layers_by_global_id=tolerant):
        yield


def take_ids(
    forward: Callable[..., Any], embed: Callable[[torch.Tensor], tuple[Any, Any]]
) -> Callable[..., Any]:
    """``Gemma4TextModel.forward``, which makes the inputs of ids by ``embed``.

    Embeddings that it is given beside ids are not read.
    """

    @functools.wraps(forward)  # SGLang reads its parameters
    def of_ids(
        input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None, **kwargs: Any
    ) -> Any:
        if input_ids is not None:
            input_embeds, kwargs["per_layer_inputs"] = embed(input_ids)
        return forward(None, positions, forward_batch, input_embeds, **kwargs)

    return of_ids


def get_graph_being_captured() -> Any | None:
    """The graph whose segments are being captured now; None in warm-ups and forwards."""
    capture = _current_capture_var.get()
    if capture is None:
        return None
    return capture.cuda_graph


def note_next_break(graph: Any, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """Segments before the next break of a graph that is being captured, and views of tensors.

    The graph alone keeps their memory.
    """
    return len(graph._break_fns) + 1, *map(_weak_ref_if_tensor, tensors)


def list_graphs(prefills: Any) -> dict[Any, tuple[Any, torch.Tensor]]:
    """By bucket the graph, and its output [bucket, hidden], which the next replay overwrites."""
    backend = prefills.backend
    return {bucket: (graph, backend._outputs[bucket]) for bucket, graph in backend._graphs.items()}


def replay_first_segments(graph: Any, segments: int) -> None:
    """Run the first segments of a graph and the breaks between them, as SGLang runs all."""
    first = BreakableCUDAGraph()
    first._segments = graph._segments[:segments]
    first._break_fns = graph._break_fns[: segments - 1]
    with graph_pool_replay_scope():
        first.replay()
