"""Gemma 4 on SGLang without a GPU: a CPU platform, an attention backend, a checkpoint maker.

``SGLANG_PLATFORM=gemma4_cpu`` selects the platform; see ``platform`` for what it replaces.
"""

import os


def activate() -> str | None:
    """Return the name of the platform class; SGLang imports it only in processes that need it.

    Return None unless the variable selects it: SGLang activates every installed platform, and
    this one would take over a machine with a GPU.
    """
    if os.environ.get("SGLANG_PLATFORM") != "gemma4_cpu":
        return None
    return "sglang_gemma4_reference.platform.Gemma4CpuPlatform"
