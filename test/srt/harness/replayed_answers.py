"""What a forward gives, and how far that is from what another one gives, in bf16 on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from scripts.bench import bench_prefill
from sglang_gemma4_yoco import counters

# Of bf16: a wrong row, key or weight is off by far more.
LEAST_COSINE = 0.9999
LARGEST_CACHE_ERROR = 0.02


@dataclass(frozen=True)
class Answer:
    """What one forward gave.

    Attributes:
        path: what the package reports of it.
        logits: [1, vocabulary], in double precision.
        cache: K and V of each layer with some, at the slots that were written.
    """

    path: str
    logits: Any
    cache: list[Any]

    @classmethod
    def of(cls, engine: Any, batch: Any, way: str) -> Answer:
        """Run it, over K and V that are poisoned."""
        engine.poison(batch)
        counters.forwards.clear()
        logits = bench_prefill.timed(engine, batch, way)[1].double()
        return cls(", ".join(counters.forwards), logits, engine.written(batch))

    def beside(self, other: Answer) -> dict[str, Any]:
        """How far it is from another one, which counts as right."""
        errors = []
        for one, wanted in zip(self.cache, other.cache, strict=True):
            error = (one.double() - wanted.double()).norm() / wanted.double().norm()
            errors.append(float(error))
        cosines = torch.nn.functional.cosine_similarity(self.logits, other.logits, dim=-1)
        found = {
            "cosine": float(cosines.min()),
            "cache_error": float(torch.tensor(errors).max()),  # of which one may be NaN
            "same_logits": torch.equal(self.logits, other.logits),
            "same_cache": all(map(torch.equal, self.cache, other.cache)),
        }
        # Comparisons with what is no number are false.
        right = found["cosine"] > LEAST_COSINE and found["cache_error"] <= LARGEST_CACHE_ERROR
        return found | {"right": right}
