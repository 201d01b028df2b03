"""Small batches of prompts, for tests that forward them on an engine."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from PIL import Image

from sglang_gemma4_reference.checkpoint import E2B_TINY, build_processor
from sglang_gemma4_reference.engine import Engine, Prompt


def tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    """Random token ids, none of them special."""
    return tuple(draw.randrange(20, 500) for _ in range(count))


def kept_rows(prompts: Sequence[Prompt]) -> int:
    """Rows that the scheduler or the sampler reads, counted from the requests' own words."""
    kept = 0
    for prompt in prompts:
        wanted = 1
        if prompt.logprob_start >= 0:
            first = max(prompt.logprob_start - len(prompt.cached), 0)
            wanted = max(len(prompt.new) - first, 1)
        kept += wanted
    return kept


def batch_of(*lens: tuple[int, int], **more: Any) -> list[Prompt]:
    """Prompts with (cached, new) random tokens."""
    draw = random.Random(0)
    return [Prompt(tokens(draw, cached), tokens(draw, new), **more) for cached, new in lens]


BATCHES = {
    "one prompt": batch_of((0, 70)),
    "three, two of them cached": batch_of((30, 40), (0, 7), (90, 1)),
    "input logprobs": [*batch_of((10, 40), logprob_start=35), *batch_of((0, 9))],
}


def media_batch(engine: Engine, kind: str, cached: int) -> Any:
    """A scheduled batch of one prompt: some text, partly in the cache, and what it asks about.

    Args:
        engine: of an ``E2B_TINY`` checkpoint.
        kind: ``image``, or ``video`` (two frames).
        cached: how many of the first tokens, all of them text, are in the cache.
    """
    from sglang.srt.managers.mm_utils import init_mm_embedding_cache, pad_mm_tokens
    from sglang.srt.managers.schedule_batch import (
        Modality,
        MultimodalDataItem,
        MultimodalInputs,
    )

    init_mm_embedding_cache(0)  # the scheduler's task: so that every forward encodes
    media: dict[str, Any] = (
        {"images": [Image.new("RGB", (96, 96), "green")]}
        if kind == "image"
        else {
            "videos": [torch.randint(0, 256, (2, 3, 96, 96), dtype=torch.uint8)],
            "do_sample_frames": False,  # as SGLang asks for it: it has sampled them itself
        }
    )
    encoded = build_processor(E2B_TINY)(
        text=f"what do you see here? <|{kind}|> and there?", return_tensors="pt", **media
    )
    token = getattr(engine.runner.model.config, f"{kind}_token_id")
    ids = encoded["input_ids"][0].tolist()
    places = [place for place, given in enumerate(ids) if given == token]
    # Each frame of a video has a span of its own: places less their rank are equal within one.
    spans = [
        [place for _, place in span]
        for _, span in groupby(enumerate(places), lambda ranked: ranked[1] - ranked[0])
    ]
    feature = encoded["pixel_values" if kind == "image" else "pixel_values_videos"]
    item = MultimodalDataItem(
        modality=Modality[kind.upper()],
        offsets=[(span[0], span[-1]) for span in spans],
        feature=feature,
        model_specific_data={f"{kind}_position_ids": encoded[f"{kind}_position_ids"]},
    )
    item.set_pad_value()
    inputs = MultimodalInputs(
        mm_items=[item], **{"im_token_id" if kind == "image" else "video_token_id": token}
    )
    ids = tuple(pad_mm_tokens(array("q", ids), inputs))
    scheduled = engine.schedule([Prompt(ids[:cached], ids[cached:])])
    scheduled.reqs[0].multimodal_inputs = inputs
    scheduled.multimodal_inputs = [inputs]
    return scheduled
