"""Refusals by what SGLang's runner has built: its attention backends, and its pools of K and V."""

from typing import Any

import torch

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.compat.attention import AttentionBackend
from sglang_gemma4_yoco.compat.pools import KVCache
from sglang_gemma4_yoco.refusal import ServerRefusal

NO_TAIL = ServerRefusal("no attention backend could be built for the tail")


def find_backend_reason(
    main: AttentionBackend, table: compat.backends.BackendTable
) -> ServerRefusal | None:
    """Return why the server's attention backend rules out fast prefill for a model, or None.

    Args:
        main: the server's attention backend.
        table: the model's (``compat/backends.py``).
    """
    for part in compat.attention.list_parts(main):
        kind = type(part)
        unknown = ServerRefusal(f"the attention backend {kind.__name__} is not known to be correct")
        known = table.get(compat.backends.get_path(kind))
        if not known:
            return unknown
        if not known.is_admitted:
            return known.reason or unknown
    return None


def find_pool_reason(pool: KVCache, dtype: torch.dtype) -> ServerRefusal | None:
    """Return why the tail cannot read K and V of this server, or None.

    It needs one tensor of K and one of V per layer, slot by slot, unquantised. If the cache's dtype
    is not the queries', Triton's own forward fails at the first shared layer.

    Args:
        pool: the runner's ``token_to_kv_pool``.
        dtype: the dtype of the model's weights and activations.
    """
    parts = [pool]
    if type(pool) is compat.pools.SWAKVPool:
        parts = [pool.full_kv_pool, pool.swa_kv_pool]
    for part in parts:
        if type(part) is not compat.pools.MHATokenToKVPool:
            return ServerRefusal(
                f"K and V are in a {type(part).__name__}, whose layout is not known"
            )
        method = compat.pools.find_quantisation(part)
        if method is not None:
            return ServerRefusal(f"K and V are quantised ({method})")
        buffers: Any = part.k_buffer, part.v_buffer
        most = max(buffer.dim() for layers in buffers for buffer in layers)
        if most != 3:
            return ServerRefusal(f"K and V are not stored slot by slot, but in {most} dimensions")
    if pool.dtype == dtype:
        return None
    return ServerRefusal(f"a KV cache of {pool.dtype} with weights of {dtype}")
