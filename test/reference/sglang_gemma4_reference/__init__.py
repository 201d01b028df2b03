"""Gemma 4 on SGLang without a GPU: a CPU platform, an attention backend, a checkpoint maker.

``SGLANG_PLATFORM=gemma4_cpu`` selects the platform; see ``platform`` for what it replaces.
"""

import os


def activate() -> str | None:
    """Name the platform class; SGLang imports it only in the processes that need it.

    None unless it is named: SGLang activates every installed platform otherwise, and
    this one would then take over a machine with a GPU.
    """
    if os.environ.get("SGLANG_PLATFORM") != "gemma4_cpu":
        return None
    return "sglang_gemma4_reference.platform.Gemma4CpuPlatform"
