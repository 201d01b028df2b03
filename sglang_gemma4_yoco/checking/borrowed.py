"""Memory of a server's pools and tables, borrowed for synthetic requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def borrowed(places: Sequence[torch.Tensor]) -> Iterator[None]:
    """Whatever is written to these views in the span, what lay there is put back at its end."""
    saved = [place.clone() for place in places]
    try:
        yield
    finally:
        for place, values in zip(places, saved, strict=True):
            place.copy_(values)


def random_like(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Normally distributed, of this shape, in fp32."""
    return torch.randn(like.shape, generator=generator, device=like.device)
