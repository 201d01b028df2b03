"""Images on SGLang's Triton backend, where their rows attend to each other in both directions.

Everywhere else in the suite images attend causally: SGLang writes masks for this backend alone.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from harness.ask import TOLERANCE
from harness.fixtures import Checkpoints, left_to_release
from harness.forwards import assert_served_by_stock, failing, times
from harness.layer_rows import CHUNK_KEPT, INTERPRETED, cut, whole
from harness.media import (
    MediaPrompt,
    assert_same_inputs,
    image_mask,
    masks,
    media_batch,
    next_chunk,
    without_masks,
)
from harness.observe import Observed, both_ways, run
from sglang_gemma4_reference import interpreter
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.core import eligibility

pytestmark = pytest.mark.usefixtures("forgotten_reports")
interpreter.make_quick()

# The effect of a missing mask: several hundred times that of rounding.
DIFFERENT = 100 * TOLERANCE
LONG_IMAGE = (288, 288)  # 36 tokens: more than the window of 32
TEXT = MediaPrompt("only words")
assert INTERPRETED.sliding_window < 36

# The image is 6 tokens, between a begin and an end token.
CASES = {
    "at the start": [MediaPrompt("<|image|> why?")],
    "its own row last": [MediaPrompt("see <|image|>", end=-1, is_last=True)],
    "longer than the window": [MediaPrompt("see <|image|> or?", size=LONG_IMAGE)],
    "after a prefix beyond the window": [MediaPrompt(40 * "a" + "<|image|> or?", cached=38)],
    "beside text": [TEXT, MediaPrompt("see <|image|> or?"), MediaPrompt("a word", cached=5)],
    "beside another image": [
        MediaPrompt("<|image|> why?", size=(48, 144)),
        MediaPrompt("see it: <|image|> or?", cached=5),
    ],
    "beside a video": [MediaPrompt("<|video|> or <|image|> or?")],
}
USUAL = (
    *("its own row last", "longer than the window"),
    *("after a prefix beyond the window", "beside text"),
)


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints) -> Engine:
    engine = Engine(checkpoints(INTERPRETED), device="cpu", dtype="float32", max_total_tokens=512)
    assert type(engine.runner.attn_backend).__name__ == "TritonAttnBackend"
    return engine


def compare(engine: Engine, batch: Any, kept: int) -> tuple[Observed, torch.Tensor | None]:
    """Return the stock forward and its mask; assert that the fast one was active, and equal."""
    with masks(engine) as seen:
        stock, fast = both_ways(engine, batch, TOLERANCE if kept else math.inf)
    total = sum(batch.extend_lens)
    assert seen.survived == [True, True]
    assert stock.rows == stock.attention_rows == whole(total, INTERPRETED)
    rows = [rows for rows in cut(total, kept, INTERPRETED) if rows]
    assert fast.rows == fast.attention_rows == rows
    assert_same_inputs(stock, fast)
    before, now = seen.found
    torch.testing.assert_close(now, before, rtol=0, atol=0)  # both may be None
    return stock, before


def depends_on_the_mask(engine: Engine, batch: Any, stock: Observed) -> list[bool]:
    """Return for each prompt True if stock's answer changes without its images' masks."""
    with without_masks(engine), masks(engine) as seen:
        causal = run(engine, batch, "0")
    assert seen.found == [None]
    differences = stock.output.next_token_logits - causal.output.next_token_logits
    largest = differences.abs().amax(-1)
    assert ((largest > DIFFERENT) | (largest <= TOLERANCE)).all(), largest
    return list(map(bool, largest > DIFFERENT))


@pytest.mark.parametrize("name", left_to_release(CASES, but=USUAL))
def test_image(engine: Engine, name: str) -> None:
    prompts = CASES[name]
    batch = media_batch(engine, *prompts)
    stock, mask = compare(engine, batch, kept=len(prompts))
    assert_bidirectional(mask, batch, expected=True)
    has_image = ["<|image|>" in prompt.text for prompt in prompts]
    assert depends_on_the_mask(engine, batch, stock) == has_image


@pytest.mark.parametrize("kind", left_to_release(["video", "audio"], but=["video"]))
def test_what_attends_causally(engine: Engine, kind: str) -> None:
    """Video frames and audio have no masks; nor do they in Hugging Face's Gemma 4."""
    batch = media_batch(engine, MediaPrompt(f"see <|{kind}|> or?"))
    _, mask = compare(engine, batch, kept=1)
    assert mask is None


CHUNKED = MediaPrompt("see <|image|> or?")
IMAGE = slice(5, 11)  # the image's own rows in it


@pytest.mark.parametrize(
    ("end", "masked"),
    [
        pytest.param(IMAGE.start + 1, (False, False), id="after its first row"),
        pytest.param(IMAGE.stop, (True, False), id="after the image"),
    ],
)
def test_chunks(engine: Engine, end: int, masked: tuple[bool, bool]) -> None:
    """An image is masked only if one of the two chunks contains it as a whole.

    The first computes no tail; the second reads K and V that the first wrote on the fast path.
    """
    prompt = MediaPrompt(CHUNKED.text, end=end)
    first = media_batch(engine, prompt)
    assert first.reqs[0].multimodal_inputs.mm_items[0].offsets == [(IMAGE.start, IMAGE.stop - 1)]
    _, mask = compare(engine, first, kept=CHUNK_KEPT)
    assert_bidirectional(mask, first, masked[0])
    second = next_chunk(engine, first, prompt)
    assert second.prefix_lens == [end]
    stock, mask = compare(engine, second, kept=1)
    assert_bidirectional(mask, second, masked[1])
    assert depends_on_the_mask(engine, second, stock) == [masked[1]]


def assert_bidirectional(mask: torch.Tensor | None, batch: Any, expected: bool) -> None:
    """Assert the mask, which SGLang writes for any image; ``expected``: whether it masks one."""
    assert mask is not None
    wanted, has_images = image_mask(batch)
    assert torch.equal(mask, wanted)
    assert has_images == expected


def test_an_image_in_an_unfinished_chunk_beside_a_finished_prompt(engine: Engine) -> None:
    batch = media_batch(engine, TEXT, MediaPrompt(CHUNKED.text, end=-1))
    stock, mask = compare(engine, batch, kept=2)
    assert_bidirectional(mask, batch, expected=True)
    assert depends_on_the_mask(engine, batch, stock) == [False, True]


def test_decoding_after_an_image(engine: Engine) -> None:
    """Two steps follow the prefill, which is stock's or the fast path's."""
    answers = {}
    for switch in "01":
        batch = media_batch(engine, CHUNKED, TEXT)
        total = sum(batch.extend_lens)
        with masks(engine) as seen:
            prefill = run(engine, batch, switch)
        rows = whole(total, INTERPRETED) if switch == "0" else cut(total, 2, INTERPRETED)
        assert prefill.rows == rows
        assert seen.found[0] is not None
        answers[switch] = [engine.decode(batch, [30 + step, 40]) for step in range(2)]
        assert engine.runner.attn_backend.forward_metadata.custom_mask is None
    for stock, fast in zip(answers["0"], answers["1"], strict=True):
        torch.testing.assert_close(
            fast.next_token_logits, stock.next_token_logits, atol=TOLERANCE, rtol=0
        )


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param([MediaPrompt(CHUNKED.text, logprob_start=7)], id="of its own rows"),
        pytest.param([CHUNKED, MediaPrompt(TEXT.text, logprob_start=3)], id="of text"),
    ],
)
def test_input_logprobs_beside_an_image_are_stock(
    engine: Engine, prompts: list[MediaPrompt]
) -> None:
    """With the fast path on they are bit for bit what they are off, mask included."""
    batch = media_batch(engine, *prompts)
    with masks(engine) as seen:
        stock, refused = both_ways(engine, batch, 0.0)
    assert times(eligibility.IMAGE_LOGPROBS) == 1
    assert refused.rows == refused.attention_rows == whole(sum(batch.extend_lens), INTERPRETED)
    assert seen.survived == [True, True]
    for found in seen.found:
        assert_bidirectional(found, batch, expected=True)
    assert_same_inputs(stock, refused)


def test_a_tail_that_fails_leaves_the_mask_to_stock(engine: Engine) -> None:
    batch = media_batch(engine, CHUNKED, TEXT)
    stock = run(engine, batch, "0")
    with failing(engine, "last tail layer") as calls, masks(engine) as seen:
        served = run(engine, batch, "1")
    assert times(counters.FAILED) == 1
    assert calls == [0, 1]
    assert seen.survived == [True]
    assert seen.found[0] is not None
    assert_served_by_stock(stock, served)
