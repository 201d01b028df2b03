"""Prompts with images, videos and audio, and the attention masks that images bring.

On Triton the rows of one image attend to each other in both directions: SGLang writes a mask into
the metadata of the runner's attention backend, between planning and the first layer. An image that
is split between chunks gets no mask, nor do videos and audio.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from sglang.srt.managers.mm_utils import init_mm_embedding_cache
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from harness.observe import Observed
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import E2B_TINY, build_processor
from sglang_gemma4_reference.engine import Engine, Prompt

_FRAMES = 2
#: Placeholder in a prompt's text -> the processor's argument.
_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
_SAMPLES = 3200  # of audio, a fifth of a second


@dataclass(frozen=True)
class MediaPrompt:
    """One request of a batch.

    Attributes:
        text: a token per byte; ``<|image|>``, ``<|video|>`` and ``<|audio|>`` are one item each.
        cached: how many of the first tokens, all of them text, are in the cache.
        end: the end of this chunk, as an index of the prompt's tokens; None for the prompt's end.
        is_last: the prompt ends at ``end``; else the rest is left for later chunks.
        logprob_start: the first position with input logprobs; -1 for none.
        size: (height, width) of images in pixels; 48 by 48 make one token.
    """

    text: str
    cached: int = 0
    end: int | None = None
    is_last: bool = False
    logprob_start: int = -1
    size: tuple[int, int] = (96, 144)


_processor = cache(build_processor)


def _encoded(prompt: MediaPrompt) -> Any:
    """Return the processor's output for the prompt; images and frames keep their size."""
    draw = torch.Generator().manual_seed(len(prompt.text))
    given: dict[str, Any] = {}
    for kind in re.findall(r"<\|(image|video|audio)\|>", prompt.text):
        # Noise: rows of one colour would hardly show which keys they attend to.
        if kind == "audio":
            made: Any = torch.randn(_SAMPLES, generator=draw).numpy()
        else:
            shape: tuple[int, ...] = (3, *prompt.size)
            if kind == "video":
                shape = (_FRAMES, 3, 96, 96)
            made = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
        given.setdefault(_ARGUMENTS[kind], []).append(made)
    if "videos" in given:
        given["do_sample_frames"] = False  # as SGLang sets it: it has sampled them itself
    if given:
        given["do_resize"] = False
    return _processor(E2B_TINY)(text=prompt.text, return_tensors="pt", **given)


def _unpadded(pixels: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs without patch columns that are padding in every image.

    Args:
        pixels: [images, patches, pixels of a patch].
        places: [images, patches, 2], -1 for padding, which comes last.
    """
    longest = int((places[..., 0] >= 0).sum(-1).max())
    return pixels[:, :longest], places[:, :longest]


def _items(encoded: Any, spans: dict[str, list[tuple[int, int]]]) -> list[MultimodalDataItem]:
    """Return one item per image or audio clip, and one for the frames of a video."""
    made = []

    def add(kind: str, offsets: list[tuple[int, int]], feature: Any, **more: Any) -> None:
        item = MultimodalDataItem(
            modality=Modality[kind], offsets=offsets, feature=feature, model_specific_data=more
        )
        item.set_pad_value()
        made.append(item)

    for i, span in enumerate(spans["image"]):
        pixels, places = _unpadded(encoded["pixel_values"], encoded["image_position_ids"])
        add("IMAGE", [span], pixels[i : i + 1], image_position_ids=places[i : i + 1])
    if spans["video"]:
        pixels, places = _unpadded(encoded["pixel_values_videos"], encoded["video_position_ids"])
        add("VIDEO", spans["video"], pixels, video_position_ids=places)
    for i, span in enumerate(spans["audio"]):
        mask = encoded["input_features_mask"][i : i + 1]
        add("AUDIO", [span], encoded["input_features"][i : i + 1], input_features_mask=mask)
    return made


def _plain(engine: Engine, prompt: MediaPrompt) -> tuple[Prompt, MultimodalInputs | None]:
    """Return the prompt as the engine takes it, and the media of its placeholders."""
    encoded = _encoded(prompt)
    [encoded_ids] = encoded["input_ids"]
    config, spans = engine.runner.model.config, {}
    for kind in _ARGUMENTS:
        placeholder = getattr(config, f"{kind}_token_id")
        spans[kind] = BaseMultimodalProcessor.get_mm_items_offset(encoded_ids, placeholder)
    items, ids = _items(encoded, spans), encoded_ids.tolist()
    for item in items:
        for begin, end in item.offsets:
            ids[begin : end + 1] = releases.placeholders(item, end + 1 - begin)
    inputs = None
    if items:
        inputs = MultimodalInputs(
            mm_items=items,
            im_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            audio_token_id=config.audio_token_id,
        )
    ids, rest = tuple(ids), tuple[int, ...]()
    if prompt.end is not None and not prompt.is_last:
        rest = ids[prompt.end :]
    new = ids[prompt.cached : prompt.end]
    return Prompt(ids[: prompt.cached], new, prompt.logprob_start, rest), inputs


def media_batch(engine: Engine, *prompts: MediaPrompt) -> Any:
    """Return a scheduled batch of these prompts, for an engine of an ``E2B_TINY`` checkpoint."""
    init_mm_embedding_cache(0)  # as the scheduler does; of size 0, so that every forward encodes
    plain, media = zip(*[_plain(engine, prompt) for prompt in prompts], strict=True)
    scheduled = engine.schedule(plain)
    for req, inputs in zip(scheduled.reqs, media, strict=True):
        req.multimodal_inputs = inputs
    scheduled.multimodal_inputs = [*media]
    return scheduled


def next_chunk(engine: Engine, batch: Any, prompt: MediaPrompt) -> Any:
    """Return the rest of the only prompt of ``batch``, which did not end in it."""
    text, _ = _plain(engine, prompt)
    return engine.next_chunk(batch, [text])


@dataclass
class Masks:
    """Attention masks of images, forward by forward of the text model.

    Attributes:
        found: the mask in the metadata of the runner's backend before the first layer, or None.
        survived: whether metadata and mask are the same, unchanged objects after the last layer.
    """

    found: list[torch.Tensor | None] = field(default_factory=list)
    survived: list[bool] = field(default_factory=list)


@contextmanager
def masks(engine: Engine) -> Iterator[Masks]:
    """Watch the metadata of the engine's attention backend in the ``with`` block."""
    seen, model = Masks(), engine.text_model
    before: list[Any] = []

    def on_entry(*_: Any) -> None:
        metadata = engine.runner.attn_backend.forward_metadata
        before[:] = [metadata, metadata.custom_mask]
        seen.found.append(deepcopy(metadata.custom_mask))

    def on_exit(*_: Any) -> None:
        metadata, found = engine.runner.attn_backend.forward_metadata, seen.found[-1]
        same = metadata is before[0] and metadata.custom_mask is before[1]
        seen.survived.append(same and (found is None or torch.equal(found, before[1])))

    with model.register_forward_pre_hook(on_entry), model.register_forward_hook(on_exit):
        yield seen


@contextmanager
def without_masks(engine: Engine) -> Iterator[None]:
    """Let images attend causally in the ``with`` block, as on any backend other than Triton."""
    with mock.patch.object(type(engine.runner.model), "prepare_attn_masks"):
        yield


def image_mask(batch: Any) -> tuple[torch.Tensor, bool]:
    """Return the mask of the keys that each new row sees, and whether it is more than causal.

    The mask has SGLang's layout. Images that lie wholly in the chunk attend in both directions.
    """
    parts, has_images = list[torch.Tensor](), False
    for req, new, cached in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
        sees = torch.ones(new, cached + new, dtype=torch.bool).tril(cached)
        for item in getattr(req.multimodal_inputs, "mm_items", ()):
            for begin, end in item.offsets:
                if item.is_image() and cached <= begin and end < cached + new:
                    sees[begin - cached : end + 1 - cached, begin : end + 1] = True
                    has_images = True
        parts.append(sees.flatten())
    return torch.cat(parts), has_images


def assert_same_inputs(stock: Observed, fast: Observed) -> None:
    """Assert that both forwards got the same rows from the encoders."""
    embedded, again = stock.before["mm_input_embeds"], fast.before["mm_input_embeds"]
    assert isinstance(embedded, torch.Tensor)
    assert isinstance(again, torch.Tensor)
    assert torch.equal(embedded, again)
