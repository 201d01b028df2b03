"""Small batches of prompts, for tests that forward them on an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sglang_gemma4_reference.engine import Prompt


def tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    """Return random token ids, none of them special."""
    return tuple(draw.randrange(20, 500) for _ in range(count))


def new_rows(prompts: Sequence[Prompt]) -> int:
    """Return the number of rows of a forward of these prompts."""
    return sum(len(prompt.new) for prompt in prompts)


def kept_rows(prompts: Sequence[Prompt]) -> list[int]:
    """Return the number of rows of each request that the scheduler or the sampler reads."""
    kept = []
    for prompt in prompts:
        wanted = 1
        if prompt.logprob_start >= 0:
            first = max(prompt.logprob_start - len(prompt.cached), 0)
            wanted = max(len(prompt.new) - first, 1)
        kept.append(wanted)
    return kept


def rest_of(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the rest of the unfinished prompts."""
    unfinished = [p for p in prompts if p.to_come]
    return [replace(p, cached=p.cached + p.new, new=p.to_come, to_come=()) for p in unfinished]


def batch_of(*lens: tuple[int, int], **more: Any) -> list[Prompt]:
    """Return prompts with (cached, new) random tokens."""
    draw = random.Random(0)
    return [Prompt(tokens(draw, cached), tokens(draw, new), **more) for cached, new in lens]


BATCHES = {
    "one prompt": batch_of((0, 70)),
    "three, two of them cached": batch_of((30, 40), (0, 7), (90, 1)),
    "input logprobs": [*batch_of((10, 40), logprob_start=35), *batch_of((0, 9))],
}
