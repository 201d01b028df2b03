"""The donor, the last layer with its own K and V: K and V for all rows, the rest for kept rows.

With S the first KV-shared layer, the donor is layer S-1. The shared layers of its kind read the K
and V that it writes, for all rows. Its output goes only into the tail, so its queries, attention,
output projection, FFN and per-layer input are needed for kept rows alone. Once its K and V are in
the pool, it runs by the code that SGLang has for shared layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from sglang_gemma4_yoco import compat

#: The norm's kernel is compiled once for few rows and once for many.
_FEW, _MANY = 2, 257


def find_unsupported_reason(model: Any) -> str | None:
    """Why the donor of this model, which has a KV-shared tail, cannot be cut; or None."""
    donor = model.config.num_hidden_layers - model.config.num_kv_shared_layers - 1
    if donor < 1:
        # The residual of the first layer is its caller's, and must not be written to.
        return "there is no layer before the donor"
    layer = model.layers[donor]
    if type(layer) is not compat.layers.gemma4_causal.Gemma4DecoderLayer:
        return f"layer {donor} is a {type(layer).__name__}"
    if type(layer.self_attn) is not compat.layers.gemma4_causal.Gemma4Attention:
        return f"the attention of layer {donor} is a {type(layer.self_attn).__name__}"
    return None


def _project_keys_and_values(attention: Any, normed: torch.Tensor) -> torch.Tensor:
    """The columns of K and V of the fused projection, [rows, 2 * kv_size].

    Plain weights are sliced. With quantised or packed ones, or a bias, all columns are computed, as
    in stock, and the queries are dropped: exact for every kind of layer with independent rows.

    Args:
        normed: [rows, hidden].
    """
    projection, start = attention.qkv_proj, attention.q_size
    if compat.layers.is_plain_linear(projection):
        return functional.linear(normed, projection.weight[start:])
    whole: torch.Tensor
    whole, _bias = projection(normed)
    return whole[:, start:]


def _norm_heads(norm: Any, rows: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """RMS norm of each head, by the kernel that the stock layer uses on this device.

    Args:
        rows: [rows, heads * head_dim]; may be overwritten.

    Returns:
        [rows, heads * head_dim].
    """
    if (rows.is_cuda or rows.is_xpu) and norm.scale_shift == 0.0:
        # The fused kernel norms q, k and v in the same way; a single one is passed as its q.
        compat.layers.gemma4_causal.gemma_qkv_rmsnorm(
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


def compute_keys_and_values(
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
    k, v = _project_keys_and_values(attention, normed).split(
        [attention.kv_size, attention.kv_size], dim=-1
    )
    heads, head_dim = attention.num_kv_heads, attention.head_dim
    k = _norm_heads(attention.k_norm, k, heads, head_dim)
    v = _norm_heads(attention.v_norm, v, heads, head_dim)
    # The rotary embedding requires queries as well as keys.
    _, k = attention.rotary_emb(positions, torch.zeros_like(k), k)
    return k.unflatten(-1, (heads, head_dim)), v.unflatten(-1, (heads, head_dim))


@torch.no_grad()
def compile_kernels(attention: Any) -> None:
    """Compute K and V without queries once: their kernels are compiled, which stock never runs.

    Otherwise the first request of a user would wait for the compiler.
    """
    weight = attention.k_norm.weight
    for rows in (_FEW, _MANY):
        normed = weight.new_zeros(rows, attention.qkv_proj.input_size)
        positions = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        compute_keys_and_values(attention, normed, positions)
