"""End-to-end effect of rounding alone on a forward.

It depends on the model: where a head attends to few keys, one rounding can make it attend to
others. So the rounding of stock itself is perturbed, and its answers show the effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sglang_gemma4_reference.engine import Engine


def perturb(rows: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return rows whose rounding differs by up to eps / 2 more."""
    share = torch.rand(rows.shape, generator=draw) - 0.5
    return (rows.float() * (1 + share * torch.finfo(rows.dtype).eps)).to(rows.dtype)


@contextmanager
def rounded_otherwise(engine: Engine, seed: int) -> Iterator[None]:
    """Perturb the rounding of attention and FFN in the tail's layers.

    The tail begins in the donor, in which the cut is.
    """
    first_cut = engine.layers_with_kv[-1]
    draw = torch.Generator().manual_seed(seed)

    def rounded(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return perturb(output, draw)

    with ExitStack() as hooks:
        for layer in engine.text_model.layers[first_cut:]:
            for part in (layer.self_attn, layer.mlp):
                hooks.enter_context(part.register_forward_hook(rounded))
        yield
