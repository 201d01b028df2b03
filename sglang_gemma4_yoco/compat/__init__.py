"""SGLang as this package uses it. No other folder imports SGLang, but for what an operator runs.

Where supported releases differ, the difference is handled here. ``captured_prefills`` is imported
by its users: a release may capture prefills differently, and then that import fails.
"""

from sglang_gemma4_yoco.compat import (
    attention,
    batch,
    decode_graphs,
    layers,
    names,
    pools,
    release,
    server,
)

__all__ = ["attention", "batch", "decode_graphs", "layers", "names", "pools", "release", "server"]
