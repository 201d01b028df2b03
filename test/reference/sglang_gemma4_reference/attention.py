"""Attention in plain PyTorch that is right for sliding windows, at any age of the cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Rows of q per attention call: bounds the mask to _BLOCK x keys, and lets causal and window
# layers leave out most of the keys that they would only mask.
_BLOCK = 256


def _kv_lens(forward_batch: Any) -> list[int]:
    """Keys of each request: read here alone, for extend and decode alike."""
    lens: list[int] = forward_batch.seq_lens.tolist()
    return lens


class WindowedTorchNativeBackend(TorchNativeAttnBackend):
    """``torch_native``, with window layers that read the slots they were written to.

    SGLang keeps the K/V of window layers in a pool of their own and translates slots into it;
    ``torch_native`` translates what it writes and forgets to translate what it reads, which
    goes unnoticed until the two pools first disagree. This backend also restricts each block
    of queries to the keys inside its window instead of masking the others.

    It keeps no metadata: every call looks only at its arguments and at the batch's
    ``req_pool_indices``, ``seq_lens``, ``extend_seq_lens`` and ``out_cache_loc``. The rows of
    ``q`` are the *last* rows of each request, so a call may bring K/V for more rows than it
    brings queries, or no K/V at all.
    """

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing to prepare."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        """Attend as the last ``extend_seq_lens[i]`` rows of each request; see ``_forward``.

        When drafts are verified, their rows come after the ``seq_lens[i]`` tokens of request i.
        """
        kv_lens = _kv_lens(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            drafts = forward_batch.spec_info.draft_token_num
            query_lens = [drafts] * len(kv_lens)
            kv_lens = [kv_len + drafts for kv_len in kv_lens]
        else:
            query_lens = forward_batch.extend_seq_lens.tolist()
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, query_lens, kv_lens)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        """Attend as the last row of each request; see ``_forward``."""
        kv_lens = _kv_lens(forward_batch)
        query_lens = [1] * len(kv_lens)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, query_lens, kv_lens)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        query_lens: Iterable[int],
        kv_lens: Iterable[int],
    ) -> torch.Tensor:
        """Write ``k`` and ``v`` to the cache, then attend to the cache.

        Args:
            q: [sum(query_lens), heads, head_dim], or flattened to two dimensions.
            k, v: [len(out_cache_loc), kv_heads, head_dim], or None to write nothing.
            query_lens: rows of ``q`` per request.
            kv_lens: keys per request, the last of which belong to the rows of ``q``.

        Returns:
            [sum(query_lens), heads * head_dim].
        """
        if layer.is_cross_attention or layer.attn_type is not AttentionType.DECODER:
            raise NotImplementedError(f"layer {layer.layer_id}: only causal self-attention")
        pool = self.token_to_kv_pool
        window = layer.sliding_window_size if layer.sliding_window_size > 0 else None
        # Asked of the pool at hand: a draft model's backend is lent the target's pool.
        mapping = getattr(pool, "layers_mapping", None)
        in_window_pool = mapping is not None and mapping[layer.layer_id][1]
        if save_kv_cache and k is not None:
            loc = forward_batch.out_cache_loc
            window_loc = pool.translate_loc_from_full_to_swa(loc) if in_window_pool else None
            pool.set_kv_buffer(layer, KVWriteLoc(loc, window_loc), k, v)

        keys = pool.get_key_buffer(layer.layer_id)
        values = pool.get_value_buffer(layer.layer_id)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        start = 0
        for request, kv_len, query_len in zip(
            forward_batch.req_pool_indices.tolist(),
            kv_lens,
            query_lens,
            strict=True,
        ):
            end = start + query_len
            # Slots further back belong to no row of the window, and may have been given away.
            first = 0 if window is None else max(0, kv_len - query_len - window)
            slots = self.req_to_token_pool.req_to_token[request, first:kv_len].long()
            if in_window_pool:
                slots = pool.translate_loc_from_full_to_swa(slots)
            out[start:end] = causal_attention(
                q[start:end],
                keys[slots].to(q.dtype),
                values[slots].to(q.dtype),
                scale=layer.scaling,
                window=window,
            )
            start = end
        return out.flatten(1)


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the last rows of one request to all of its keys.

    Args:
        q: [rows, heads, head_dim], the last rows.
        k, v: [keys, kv_heads, head_dim], the last ``keys`` rows; at least ``rows``.
        window: how many keys before its own a row sees, or None for all of them.

    Returns:
        [rows, heads, head_dim of v].
    """
    offset = k.shape[0] - q.shape[0]
    blocks = []
    for start in range(0, q.shape[0], _BLOCK):
        rows = q[start : start + _BLOCK]
        last = offset + start + rows.shape[0]
        first = 0 if window is None else max(0, offset + start - window)
        mask = None
        if rows.shape[0] > 1:
            row = torch.arange(offset + start, last, device=q.device)[:, None]
            key = torch.arange(first, last, device=q.device)
            mask = key <= row
            if window is not None:
                mask &= key >= row - window
        blocks.append(
            scaled_dot_product_attention(
                rows.transpose(0, 1)[None],
                k[first:last].transpose(0, 1)[None],
                v[first:last].transpose(0, 1)[None],
                attn_mask=mask,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )[0].transpose(0, 1)
        )
    return torch.cat(blocks)
