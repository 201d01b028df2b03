"""The adapter of ``third_model``, like the files of ``models/``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harness.third_model import ThirdAttention, ThirdLayer
from sglang_gemma4_yoco.compat.names import TextModelNames
from sglang_gemma4_yoco.core.model import OTHER_END, NotCuttableError
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.patched import patched
from sglang_gemma4_yoco.refusal import ServerRefusal

_MODULE = ThirdLayer.__module__

SGLANG = TextModelNames(
    text_model=f"{_MODULE}.ThirdTextModel",
    loop="layers",
    signatures={
        "ThirdTextModel.forward": "self, input_ids, positions, forward_batch, input_embeds",
        "ThirdLayer.forward": "self, positions, hidden_states, forward_batch",
    },
    outer_models=(_MODULE,),
)
MODEL_TYPES = ("third",)
ATTENTION_BACKENDS = gemma4.ATTENTION_BACKENDS
CUTS_MEDIA = False
LEAVES_CAPTURED_PREFILLS = False


def find_unsupported_reason(model: Any) -> ServerRefusal | None:
    """Return why this ``ThirdTextModel``, which has KV-shared layers, cannot be cut; or None."""
    return gemma4.find_donor_reason(model, ThirdLayer, ThirdAttention)


def get_row_shape(model: Any) -> tuple[int, ...]:
    """Return (hidden,)."""
    return (model.config.hidden_size,)


def view_rows(residual: torch.Tensor) -> torch.Tensor:
    """Return the same tensor: [T, hidden]."""
    return residual


def get_key_scale(layer: Any) -> torch.Tensor:
    """Return ones, [head_dim]: keys are not normed, and about 1."""
    return torch.ones(layer.self_attn.attn.head_dim)


@contextmanager
def stop_before_cut(
    model: Any,
    cut: int,
    project: Callable[..., Any],
) -> Iterator[list[torch.Tensor]]:
    """End the model's loop before layer ``cut``, and leave out its norm."""
    at_cut = list[torch.Tensor]()

    def leave_out_norm(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        if others:
            raise NotCuttableError(OTHER_END)
        at_cut.append(rows)
        return rows

    layers = list(model.layers)[:cut]
    with patched(model, layers=layers), patched(model.norm, forward=leave_out_norm):
        yield at_cut


def compute_keys_and_values(
    layer: Any, rows: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of every row [T, hidden], each [T, kv_heads, head_dim]."""
    attention = layer.self_attn
    projected, _ = attention.qkv_proj(layer.input_layernorm(rows))
    q, k, v = projected.split(attention.sizes, dim=-1)
    _, k = attention.rotary_emb(positions, q, k)
    heads = (attention.attn.tp_k_head_num, attention.attn.head_dim)
    return k.unflatten(-1, heads), v.unflatten(-1, heads)


def run_tail(
    model: Any,
    layers: list[Any],
    batch: Any,
    rows: torch.Tensor,
    positions: torch.Tensor,
    inputs: torch.Tensor | None,
) -> torch.Tensor:
    """Return the rows after the layers, one by one, and the norm: [B, hidden]."""
    with patched(layers[0].self_attn, shares=True):
        for layer in layers:
            rows = layer(positions=positions, hidden_states=rows, forward_batch=batch)
    normed: torch.Tensor = model.norm(rows)
    return normed
