"""Attention in plain PyTorch, correct for sliding windows at any age of the cache."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

from sglang_gemma4_reference import recorder

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Rows of q per attention call: bounds the mask to _BLOCK x keys, and lets causal and window
# layers leave out most of the keys that they would only mask.
_BLOCK = 256


class LayerCache(NamedTuple):
    """Places of one layer's K and V.

    Attributes:
        keys, values: [slots, kv_heads, head_dim].
        slots: [requests, positions], the slot of each token.
        window_slots: of the layer's own pool, for each slot of the full one; None for a layer
            whose pool is the full one.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    window_slots: torch.Tensor | None


class WindowedTorchNativeBackend(TorchNativeAttnBackend):
    """``torch_native``, with window layers that read from the slots they were written to.

    SGLang keeps the K/V of window layers in a separate pool and translates slots into it;
    ``torch_native`` translates slots when it writes, but not when it reads, which has no
    effect until the two pools first differ. This backend also restricts each block
    of queries to the keys inside its window instead of masking the others.

    It keeps no metadata: every call reads only its arguments and the batch's
    ``req_pool_indices``, ``seq_lens``, ``extend_seq_lens`` and ``out_cache_loc``. The rows of
    ``q`` are the *last* rows of each request, so a call may have K/V for more rows than it
    has queries, or no K/V at all.

    Decode steps and steps that verify drafts can be captured: attention is one node per layer.
    """

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Do nothing: there is no metadata."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: a captured step reads the batch's own static tensors."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a request that pads a captured batch."""
        return 1

    def forward_extend(self, q: torch.Tensor, *call: Any, **kwargs: Any) -> torch.Tensor:
        """Write K and V, then attend as the last ``extend_seq_lens[i]`` rows of each request.

        When drafts are verified, their rows come after the ``seq_lens[i]`` tokens of request i.

        Args:
            q: [sum(extend_seq_lens), heads, head_dim], or flattened to two dimensions.
            call, kwargs: the arguments of ``_write``.

        Returns:
            [sum(extend_seq_lens), heads * head_dim].
        """
        cache, layer, batch = self._write(*call, **kwargs)
        where = cache, layer, batch.req_pool_indices, batch.seq_lens
        if not batch.forward_mode.is_target_verify():
            return _attend(q, *where, rows=batch.extend_seq_lens)
        drafts = batch.spec_info.draft_token_num
        return recorder.as_one_node(_attend, q, *where, rows=drafts, ahead=drafts)

    def forward_decode(self, q: torch.Tensor, *call: Any, **kwargs: Any) -> torch.Tensor:
        """Write K and V, then attend as the last row of each request; see ``forward_extend``."""
        cache, layer, batch = self._write(*call, **kwargs)
        where = cache, layer, batch.req_pool_indices, batch.seq_lens
        return recorder.as_one_node(_attend, q, *where, rows=1)

    def _write(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> tuple[LayerCache, RadixAttention, ForwardBatch]:
        """Write K and V, and return the layer's cache, the layer and the batch.

        Args:
            k, v: [len(out_cache_loc), kv_heads, head_dim], or None to write nothing.
        """
        if layer.is_cross_attention or layer.attn_type is not AttentionType.DECODER:
            raise NotImplementedError(f"layer {layer.layer_id}: only causal self-attention works")
        pool = self.token_to_kv_pool
        # Of the pool in use: a draft model's backend has the target's pool.
        mapping = getattr(pool, "layers_mapping", None)
        in_window_pool = mapping is not None and mapping[layer.layer_id][1]
        if save_kv_cache and k is not None:
            loc = forward_batch.out_cache_loc
            window_loc = None
            if in_window_pool:
                window_loc = pool.translate_loc_from_full_to_swa(loc)
            pool.set_kv_buffer(layer, KVWriteLoc(loc, window_loc), k, v)
        cache = LayerCache(
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
            pool.full_to_swa_index_mapping if in_window_pool else None,
        )
        return cache, layer, forward_batch


class FrontBackend(WindowedTorchNativeBackend):
    """The same backend under another name: a server's backend that no tail may run on."""


def register_as_proven() -> None:
    """Admit these backends for every text model if the package is loaded."""
    registry = sys.modules.get("sglang_gemma4_yoco.models.registry")
    if registry is None:
        return
    backends = sys.modules["sglang_gemma4_yoco.compat.backends"]
    for admitted, tail in ((WindowedTorchNativeBackend, True), (FrontBackend, False)):
        path = backends.get_path(admitted)
        for kind in registry.MODELS:
            kind.ATTENTION_BACKENDS[path] = backends.Backend(
                path, (), is_admitted=True, may_run_tail=tail
            )


def _attend(
    q: torch.Tensor,
    cache: LayerCache,
    layer: RadixAttention,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    *,
    rows: torch.Tensor | int,
    ahead: int = 0,
) -> torch.Tensor:
    """Attend to the cache; the host reads requests, lengths and rows, also at a graph's replay.

    Args:
        q: [rows of all requests, heads * head_dim].
        requests: the row of each request in ``cache.slots``.
        lengths: keys of each request.
        rows: the number of rows of each request, its last ones.
        ahead: the number of keys of each request beyond ``lengths``.

    Returns:
        [rows of all requests, heads * head_dim].
    """
    q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    kv_lens = (lengths + ahead).tolist()
    query_lens = [rows] * len(kv_lens) if isinstance(rows, int) else rows.tolist()
    out = q.new_empty(*q.shape[:-1], cache.values.shape[-1])
    start = 0
    for request, kv_len, query_len in zip(requests.tolist(), kv_lens, query_lens, strict=True):
        end = start + query_len
        # The number of keys before its own that a row sees.
        window = layer.sliding_window_size if layer.sliding_window_size > 0 else kv_len
        # Slots further back are in no row's window, and may belong to another request by now.
        first = max(0, kv_len - query_len - window)
        slots = cache.slots[request, first:kv_len].long()
        if cache.window_slots is not None:
            slots = cache.window_slots[slots]
        keys, values = (cached[slots].to(q.dtype) for cached in (cache.keys, cache.values))
        out[start:end] = attend_causally(q[start:end], keys, values, layer.scaling, window)
        start = end
    return out.flatten(1)


def attend_causally(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Return causal attention of the last rows of one request to all of its keys.

    Args:
        q: [rows, heads, head_dim], the last rows.
        k, v: [keys, kv_heads, head_dim], the last ``keys`` rows; at least ``rows``.
        window: the number of keys before its own that a row sees; None for all.

    Returns:
        [rows, heads, head_dim of v].
    """
    if window is None:
        window = k.shape[0]
    offset = k.shape[0] - q.shape[0]
    blocks = []
    for start in range(0, q.shape[0], _BLOCK):
        rows = q[start : start + _BLOCK]
        last = offset + start + rows.shape[0]
        first = max(0, offset + start - window)
        mask = None
        if rows.shape[0] > 1:
            row = torch.arange(offset + start, last, device=q.device)[:, None]
            key = torch.arange(first, last, device=q.device)
            mask = (key <= row) & (key >= row - window)
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
