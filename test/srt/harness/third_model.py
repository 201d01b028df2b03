"""A third text model, of SGLang's layers, as a third party would write it.

It has little in common with Gemma: no per-layer inputs, no norms of queries and keys, scores that
are divided by sqrt(head_dim), and layers that add to the residual stream themselves. The KV-shared
layers, with a window and without, all read K and V of the last layer before them. Embeddings are
scaled in place, and its caller makes them. ``third_yoco`` is its adapter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.models.llama import LlamaMLP
from torch import nn


class ThirdAttention(nn.Module):
    """Attention with or without a window, to its own K and V or the donor's."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, hidden = config.head_dim, config.hidden_size
        donor = config.num_hidden_layers - config.num_kv_shared_layers - 1
        window = -1
        if config.layer_types[number] == "sliding_attention":
            window = config.sliding_window - 1  # its own key is not among them
        self.shares = number > donor
        self.sizes = [heads * width, kv_heads * width, kv_heads * width]
        self.qkv_proj = QKVParallelLinear(hidden, width, heads, kv_heads, bias=False)
        self.o_proj = RowParallelLinear(heads * width, hidden, bias=False)
        self.rotary_emb = get_rope(width, width, config.max_position_embeddings, 10_000)
        self.attn = RadixAttention(
            heads,
            width,
            width**-0.5,
            kv_heads,
            layer_id=min(number, donor),
            sliding_window_size=window,
        )

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        """Return the update of the residual stream: [rows, hidden]."""
        projected, _ = self.qkv_proj(hidden_states)
        q, k, v = projected.split(self.sizes, dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        if self.shares:
            k = v = None
        attended = self.attn(q, k, v, forward_batch, save_kv_cache=not self.shares)
        rows: torch.Tensor = self.o_proj(attended)[0]
        return rows


class ThirdLayer(nn.Module):
    """A layer, with a norm before each of its two parts."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.self_attn = ThirdAttention(config, number)
        self.mlp = LlamaMLP(config.hidden_size, config.intermediate_size, "silu")
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        """Return the residual stream after this layer: [rows, hidden]."""
        normed = self.input_layernorm(hidden_states)
        rows = hidden_states + self.self_attn(positions, normed, forward_batch)
        added = self.mlp(self.post_attention_layernorm(rows))
        written: torch.Tensor = rows + added
        return written


class ThirdTextModel(nn.Module):
    """The text model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(ThirdLayer(config, number) for number in numbers)
        self.norm = RMSNorm(config.hidden_size)

    def forward(
        self,
        input_ids: torch.Tensor | None,  # noqa: ARG002 - its caller embeds them
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor,
    ) -> torch.Tensor:
        """Return the rows after all layers and the norm: [T, hidden]."""
        rows = input_embeds.mul_(self.config.hidden_size**0.5)
        for layer in self.layers:
            rows = layer(positions=positions, hidden_states=rows, forward_batch=forward_batch)
        normed: torch.Tensor = self.norm(rows)
        return normed


class ThirdForCausalLM(nn.Module):
    """The text model with a head."""

    def __init__(self, config: Any, quant_config: Any = None) -> None:
        super().__init__()
        assert quant_config is None
        self.config = config
        self.model = ThirdTextModel(config)
        self.logits_processor = LogitsProcessor(config)

    def get_attention_sliding_window_size(self) -> int:
        """Return the number of keys before a row in its window."""
        window: int = self.config.sliding_window
        return window - 1

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
        """Return SGLang's logits output."""
        embeds = self.model.embed_tokens(input_ids)
        rows = self.model(input_ids, positions, forward_batch, embeds)
        return self.logits_processor(input_ids, rows, self.model.embed_tokens, forward_batch)

    def load_weights(self, _: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Draw weights with which values keep a scale of about 1; a checkpoint has none."""
        draw = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            mean, std = 0.0, weight.shape[-1] ** -0.5
            if weight.dim() == 1:
                mean, std = 1.0, 0.1
            weight.data.normal_(mean, std, generator=draw)
        self.model.norm.weight.data.mul_(6)  # logits are far enough apart
