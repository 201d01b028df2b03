"""What happens while SGLang captures prefills: exit points are noted, and its capture is repaired.

SGLang 0.5.19 to 0.5.23 cannot capture prefills of E2B and E4B: two layers that share K and V count
as an error, and a multimodal model is captured with ids and embeddings at once (``docs/upstream``
has both reports). With ``--cuda-graph-backend-prefill=breakable`` such a server does not start.

So while SGLang captures, layers that it cannot index are left unindexed, and text is captured from
its ids alone, which become what they become eagerly (``text_inputs``). Such a graph would answer a
prompt with images as if it were text: those run eagerly.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_gemma4_yoco import compat, log, settings
from sglang_gemma4_yoco.compat import captured_prefills
from sglang_gemma4_yoco.exits import text_inputs
from sglang_gemma4_yoco.replaced import replaced

OFF = f"{settings.name_of('prefill_graphs')}=0"
NO_BREAKS = "it is captured without breaks"
NEWER = "this SGLang is newer than the last one whose captured prefills are known"
#: Where a graph of SGLang's has its exit point.
POINT_ENTRY = "_yoco_exit_point"


@dataclass(frozen=True)
class ExitPoint:
    """Where a captured prefill can be left; an attribute of SGLang's graph, freed with it."""

    segments: int  # of the graph that run before it
    rows: torch.Tensor  # [bucket, hidden], the residual at the input of layer S-1
    keys: torch.Tensor  # [bucket, kv_heads, head_dim], that layer's
    values: torch.Tensor


@contextmanager
def note_exit_points(layer: Any) -> Iterator[None]:
    """Note the exit point, at ``layer``'s attention, of each graph that is captured meanwhile."""
    attention = layer.self_attn.attn
    run, attend = layer.forward, attention.forward
    heads = (-1, attention.tp_k_head_num, attention.head_dim)

    def noted(graph: Any, rows: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        segments, rows, keys, values = captured_prefills.note_next_break(graph, rows, k, v)
        setattr(graph, POINT_ENTRY, ExitPoint(segments, rows, keys.view(heads), values.view(heads)))
        return attend(q, k, v, *args, **kwargs)

    def forward(
        positions: Any, hidden_states: Any, per_layer_input: Any, forward_batch: Any, **kwargs: Any
    ) -> Any:
        graph = captured_prefills.get_graph_being_captured()
        with ExitStack() as stack:
            if graph is not None and compat.layers.residual_is_written(
                forward_batch, hidden_states
            ):
                noting_attention = partial(noted, graph, hidden_states)
                stack.enter_context(replaced(attention, forward=noting_attention))
            return run(positions, hidden_states, per_layer_input, forward_batch, **kwargs)

    with replaced(layer, forward=forward):
        yield


def find_repair(*, multimodal: bool) -> str | None:
    """What keeps SGLang from capturing prefills and is to be repaired, or None."""
    if not is_named() or find_closed_reason() is not None:
        return None
    return captured_prefills.find_capture_error(multimodal=multimodal)


def is_named() -> bool:
    """Whether the operator has named breakable graphs; SGLang may choose them by itself."""
    args = compat.server.get_published_arguments()
    named = getattr(args, "cuda_graph_backend_prefill", None)
    return bool(named == captured_prefills.BREAKABLE)


def find_closed_reason() -> str | None:
    """Why no prefill may leave SGLang's graphs, whatever is captured; None if some may."""
    if not settings.current.prefill_graphs:
        return OFF
    if compat.server.get_cuda_graph_backend("prefill") != captured_prefills.BREAKABLE:
        return NO_BREAKS
    if compat.release.is_newer_than_tested():
        return NEWER
    return None


@contextmanager
def repair_capture(model: Any, config: Any, why: str) -> Iterator[None]:
    """SGLang can capture prefills of this ``Gemma4TextModel`` in the ``with`` block.

    ``config`` is that of the multimodal model around it.
    """
    log.log_once(
        "Gemma 4 fast prefill: SGLang's capture of prefill CUDA graphs is repaired for this "
        f"model ({why}), because --cuda-graph-backend-prefill asks for them; {OFF} leaves it"
    )
    embed = partial(text_inputs.embed_text, model, config)
    forward = captured_prefills.take_ids(model.forward, embed)
    with captured_prefills.index_shared_layers(), replaced(model, forward=forward):
        yield
