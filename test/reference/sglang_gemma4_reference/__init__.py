"""Gemma 4 on SGLang without a GPU: a CPU platform, an attention backend, a checkpoint maker.

``SGLANG_PLATFORM=gemma4_cpu`` selects the platform; see ``platform`` for what it replaces.
"""


def activate() -> str:
    """Name the platform class; SGLang imports it only in the processes that need it."""
    return "sglang_gemma4_reference.platform.Gemma4CpuPlatform"
