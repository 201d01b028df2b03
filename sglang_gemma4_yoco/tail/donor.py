"""The last front layer, K-1: K and V for every row, everything else for kept rows only.

Layer K-1 is the youngest donor: the shared layers read the K/V that it writes, for all rows. Its
own output, though, goes only into the tail. So its queries, attention, output projection, FFN and
per-layer input are needed for kept rows alone: one layer more than a cut before layer K saves. Once
its K and V are in the pool it attends as the shared layers do: to what lies there.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch.nn import functional

from sglang_gemma4_yoco import seams


class DonorCut(Enum):
    """How much of layer K-1 runs on kept rows only."""

    KEYS_AND_VALUES = "cut inside layer {donor}, behind K and V"
    """Queries, attention and all that follows see kept rows."""
    NONE = "cut before layer {first}"
    """The layer runs as stock."""


_LAYER_PARTS = ("input_layernorm",)
_ATTENTION_PARTS = (
    "qkv_proj",
    "o_proj",
    "q_norm",
    "k_norm",
    "v_norm",
    "rotary_emb",
    "attn",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "q_size",
    "kv_size",
)


def first_shared_layer(config: Any) -> int | None:
    """Index K of the first layer that reads an earlier layer's K/V; None if there is no such tail.

    A model whose layers are all shared (the multi-token-prediction assistant) has no front that
    could write the K/V, so it has no tail either.
    """
    layers = config.num_hidden_layers
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    return layers - shared if 0 < shared < layers else None


def why_not_inside(model: Any) -> str | None:
    """Why layer K-1 of this model cannot be cut, or None."""
    first = first_shared_layer(model.config)
    assert first is not None, "only models with a tail are asked"
    if first < 2:
        # The residual of the first layer is its caller's, and must not be written to.
        return "there is no layer before the donor"
    layer = model.layers[first - 1]
    if type(layer) is not seams.gemma4_causal.Gemma4DecoderLayer:
        return f"layer {first - 1} is a {type(layer).__name__}"
    if type(layer.self_attn) is not seams.gemma4_causal.Gemma4Attention:
        return f"the attention of layer {first - 1} is a {type(layer.self_attn).__name__}"
    missing = [name for name in _LAYER_PARTS if not hasattr(layer, name)]
    missing += [name for name in _ATTENTION_PARTS if not hasattr(layer.self_attn, name)]
    return f"layer {first - 1} lacks {', '.join(missing)}" if missing else None


def why_not_keys_and_values(model: Any, backend: Any) -> str | None:
    """Why K and V of layer K-1 cannot be computed apart from its queries, or None."""
    first = first_shared_layer(model.config)
    assert first is not None
    stored = seams.kv_cache_dtype(backend)
    if stored is not None and stored != _dtype(model.layers[first - 1].self_attn):
        # Stock attends to this chunk's own K/V before rounding them to the cache's type.
        return f"the KV cache holds {stored}"
    return None


def donor_cut(model: Any, backend: Any) -> tuple[DonorCut, str | None]:
    """The deepest cut that this model and backend allow, and why it is not the deepest of all."""
    reason = why_not_inside(model) or why_not_keys_and_values(model, backend)
    return (DonorCut.KEYS_AND_VALUES if reason is None else DonorCut.NONE), reason


def _dtype(attention: Any) -> torch.dtype:
    """The type of K and V. The projection's weights may be quantised; the norm's never are."""
    dtype: torch.dtype = attention.k_norm.weight.dtype
    return dtype


def _projected(attention: Any, normed: torch.Tensor, columns: slice) -> torch.Tensor:
    """Some columns of the fused projection of queries, K and V.

    Plain weights are sliced. Of quantised or packed ones all columns are computed, as stock does,
    and the others dropped: exact for every kind whose rows do not depend on each other.

    Args:
        normed: [rows, hidden].
    """
    projection = attention.qkv_proj
    if not seams.is_plain_linear(projection):
        whole: torch.Tensor
        whole, _bias = projection(normed)
        return whole[:, columns]
    bias = None if projection.bias is None else projection.bias[columns]
    return functional.linear(normed, projection.weight[columns], bias)


def _headwise_norm(norm: Any, rows: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """RMS norm of each head, by the kernel that the stock layer uses on this device.

    Args:
        rows: [rows, heads * head_dim]; may be overwritten.

    Returns:
        [rows, heads * head_dim].
    """
    if (rows.is_cuda or rows.is_xpu) and norm.scale_shift == 0.0:
        # The fused kernel norms q, k and v alike; given one of them alone, it is called its q.
        seams.gemma4_causal.gemma_qkv_rmsnorm(
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
    normed: torch.Tensor = norm(rows.unflatten(-1, (heads, head_dim)))
    return normed.flatten(-2)


def keys_and_values(
    attention: Any, normed: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of every row, as the stock layer would write them.

    Args:
        attention: a ``Gemma4Attention``.
        normed: [T, hidden], the layer's normed input.
        positions: [T].

    Returns:
        ``(k, v)``, each [T, kv_heads, head_dim].
    """
    k, v = _projected(attention, normed, slice(attention.q_size, None)).split(
        [attention.kv_size, attention.kv_size], dim=-1
    )
    heads, head_dim = attention.num_kv_heads, attention.head_dim
    k = _headwise_norm(attention.k_norm, k, heads, head_dim)
    v = _headwise_norm(attention.v_norm, v, heads, head_dim)
    # The rotary embedding wants queries beside the keys.
    _, k = attention.rotary_emb(positions, torch.zeros_like(k), k)
    return k.unflatten(-1, (heads, head_dim)), v.unflatten(-1, (heads, head_dim))


def queries(attention: Any, normed_rows: torch.Tensor, row_positions: torch.Tensor) -> torch.Tensor:
    """Queries of the kept rows.

    Args:
        normed_rows: [B, hidden].
        row_positions: [B].

    Returns:
        [B, heads, head_dim].
    """
    q = _projected(attention, normed_rows, slice(attention.q_size))
    q = _headwise_norm(attention.q_norm, q, attention.num_heads, attention.head_dim)
    unused_keys = q.new_zeros(q.shape[0], attention.kv_size)
    q, _ = attention.rotary_emb(row_positions, q, unused_keys)
    heads: torch.Tensor = q.unflatten(-1, (attention.num_heads, attention.head_dim))
    return heads


#: The kernel that norms is compiled apart for few rows and for many.
_FEW, _MANY = 2, 257


@torch.no_grad()
def compile_kernels(attention: Any) -> None:
    """Run K and V, and queries, apart from one another once, as no stock layer does.

    Else the first user's request would wait for their kernels to be compiled.
    """
    weight = attention.k_norm.weight
    for rows in (_FEW, _MANY):
        normed = weight.new_zeros(rows, attention.qkv_proj.input_size)
        positions = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        keys_and_values(attention, normed, positions)
        queries(attention, normed, positions)


def attend(attention: Any, q: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    """Attend to K and V that the cache has already.

    Args:
        q: [B, heads, head_dim].
        forward_batch: the batch as its tail sees it.

    Returns:
        [B, heads * head_dim].
    """
    output: torch.Tensor = attention.attn(
        q, None, None, forward_batch=forward_batch, save_kv_cache=False
    )
    return output.flatten(-2) if output.dim() == 3 else output
