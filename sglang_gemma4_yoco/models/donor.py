"""What the donors of Gemma's models have in common.

The KV-shared layers of its kind read the K and V that the donor writes, for all rows. Its output
goes only into the tail, so its queries, attention, output projection, FFN and per-layer input are
needed for kept rows alone. Once its K and V are in the pool, it runs by the code that SGLang has
for KV-shared layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.replaced import replaced

#: Called with a norm, rows [T, heads * head_dim] that may be overwritten, heads and head_dim.
NormHeads = Callable[[Any, torch.Tensor, int, int], torch.Tensor]


def find_unsupported_reason(model: Any, layer_class: type, attention_class: type) -> str | None:
    """Why this model, which has KV-shared layers, cannot be cut inside its donor; or None.

    Args:
        layer_class, attention_class: those whose forwards are known.
    """
    number = model.config.num_hidden_layers - model.config.num_kv_shared_layers - 1
    if number < 1:
        # The residual of the first layer is its caller's, and must not be written to.
        return "there is no layer before the donor"
    layer = model.layers[number]
    kind, attention = type(layer), type(layer.self_attn)
    if kind is not layer_class:
        return f"layer {number} is a {kind.__name__}"
    if attention is not attention_class:
        return f"the attention of layer {number} is a {attention.__name__}"
    return None


def share_own_keys_and_values(attention: Any) -> AbstractContextManager[None]:
    """In the ``with`` block the donor's attention runs by SGLang's code for KV-shared layers.

    It shares its own K and V, which are in the pool already.
    """
    own = attention.attn.layer_id
    return replaced(attention, is_kv_shared_layer=True, kv_shared_layer_index=own)


def compute_keys_and_values(
    attention: Any, normed: torch.Tensor, positions: torch.Tensor, norm_heads: NormHeads
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of every row, as the stock layer would write them.

    Plain weights are sliced. With quantised or packed ones, or a bias, all columns are computed, as
    in stock, and the queries are dropped: exact for every kind of layer with independent rows.

    Args:
        attention: SGLang's, whose fused projection has columns of q, k and v.
        normed: [T, hidden], what that projection reads.
        positions: [T] int64.

    Returns:
        ``(k, v)``, each [T, kv_heads, head_dim].
    """
    projection, start = attention.qkv_proj, attention.q_size
    if compat.layers.is_plain_linear(projection):
        both = functional.linear(normed, projection.weight[start:])
    else:
        all_columns, _bias = projection(normed)
        both = all_columns[:, start:]
    k, v = both.split([attention.kv_size, attention.kv_size], dim=-1)
    heads, head_dim = attention.num_kv_heads, attention.head_dim
    k = norm_heads(attention.k_norm, k, heads, head_dim)
    v = norm_heads(attention.v_norm, v, heads, head_dim)
    # The rotary embedding requires queries as well as keys.
    _, k = attention.rotary_emb(positions, torch.zeros_like(k), k)
    return k.unflatten(-1, (heads, head_dim)), v.unflatten(-1, (heads, head_dim))


def norm_heads(norm: Any, rows: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """RMS norm of each head of [rows, heads * head_dim], by the module itself."""
    normed: torch.Tensor = norm(rows.unflatten(-1, (heads, head_dim)))
    return normed.flatten(-2)
