"""The attention backends and pools of K and V that the fast path runs on; others are refused.

The front runs on the server's own backend, *main*. The tail writes no K and V: it reads the pools,
the requests' slots and its own view of the batch, and what these are does not hang on main. So it
runs on a backend of its own, which SGLang's registry builds under the name ``triton``, whatever
main is. What is asked of each:

- main: an extend step writes K and V of all rows to the pools, and in a window layer each row sees
  as many keys as Gemma 4 says, its own among them (512, where the layer is given 511). AITER's sees
  one fewer in some of its kernels, Ascend's has pools of its own, Intel's AMX writes in decode;
- the tail's: a decode step sees what an extend row of main sees (``seams.plan`` sees to that);
- the pools: one tensor of K and one of V for each layer, slot by slot, as they were computed.
  Triton's own servers may round them to another type: its decode steps read them in any case.

An attention backend that is not SGLang's own is admitted if its class says by itself what it can
do, for example ``gemma4_yoco = frozenset({"front", "tail"})``. A subclass says it anew.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_gemma4_yoco import seams

#: Where a class of another package says what it can do.
ATTRIBUTE = "gemma4_yoco"
#: It may be main.
FRONT = "front"
#: The tail may run on it: its decode step over a donor's cache equals its extend step.
TAIL = "tail"
#: Its recorded decode steps read nothing but their own buffers, which planning fills.
RECORDED = "recorded"

#: SGLang's own, by the name of the very class. Triton's is shown by test, as main and as the
#: tail's; the others were read, 0.5.23 line by line and earlier releases by pattern.
SGLANGS = {
    "TritonAttnBackend": frozenset({FRONT, TAIL, RECORDED}),
    "TRTLLMHAAttnBackend": frozenset({FRONT}),
    "FlashAttentionBackend": frozenset({FRONT}),
    "XPUAttentionBackend": frozenset({FRONT}),
}
NO_TAIL = "no attention backend could be built for the tail"
_FLASH_ATTENTION = 4  # the version of FlashAttention that SGLang lets Gemma 4 use


def can(kind: type) -> frozenset[str]:
    """What attention backends of this very class can do, of the names above."""
    if kind.__module__.startswith("sglang.srt."):
        return SGLANGS.get(kind.__name__, frozenset())
    return frozenset(vars(kind).get(ATTRIBUTE, ()))


def why_not_main(backend: Any) -> str | None:
    """Why no batch may be cut on a server with this attention backend, or None."""
    parts = seams.parts_of_hybrid(backend)
    if parts is not None:
        return next(filter(None, map(why_not_main, parts)), None)
    if FRONT not in can(type(backend)):
        return f"the attention backend {type(backend).__name__} is not proven"
    version = getattr(backend, "fa_impl_ver", _FLASH_ATTENTION)
    return None if version == _FLASH_ATTENTION else f"FlashAttention {version} is not proven"


def why_not_tail(backend: Any) -> str | None:
    """Why no tail can run on this backend, or None."""
    if TAIL in can(type(backend)):
        return None
    return f"the tail cannot run on the attention backend {type(backend).__name__}"


def why_not_pool(pool: Any, dtype: torch.dtype, main: Any) -> str | None:
    """Why the tail cannot read K and V of this server, or None.

    Args:
        pool: the runner's ``token_to_kv_pool``.
        dtype: of the model's weights and activations.
        main: the server's attention backend.
    """
    for part in seams.parts_of_pool(pool):
        if not seams.is_plain_pool(part):
            return f"K and V lie in a {type(part).__name__}, whose layout is not known"
        method = getattr(getattr(part, "quant_method", None), "name", "unquantized")
        if method != "unquantized":
            return f"K and V are quantised ({method})"
        dimensions = {buffer.dim() for buffer in (*part.k_buffer, *part.v_buffer)}
        if not dimensions <= {3}:
            return f"K and V do not lie slot by slot, but in {max(dimensions)} dimensions"
    if pool.dtype != dtype and TAIL not in can(type(main)):
        return f"a KV cache of {pool.dtype} beside {type(main).__name__}"
    return None
