"""Gemma 4: the residual stream is one tensor, and the model's own loop can end early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.core.model import NotCuttableError, ReadOutput
from sglang_gemma4_yoco.models import donor
from sglang_gemma4_yoco.replaced import replaced

HAS_EXITS = True
OTHER_NORM = "the model does something else between its layers and its norm"


def find_unsupported_reason(model: Any) -> str | None:
    """Why no forward of this ``Gemma4TextModel`` can be cut, or None."""
    known = compat.layers.gemma4_causal
    return donor.find_unsupported_reason(model, known.Gemma4DecoderLayer, known.Gemma4Attention)


def get_row_shape(model: Any) -> tuple[int, ...]:
    """(hidden,)."""
    return (model.config.hidden_size,)


def view_rows(residual: torch.Tensor) -> torch.Tensor:
    """The same tensor: [T, hidden]."""
    return residual


@contextmanager
def stop_before_cut(model: Any, cut: int, project: Callable[..., Any]) -> Iterator[ReadOutput]:
    """End the model's loop before layer ``cut``, and leave out its norm."""

    def leave_out_norm(rows: torch.Tensor, *others: Any, **settings: Any) -> torch.Tensor:
        # A second argument is an update that must still be added to the residual.
        if others or settings:
            raise NotCuttableError(OTHER_NORM)
        calls.append(True)
        return rows

    calls: list[bool] = []
    with (
        replaced(model, end_layer=cut, project_per_layer_inputs=project),
        replaced(model.norm, forward=leave_out_norm),
    ):
        yield _read_output
    if len(calls) != 1:
        raise NotCuttableError(OTHER_NORM)


def _read_output(output: Any) -> tuple[Any, torch.Tensor]:
    return output, compat.layers.get_rows(output)


def compute_keys_and_values(
    layer: Any, rows: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of every row [T, hidden], each [T, kv_heads, head_dim]."""
    normed = layer.input_layernorm(rows)
    return donor.compute_keys_and_values(layer.self_attn, normed, positions, _norm_heads)


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
    return donor.norm_heads(norm, rows, heads, head_dim)


def run_tail(
    model: Any,
    layers: list[Any],
    batch: Any,
    rows: torch.Tensor,
    positions: torch.Tensor,
    inputs: torch.Tensor | None,
) -> torch.Tensor:
    """Run the layers one by one, and the norm: [B, hidden]. From SGLang 0.5.22 on the batch holds
    their residual stream.
    """
    try:
        with donor.share_own_keys_and_values(layers[0].self_attn):
            compat.batch.start_residual(batch, rows)
            own_inputs = None
            for number, layer in enumerate(layers):
                if inputs is not None:
                    own_inputs = inputs[:, number, :]
                output = layer(
                    positions=positions,
                    hidden_states=rows,
                    per_layer_input=own_inputs,
                    forward_batch=batch,
                )
                rows = compat.layers.get_rows(output)
    finally:
        compat.batch.end_residual(batch)
    normed: torch.Tensor = model.norm(rows)
    return normed
