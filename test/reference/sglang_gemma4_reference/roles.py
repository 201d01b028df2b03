"""The two roles of prefill-decode disaggregation on a CPU, without the parts that need CUDA.

Tried with SGLang 0.5.23. K and V are sent over TCP by a package,
``mooncake-transfer-engine-non-cuda``, that loads system libraries: ``libcurl4``, ``libibverbs1``
and ``libnuma1``, as Debian calls them. A prefill role without it still serves the requests that
name ``NO_PEER`` as their peer, as those of SGLang's own warm-up do.
"""

from __future__ import annotations

import os
from typing import Any

SGLANG = "0.5.23"
#: SGLang's ``FAKE_BOOTSTRAP_HOST``.
NO_PEER = "2.2.2.2"

_EARLY = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"


def choose(server_args: Any) -> None:
    """Send and keep K and V in ordinary memory, on a server with a role."""
    if server_args.disaggregation_mode == "null":
        return
    # Cached pages would be sent before the forward that adds to them, after a CUDA event. The
    # server's other processes inherit this.
    os.environ[_EARLY] = "0"
    # Else retracted requests wait in memory that CUDA has pinned.
    if getattr(server_args, "disaggregation_decode_retraction_backup", "") is None:
        server_args.disaggregation_decode_retraction_backup = "cpu_tensor"


def are_wanted() -> bool:
    """Return True if this process belongs to a server with a role."""
    return os.environ.get(_EARLY) == "0"


def install() -> None:
    """Send page numbers directly, without pinned memory."""
    from sglang.srt.disaggregation.mooncake import conn

    conn.MooncakeKVSender.supports_host_tensor_indices = False
