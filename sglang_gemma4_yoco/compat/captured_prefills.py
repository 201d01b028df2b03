"""SGLang's captured prefills: the fix of their capture, and the replay up to the exit.

SGLang 0.5.22 and 0.5.23 cannot capture prefills of E2B and E4B: they reject layers that share
K and V, and a multimodal model is captured with ids and embeddings at once (``docs/upstream``
has both reports). With ``--cuda-graph-backend-prefill=breakable`` such a server does not start.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.model_executor.runner.shape_key import ShapeKey as ShapeKey
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph import (  # noqa: E501
    BreakableCUDAGraph,
    _current_capture_var,
    _weak_ref_if_tensor,
)
from sglang.srt.model_executor.runner_utils.pool import (
    graph_pool_replay_scope,
)
from sglang.srt.model_executor.runner_utils.pool import (
    set_global_graph_memory_pool as set_global_graph_memory_pool,
)
from sglang.srt.platforms import current_platform
from torch import Tensor
from transformers import PretrainedConfig

from sglang_gemma4_yoco.compat import layers, server
from sglang_gemma4_yoco.compat.batch import ForwardBatch
from sglang_gemma4_yoco.compat.server import ModelRunner, PrefillCudaGraphRunner
from sglang_gemma4_yoco.compat.text_model import ModelOutput, RadixAttention, TextModel
from sglang_gemma4_yoco.patched import patched

#: A captured prefill.
PrefillGraph = BreakableCUDAGraph
#: SGLang's CUDA graph backend that captures segments, with eager attention between them.
BREAKABLE = Backend.BREAKABLE
#: The reason why capturing prefills of a model with shared layers fails.
SHARED_LAYER_IDS = "it rejects layers that share K and V"
# The attributes of a multimodal config with the placeholder ids of media.
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
# The attribute of an SGLang graph with its exit point.
_POINT_ENTRY = "_yoco_exit_point"


class ExitPoint(NamedTuple):
    """The exit point of a captured prefill: before the attention of layer S-1.

    Its tensors are those at that point of the capture. The graph owns their memory, and later
    segments overwrite it.
    """

    segments: int  # number of the graph's segments before it
    rows: Tensor  # [bucket, hidden], the residual at the input of layer S-1
    keys: Tensor  # [bucket, kv_heads, head_dim], that layer's
    values: Tensor


@contextmanager
def capture_with_exits(
    model: TextModel, config: PretrainedConfig, attention: RadixAttention
) -> Iterator[None]:
    """Let SGLang capture text prefills in the ``with`` block, and give each graph an exit point.

    Args:
        model: a ``Gemma4TextModel``.
        config: the config of the multimodal model around it.
        attention: the ``RadixAttention`` of layer S-1.
    """
    stock = model.forward
    attend: Callable[..., Tensor] = attention.forward

    @functools.wraps(stock)  # SGLang reads its parameters
    def from_ids(
        input_ids: Tensor | None,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> ModelOutput:
        if input_ids is not None:  # embeddings are then ignored
            input_embeds, kwargs["per_layer_inputs"] = embed_text(model, config, input_ids)
        return stock(None, positions, forward_batch, input_embeds, **kwargs)

    def noting(
        q: Tensor, k: Tensor, v: Tensor, forward_batch: ForwardBatch, *args: Any, **kwargs: Any
    ) -> Tensor:
        heads = (-1, attention.tp_k_head_num, attention.head_dim)
        _note_exit_point(layers.get_residual(forward_batch), k.view(heads), v.view(heads))
        return attend(q, k, v, forward_batch, *args, **kwargs)

    with (
        # Nothing looks a layer up in these lists: a break is a method of its layer.
        patched(cuda_graph_setup, index_attention_layers_by_global_id=lambda *both: both[:2]),
        patched(model, forward=from_ids),
        patched(attention, forward=noting),
    ):
        yield


def _note_exit_point(*tensors: Tensor) -> None:
    """Record the next break as the exit point of the graph that is being captured, if any."""
    capture = _current_capture_var.get()
    if capture is None:  # a warm-up, or a decode step
        return
    graph = capture.cuda_graph
    segments = len(graph._break_fns) + 1
    setattr(graph, _POINT_ENTRY, ExitPoint(segments, *map(_weak_ref_if_tensor, tensors)))


def embed_text(
    model: TextModel, config: PretrainedConfig, ids: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Embed text like SGLang's multimodal model in eager mode; can be captured.

    Placeholder ids of media, such as a literal ``<image>`` in a text, get the padding's per-layer
    embeddings.

    Args:
        ids: [T].

    Returns:
        The embeddings [T, hidden], and the per-layer ones [T, layers, width], if there are any.
    """
    embeds = model.embed_tokens(ids)
    for name in _PLACEHOLDERS:
        placeholder = getattr(config, name, None)
        if placeholder is not None:
            ids = ids.masked_fill(ids == placeholder, config.text_config.pad_token_id)
    return embeds, model.get_per_layer_inputs(ids)


def replay_to_exit(graph: PrefillGraph) -> ExitPoint:
    """Run the segments and breaks before the exit point, and return that point."""
    point: ExitPoint = getattr(graph, _POINT_ENTRY)
    first = BreakableCUDAGraph()
    first._segments = graph._segments[: point.segments]
    first._break_fns = graph._break_fns[: point.segments - 1]
    with graph_pool_replay_scope():
        first.replay()
    return point


def drop(runner: ModelRunner) -> None:
    """Free a runner's captured prefills, if it has any, and keep SGLang from capturing others.

    Nothing may run. SGLang changes the backend of decode steps in the same way.
    """
    config: Any = server.read_argument("cuda_graph_config")
    config.prefill.backend = Backend.DISABLED
    prefills = server.get_captured_prefills(runner)
    server.wait_for_device(runner.device)  # warm-ups of a failed capture, too
    if prefills:
        prefills.backend.cleanup()
        runner.prefill_cuda_graph_runner = runner.eager_runner
        del prefills
    gc.collect()
    current_platform.empty_cache()


def list_graphs(
    prefills: PrefillCudaGraphRunner,
) -> dict[ShapeKey, tuple[PrefillGraph, Tensor]]:
    """Return each bucket's graph and output [bucket, hidden], overwritten by the next replay."""
    backend: Any = prefills.backend  # a breakable one
    return {bucket: (graph, backend._outputs[bucket]) for bucket, graph in backend._graphs.items()}
