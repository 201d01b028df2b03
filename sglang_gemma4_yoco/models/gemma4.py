"""Gemma 4: the residual stream is one tensor, and the model's own loop can end early.

KV-shared layers of the donor's attention type read its K and V for all rows. Its output goes only
into the tail, so its queries, attention, output projection, FFN and per-layer input are needed for
kept rows only. Once its K and V are in the pool, it runs on SGLang's code path for KV-shared
layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.compat.batch import ForwardBatch
from sglang_gemma4_yoco.compat.names import TextModelNames
from sglang_gemma4_yoco.compat.text_model import Method, TextAttention, TextModel
from sglang_gemma4_yoco.core.model import OTHER_END, NotCuttableError
from sglang_gemma4_yoco.patched import patched
from sglang_gemma4_yoco.refusal import ServerRefusal

if TYPE_CHECKING:
    from sglang.srt.models.gemma3n_causal import Gemma3nAttention
    from sglang.srt.models.gemma4_causal import Gemma4Attention, Gemma4DecoderLayer

_MODULE = "sglang.srt.models.gemma4_causal"
_causal: Any = compat.names.find_object(_MODULE)

SGLANG = TextModelNames(
    text_model=f"{_MODULE}.Gemma4TextModel",
    loop="end_layer",
    signatures={
        "Gemma4TextModel.forward": "self, input_ids, positions, forward_batch, input_embeds, ...",
        "Gemma4TextModel.project_per_layer_inputs": "self, inputs_embeds, per_layer_inputs",
        "Gemma4DecoderLayer.forward": (
            "self, positions, hidden_states, per_layer_input, forward_batch, ..."
        ),
        "Gemma4Attention": "...",
        "gemma_qkv_rmsnorm": "...",
    },
    outer_models=(
        "sglang.srt.models.gemma4_mm",
        "sglang.srt.models.gemma4_unified",
        _MODULE,
    ),
    modules=("sglang.srt.models.gemma3_causal",),
    towers=("vision_tower", "audio_tower", "vision_embedder", "embed_vision", "embed_audio"),
)
CUTS_MEDIA = True
LEAVES_CAPTURED_PREFILLS = True
MODEL_TYPES: tuple[str, ...] = ("gemma4_text", "gemma4_unified_text")
ATTENTION_BACKENDS = compat.backends.make_table(compat.backends.GEMMA4)


def find_unsupported_reason(model: TextModel) -> ServerRefusal | None:
    """Return why this ``Gemma4TextModel``, which has KV-shared layers, cannot be cut; or None."""
    return find_donor_reason(model, _causal.Gemma4DecoderLayer, _causal.Gemma4Attention)


def find_donor_reason(
    model: TextModel, layer_class: type, attention_class: type
) -> ServerRefusal | None:
    """Return why the donor is not a layer of these classes that can be cut, or None."""
    number = model.config.num_hidden_layers - model.config.num_kv_shared_layers - 1
    if number < 1:
        # The residual of the first layer belongs to the caller and must not be written to.
        return ServerRefusal("there is no layer before the donor")
    layer = model.layers[number]
    kind = type(layer)
    attention = type(layer.self_attn)
    if kind is not layer_class:
        return ServerRefusal(f"layer {number} is a {kind.__name__}")
    if attention is not attention_class:
        return ServerRefusal(f"the attention of layer {number} is a {attention.__name__}")
    source = layer.self_attn.attn.layer_id
    if source != number:
        return ServerRefusal(f"layer {number} reads K and V of layer {source}")
    return None


def share_own_keys_and_values(attention: TextAttention) -> AbstractContextManager[None]:
    """Run the donor's attention on SGLang's KV-shared code path in the ``with`` block.

    It shares its own K and V, which are already in the pool. Unnecessary once a layer can be called
    without K and V.
    """
    return patched(
        attention, is_kv_shared_layer=True, kv_shared_layer_index=attention.attn.layer_id
    )


def get_row_shape(model: TextModel) -> tuple[int, ...]:
    """Return ``(hidden,)``."""
    return (model.config.hidden_size,)


def view_rows(residual: Tensor) -> Tensor:
    """Return the same tensor: [T, hidden]."""
    return residual


@contextmanager
def stop_before_cut(model: TextModel, cut: int, project: Method) -> Iterator[list[Tensor]]:
    """End the model's loop before layer ``cut``, and skip its norm.

    Unnecessary once the model's forward takes a range of layers.
    """

    def leave_out_norm(rows: Tensor, *others: object, **settings: object) -> Tensor:
        # A second argument is an update that must still be added to the residual.
        if others or settings:
            raise NotCuttableError(OTHER_END)
        at_cut.append(rows)
        return rows

    at_cut = list[Tensor]()
    with (
        patched(model, end_layer=cut, project_per_layer_inputs=project),
        patched(model.norm, forward=leave_out_norm),
    ):
        yield at_cut


def compute_keys_and_values(
    layer: Gemma4DecoderLayer, rows: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return K and V of every row [T, hidden], each [T, kv_heads, head_dim]."""
    normed = layer.input_layernorm(rows)
    return project_keys_and_values(layer.self_attn, normed, positions)


def project_keys_and_values(
    attention: Gemma4Attention | Gemma3nAttention, normed: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return K and V of every row, as the stock layer would write them.

    Plain weights are sliced. With quantised or packed weights, or a bias, all columns are computed,
    as in stock, and those of the queries are dropped.

    Args:
        attention: the donor's, whose fused projection has columns of q, k and v.
        normed: [T, hidden], the projection's input.
        positions: [T] int64.

    Returns:
        ``(k, v)``, each [T, kv_heads, head_dim].
    """
    projection = attention.qkv_proj
    start = attention.q_size
    if compat.layers.is_plain_linear(projection):
        both = functional.linear(normed, projection.weight[start:])
    else:
        all_columns, _bias = projection(normed)
        both = all_columns[:, start:]
    k, v = both.split([attention.kv_size, attention.kv_size], dim=-1)
    heads = attention.num_kv_heads
    head_dim = attention.head_dim
    k = _norm_heads(attention.k_norm, k, heads, head_dim)
    v = _norm_heads(attention.v_norm, v, heads, head_dim)
    # The rotary embedding requires queries as well as keys.
    _, k = attention.rotary_emb(positions, torch.zeros_like(k), k)
    return k.unflatten(-1, (heads, head_dim)), v.unflatten(-1, (heads, head_dim))


def _norm_heads(norm: nn.Module, rows: Tensor, heads: int, head_dim: int) -> Tensor:
    """Return the RMS norm of each head, by the stock layer's kernel on this device.

    Args:
        rows: [rows, heads * head_dim]; may be overwritten.

    Returns:
        [rows, heads * head_dim].
    """
    if (rows.is_cuda or rows.is_xpu) and getattr(norm, "scale_shift", None) == 0.0:
        # The fused kernel norms q, k and v alike; a single one is passed as q.
        _causal.gemma_qkv_rmsnorm(
            rows,
            None,
            None,
            norm.weight.data,
            None,
            num_q_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            eps=norm.eps,
        )
        return rows
    normed: Tensor = norm(rows.unflatten(-1, (heads, head_dim)))
    return normed.flatten(-2)


def run_tail(
    model: TextModel,
    layers: Sequence[Gemma4DecoderLayer],
    batch: ForwardBatch,
    rows: Tensor,
    positions: Tensor,
    inputs: Tensor | None,
) -> Tensor:
    """Run the layers and the norm: [B, hidden]; the batch holds the residual stream."""
    # Without ``patched`` a captured batch would keep the residual's memory as long as its graph.
    with share_own_keys_and_values(layers[0].self_attn), patched(batch, residual_stream=None):
        compat.layers.start_residual(batch, rows)
        own_inputs = None
        for number, layer in enumerate(layers):
            if inputs is not None:
                own_inputs = inputs[:, number, :]
            rows = layer(
                positions=positions,
                hidden_states=rows,
                per_layer_input=own_inputs,
                forward_batch=batch,
            )
    normed: Tensor = model.norm(rows)
    return normed


def get_key_scale(layer: Gemma4DecoderLayer) -> Tensor:
    """Return the weight of the keys' norm, [head_dim]."""
    return layer.self_attn.k_norm.weight
