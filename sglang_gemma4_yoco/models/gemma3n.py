"""Gemma 3n: the residual consists of several streams (AltUp), which are merged after the loop.

SGLang stores them as [streams, T, hidden]; their rows are [T, streams, hidden]. A layer predicts
all streams, reads one, and corrects all with its update. So K and V of the donor need its
prediction for all rows; the rest of the layer is needed for kept rows only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.compat.batch import ForwardBatch
from sglang_gemma4_yoco.compat.names import TextModelNames
from sglang_gemma4_yoco.compat.text_model import Method, RadixAttention, TextModel
from sglang_gemma4_yoco.core.model import OTHER_END, NotCuttableError
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.patched import patched
from sglang_gemma4_yoco.refusal import ServerRefusal

if TYPE_CHECKING:
    from sglang.srt.models.gemma3n_causal import Gemma3nDecoderLayer, Gemma3nTextModel

#: The weight of the keys' norm, as in Gemma 4.
get_key_scale = gemma4.get_key_scale

_MODULE = "sglang.srt.models.gemma3n_causal"
_causal: Any = compat.names.find_object(_MODULE)

SGLANG = TextModelNames(
    text_model=f"{_MODULE}.Gemma3nTextModel",
    loop="layers",
    signatures={
        "Gemma3nTextModel.forward": "self, input_ids, positions, forward_batch, input_embeds, ...",
        "Gemma3nTextModel.project_per_layer_inputs": "self, inputs_embeds, per_layer_inputs",
        "Gemma3nDecoderLayer.forward": (
            "self, positions, hidden_states, per_layer_input, forward_batch, ..."
        ),
        "Gemma3nAttention": "...",
    },
    outer_models=("sglang.srt.models.gemma3n_mm", _MODULE),
    modules=gemma4.SGLANG.modules,
    towers=gemma4.SGLANG.towers,
)
CUTS_MEDIA = False
LEAVES_CAPTURED_PREFILLS = False
MODEL_TYPES: tuple[str, ...] = ("gemma3n_text",)
ATTENTION_BACKENDS = compat.backends.make_table(compat.backends.GEMMA3N)


def find_unsupported_reason(model: TextModel) -> ServerRefusal | None:
    """Return why this ``Gemma3nTextModel`` cannot be cut, or None."""
    return gemma4.find_donor_reason(model, _causal.Gemma3nDecoderLayer, _causal.Gemma3nAttention)


def get_row_shape(model: Gemma3nTextModel) -> tuple[int, ...]:
    """Return ``(streams, hidden)``."""
    return model.config.altup_num_inputs, model.config.hidden_size


def view_rows(residual: Tensor) -> Tensor:
    """Return [streams, T, hidden] as [T, streams, hidden]."""
    return residual.transpose(0, 1)


@contextmanager
def stop_before_cut(model: Gemma3nTextModel, cut: int, project: Method) -> Iterator[list[Tensor]]:
    """End the model's loop before layer ``cut``, with a single row, which is cheap to merge.

    Instead of the norm of that row the model returns the first stream of all rows. Unnecessary once
    the model's forward takes a range of layers.
    """
    layers: list[Any] = list(model.layers)[:cut]
    last = layers.pop()
    residuals = []
    at_cut = []

    def run_last(**call: object) -> Tensor:
        residual: Tensor = last(**call)
        residuals.append(residual)
        return residual[:, :1]

    def leave_out_norm(_: Tensor) -> Tensor:
        if len(residuals) != 1:
            raise NotCuttableError(OTHER_END)
        at_cut.append(view_rows(residuals[0]))
        return residuals[0][0]

    with (
        patched(model, layers=[*layers, run_last], project_per_layer_inputs=project),
        patched(model.norm, forward=leave_out_norm),
    ):
        yield at_cut


def compute_keys_and_values(
    layer: Gemma3nDecoderLayer, rows: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return K and V of every row [T, streams, hidden], each [T, kv_heads, head_dim]."""
    predicted = layer.altup.predict(rows.transpose(0, 1))
    normed = layer.input_layernorm(predicted[layer.config.altup_active_idx])
    return gemma4.project_keys_and_values(layer.self_attn, normed, positions)


def run_tail(
    model: TextModel,
    layers: Sequence[Gemma3nDecoderLayer],
    batch: ForwardBatch,
    rows: Tensor,
    positions: Tensor,
    inputs: Tensor | None,
) -> Tensor:
    """Run the model's own forward with these layers only, and merge the streams: [B, hidden].

    The streams that it makes of the embeddings are dropped: the first layer gets those at the cut.
    """
    residual = rows.transpose(0, 1).contiguous()

    def run_first(**call: object) -> Tensor:
        call["hidden_states"] = residual
        updated: Tensor = layers[0](**call)
        return updated

    embeds = rows.new_ones(len(rows), model.config.hidden_size)
    stock = inspect.unwrap(type(model).forward)
    with (
        ExitStack() as stack,
        gemma4.share_own_keys_and_values(layers[0].self_attn),
        patched(model, layers=[run_first, *layers[1:]], project_per_layer_inputs=lambda *_: inputs),
    ):
        for layer in layers:
            stack.enter_context(_flatten_heads(layer.self_attn.attn))
        merged: Tensor = stock(model, None, positions, batch, embeds)
    return merged


def _flatten_heads(attention: RadixAttention) -> AbstractContextManager[None]:
    """Flatten the attention's output to [B, heads * head_dim], which the stock layer projects.

    Unnecessary once the layer does it (docs/upstream/gemma3n_attention_output.md).
    """
    attend: Method = attention.forward

    def forward(*args: object, **kwargs: object) -> Tensor:
        attended: Tensor = attend(*args, **kwargs)
        return attended.flatten(1)

    return patched(attention, forward=forward)
