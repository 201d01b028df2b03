"""Images and videos through SGLang's own vision tower, on its ModelRunner.

The server's tests send images and sounds over HTTP. Videos are tried here alone: to decode one,
SGLang needs FFmpeg's libraries. A video reaches the model as frames, and so it does here.
"""

from __future__ import annotations

import pytest

from ask import TOLERANCE
from batches import media_batch
from observe import assert_same_answers, assert_same_cache, assert_same_objects, run
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine

FIRST_CUT = E2B_TINY.layers - E2B_TINY.kv_shared_layers - 1


@pytest.mark.parametrize("cached", [0, 5])
@pytest.mark.parametrize("kind", ["image", "video"])
def test_prompt_with_media(engine: Engine, kind: str, cached: int) -> None:
    scheduled = media_batch(engine, kind, cached)
    (total,) = scheduled.extend_lens
    assert total > 20
    stock, fast = run(engine, scheduled, "0"), run(engine, scheduled, "1")
    assert fast.before["mm_input_embeds"] is not None
    assert fast.rows == [total] * FIRST_CUT + [1] * (E2B_TINY.layers - FIRST_CUT)
    assert_same_objects(fast)
    assert_same_cache(stock, fast)
    assert_same_answers(stock, fast, TOLERANCE)
