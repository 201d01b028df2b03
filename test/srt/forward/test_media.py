"""Images, videos and sounds through SGLang's own encoders, on its ModelRunner.

Images attend causally here: SGLang writes their masks for its Triton backend alone, on which
``triton/test_image_masks.py`` runs. The server's tests send images and sounds over HTTP; to decode
a video, SGLang needs FFmpeg's libraries. A video reaches the model as frames, and so it does here.
"""

from __future__ import annotations

import pytest
import torch

from ask import TOLERANCE
from media import MediaPrompt, media_batch
from observe import assert_same_answers, assert_same_cache, assert_same_objects, run
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine

FIRST_CUT = E2B_TINY.layers - E2B_TINY.kv_shared_layers - 1


@pytest.mark.parametrize("cached", [0, 5])
@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_prompt_with_media(engine: Engine, kind: str, cached: int) -> None:
    prompt = MediaPrompt(f"what do you see here? <|{kind}|> and there?", cached=cached)
    scheduled = media_batch(engine, prompt)
    (total,) = scheduled.extend_lens
    stock, fast = run(engine, scheduled, "0"), run(engine, scheduled, "1")
    embedded = [seen.before["mm_input_embeds"] for seen in (stock, fast)]
    assert isinstance(embedded[0], torch.Tensor)
    assert torch.equal(*embedded)
    assert fast.rows == [total] * FIRST_CUT + [1] * (E2B_TINY.layers - FIRST_CUT)
    assert_same_objects(fast)
    assert_same_cache(stock, fast)
    assert_same_answers(stock, fast, TOLERANCE)
