"""The SGLang interface of this package. Only this folder and ``commands`` import SGLang.

Differences between supported releases are handled here.
"""

from sglang_gemma4_yoco.compat import (
    attention,
    backends,
    batch,
    captured_prefills,
    decode_graphs,
    layers,
    names,
    pools,
    release,
    server,
)

__all__ = [
    "attention",
    "backends",
    "batch",
    "captured_prefills",
    "decode_graphs",
    "layers",
    "names",
    "pools",
    "release",
    "server",
]
