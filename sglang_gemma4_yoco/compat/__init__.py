"""SGLang as this package uses it. No other folder imports SGLang, but for what an operator runs.

Where supported releases differ, the difference is handled here.
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
