"""Small batches of random prompts, for tests that forward them on an engine."""

from __future__ import annotations

import random
from typing import Any

from sglang_gemma4_reference.engine import Prompt


def batch_of(*lens: tuple[int, int], **more: Any) -> list[Prompt]:
    """Prompts with (cached, new) random tokens."""
    draw = random.Random(0)
    return [
        Prompt(
            tuple(draw.randrange(20, 500) for _ in range(cached)),
            tuple(draw.randrange(20, 500) for _ in range(new)),
            **more,
        )
        for cached, new in lens
    ]


BATCHES = {
    "one prompt": batch_of((0, 70)),
    "three, two of them cached": batch_of((30, 40), (0, 7), (90, 1)),
    "input logprobs": [*batch_of((10, 40), logprob_start=35), *batch_of((0, 9))],
}
