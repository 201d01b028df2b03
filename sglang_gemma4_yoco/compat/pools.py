"""The pools of K and V."""

from typing import Any, NamedTuple, TypeGuard

from sglang.srt.mem_cache.memory_pool import KVCache as KVCache
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, ReqToTokenPool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool as MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool as SWAKVPool
from torch import Tensor

from sglang_gemma4_yoco.compat.attention import (
    AttentionBackend,
    frees_tables_early,
    is_triton,
    list_parts,
)
from sglang_gemma4_yoco.compat.batch import ForwardBatch
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.compat.text_model import RadixAttention

#: K and V of some tokens, each [tokens, kv_heads, head_dim].
KeysAndValues = tuple[Tensor, ...]


def is_in_window_pool(pool: KVCache, layer: int) -> TypeGuard[SWAKVPool]:
    """Return True if K and V of layer ``layer`` are in the sliding-window pool."""
    return bool(getattr(pool, "layers_mapping", {}).get(layer, (0, False))[1])


def waits_for_loads(pool: KVCache) -> bool:
    """Return True if K and V are loaded into this pool layer by layer during a forward."""
    pools = (pool, getattr(pool, "full_kv_pool", None), getattr(pool, "swa_kv_pool", None))
    return any(getattr(part, "layer_transfer_counter", None) is not None for part in pools)


def find_quantisation(pool: KVCache) -> str | None:
    """Return the method that quantises K and V of this pool, or None; 0.5.22 names none."""
    method = getattr(pool, "quant_method", None)
    name: str | None = getattr(method, "name", None)
    if name == "unquantized":
        return None
    return name


def write_keys_and_values(
    main: AttentionBackend,
    pool: KVCache,
    attention: RadixAttention,
    forward_batch: ForwardBatch,
    k: Tensor,
    v: Tensor,
) -> None:
    """Write K and V of all rows of a batch to a layer's pool.

    Args:
        main: the attention backend of the layers before the cut, with this batch's metadata.
        pool: the runner's.
        attention: the layer's ``RadixAttention``.
        k, v: [T, kv_heads, head_dim].
    """
    slots = forward_batch.out_cache_loc
    # Waits for K and V of the prefix to be loaded. Stock waits in the donor's attention, which an
    # intermediate chunk does not run and a replayed tail runs without Python; the next batch does
    # not wait again. Loads go up layer by layer, so those of the layers before have ended too.
    # Unnecessary once the pool has a method that waits for a layer.
    pool.get_kv_buffer(attention.layer_id)
    window_slots = None
    if is_in_window_pool(pool, attention.layer_id):
        main = list_parts(main)[0]  # the one for prefills
        # Triton's metadata has them, and so has that of backends whose lookup table the scheduler
        # may rewrite once they have it.
        if is_triton(main.__class__) or frees_tables_early(main):
            window_slots = getattr(main.forward_metadata, "swa_out_cache_loc", None)
        if window_slots is None:
            window_slots = pool.translate_loc_from_full_to_swa(slots)
    target: Any = KVWriteLoc.for_batch(forward_batch, swa_loc=window_slots)
    pool.set_kv_buffer(attention, target, k, v)


class CachedTokens(NamedTuple):
    """K and V of some tokens in a layer's pool.

    Attributes:
        slots: [tokens], their slots in the pool.
        keys, values: of the whole pool, each [slots, kv_heads, head_dim].
    """

    slots: Tensor
    keys: Tensor
    values: Tensor

    def read(self) -> KeysAndValues:
        """Return copies of their K and V, each [tokens, kv_heads, head_dim]."""
        return self.keys[self.slots], self.values[self.slots]

    def write(self, both: tuple[Tensor | float, ...]) -> None:
        """Overwrite their K and V.

        Args:
            both: K and V, each [tokens, kv_heads, head_dim], or one number for all of them.
        """
        self.keys[self.slots], self.values[self.slots] = both


def get_cached_tokens(pool: KVCache, layer: int, slots: Tensor) -> CachedTokens:
    """Return K and V of a layer, by its number in the model, at these slots of the full pool."""
    if is_in_window_pool(pool, layer):
        slots = pool.translate_loc_from_full_to_swa(slots)
    return CachedTokens(slots, *pool.get_kv_buffer(layer))


def get_request_table(runner: ModelRunner) -> ReqToTokenPool:
    """Return the runner's table of the slots of each request's tokens."""
    table = runner.req_to_token_pool
    assert table is not None, "the runner has its pools"
    return table
