"""A Gemma 4 on SGLang's ModelRunner, on the rehearsal's device, with the package."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rehearsal import kernels
from sglang_gemma4_reference import checkpoint
from sglang_gemma4_reference.checkpoint import Gemma4Shape


def _serve_text(shape: Gemma4Shape) -> Gemma4Shape:
    """Small towers: the real ones cost time, and no text passes through them."""
    small = checkpoint._SMALL_TOWER
    return dataclasses.replace(shape, vision=small, audio=small, dtype="bfloat16")


E2B = _serve_text(checkpoint.E2B)
E4B = _serve_text(checkpoint.E4B)
#: E2B's widths, with ten of its layers.
E2B_SHORT = dataclasses.replace(E2B, layers=10, kv_shared_layers=5, vocab_size=4096)


def build(folder: Path, shape: Gemma4Shape, *, weights: bool = False, **arguments: Any) -> Any:
    """An Engine.

    Args:
        folder: the checkpoint is written to it.
        shape: the model's dimensions.
        weights: random ones; else there are none, and what is read as one is arbitrary.
        arguments: SGLang's server arguments, beside those that every rehearsal needs.
    """
    checkpoint.write_checkpoint(folder, shape, weights=weights)
    from sglang_gemma4_reference.engine import Engine

    kernels.install()
    needed = {"max_total_tokens": 6000, "max_running_requests": 40, "mem_fraction_static": 0.5}
    load_format = "auto" if weights else "dummy"
    return Engine(folder, device="cuda", load_format=load_format, **(needed | arguments))
