"""Answers of forwards in bf16 on a GPU, and their distance from others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from harness.batches import batch_of
from scripts.bench import bench_prefill
from sglang_gemma4_reference.engine import Prompt
from sglang_gemma4_yoco import counters

#: The largest distance of an answer from stock's, in multiples of stock's own rounding.
ALLOWED = 2.0
#: For K and V. Stock's own replays of a padded bucket are up to 0.012 from its eager layers (H200).
LARGEST_CACHE_ERROR = 0.02
#: The lengths of the prompts of ``find_rounding``. In longer ones a decode step on Triton sees one
#: key fewer in its window of 512 than a prefill does.
ROUNDED = (40, 257, 300, 511)


def find_distance(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest |logits - wanted| / |wanted| of a row; both are [B, vocabulary]."""
    distances = (logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return float(distances.max())


def find_rounding(engine: Any) -> float:
    """Return the largest distance between two answers of stock that differ by rounding alone.

    A prompt's last token is computed among the others of its prefill, and by a decode step after
    them. A decode step runs the kernels of one row, as the tail does, in all layers. For example,
    a prompt of 300 tokens is a prefill of 300 rows, or one of 299 and a decode step.
    """
    distances = []
    for length in ROUNDED:
        [prompt] = batch_of((0, length))
        whole = engine.schedule([prompt])
        _, wanted = bench_prefill.timed(engine, whole, "off")
        wanted = wanted.double()
        but_last = engine.schedule([Prompt((), prompt.new[:-1])])
        bench_prefill.timed(engine, but_last, "off")
        step = engine.decode(but_last, prompt.new[-1:])
        distances.append(find_distance(step.next_token_logits.double(), wanted))
    print(f"distance of stock's decode step from its prefill: {distances}")
    return max(distances)


@dataclass(frozen=True)
class Answer:
    """Answer of one forward.

    Attributes:
        path: the outcomes that the package reports.
        logits: [B, vocabulary], in double precision.
        cache: K and V of each layer that owns some, at the slots that were written.
    """

    path: str
    logits: Any
    cache: list[Any]

    @classmethod
    def of(cls, engine: Any, batch: Any, way: str) -> Answer:
        """Return the answer of one forward of a batch, over poisoned K and V."""
        engine.poison(batch)
        counters.served.forwards.clear()
        logits = bench_prefill.timed(engine, batch, way)[1].double()
        return cls(", ".join(map(str, counters.served.forwards)), logits, engine.written(batch))

    def beside(self, other: Answer, rounding: float) -> dict[str, Any]:
        """Return the distance from ``other``, the reference, and whether rounding explains it.

        Args:
            other: stock's answer, or that of the same path with other kernels.
            rounding: of this model and device; see ``find_rounding``.
        """
        errors = []
        for one, wanted in zip(self.cache, other.cache, strict=True):
            error = (one.double() - wanted.double()).norm() / wanted.double().norm()
            errors.append(float(error))
        found = {
            "distance": find_distance(self.logits, other.logits),
            "rounding": rounding,
            "cache_error": float(torch.tensor(errors).max()),  # of which one may be NaN
            "same_logits": torch.equal(self.logits, other.logits),
            "same_cache": all(map(torch.equal, self.cache, other.cache)),
        }
        # Comparisons with NaN are False.
        is_near = found["distance"] <= ALLOWED * rounding
        return found | {"right": is_near and found["cache_error"] <= LARGEST_CACHE_ERROR}
