"""Images, videos and audio through SGLang's own encoders, on its ModelRunner.

Images attend causally here: SGLang writes their masks for its Triton backend only, on which
``triton/test_image_masks.py`` runs. The server's tests send images and audio over HTTP; to decode
a video, SGLang needs FFmpeg's libraries. A video reaches the model as frames, and so it does here.
"""

from __future__ import annotations

import pytest

from harness.layer_rows import cut
from harness.media import MediaPrompt, assert_same_inputs, media_batch
from harness.observe import both_ways
from sglang_gemma4_reference.engine import Engine


@pytest.mark.parametrize("cached", [0, 5])
@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_prompt_with_media(engine: Engine, kind: str, cached: int) -> None:
    text = f"what do you see here? <|{kind}|> and there?"
    # 70 tokens, as many as an image may have here: more than the window of 32.
    scheduled = media_batch(engine, MediaPrompt(text, cached=cached, size=(336, 480)))
    (total,) = scheduled.extend_lens
    stock, fast = both_ways(engine, scheduled)
    assert_same_inputs(stock, fast)
    assert fast.rows == cut(total, 1)
