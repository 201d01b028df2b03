"""What the other tests rely on: the engine does what its docstrings say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.batches import batch_of
from harness.observe import (
    TOLERANCE,
    Observed,
    watching,
)
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine, Prompt, switched


def slots_of(engine: Engine, req: Any, count: int) -> torch.Tensor:
    slots: torch.Tensor = engine.runner.req_to_token_pool.req_to_token[releases.row(req), :count]
    return slots.long()


def test_no_slot_has_its_own_number_in_the_windows_pool(engine: Engine) -> None:
    batch = engine.schedule(batch_of((50, 60), (0, 30)))
    slots = slots_of(engine, batch.reqs[0], 110)
    window = engine.runner.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
    assert (slots != window).all()
    assert (slots.diff() != 1).any()
    assert (window.diff() != 1).any()
    assert window.unique().numel() == 110
    again = engine.schedule(batch_of((50, 60), (0, 30)))
    assert torch.equal(slots, slots_of(engine, again.reqs[0], 110))
    other = engine.schedule(batch_of((50, 60), (0, 30)), slots=1)
    assert not torch.equal(slots, slots_of(engine, other.reqs[0], 110))
    ascending = engine.schedule(batch_of((0, 30)), slots=None)
    assert (ascending.out_cache_loc.diff() == 1).all()


@pytest.mark.parametrize(("prefix", "rows"), [("0", 20), ("1", 1)])
def test_who_computes_the_cached_tokens(engine: Engine, prefix: str, rows: int) -> None:
    """The stock forward, whatever the switch is, unless ``prefix`` is "1"."""
    seen = Observed()
    with switched("1"), watching(engine, seen):
        engine.schedule(batch_of((20, 5)), prefix=prefix)
    assert seen.rows[-1] == rows


def test_what_is_left_of_unfinished_prompts_is_the_next_chunk(engine: Engine) -> None:
    """Its answer is that of the whole prompt in one forward."""
    prompts = [*batch_of((5, 20)), *batch_of((7, 30), to_come=(40, 41, 42))]
    batch = engine.schedule(prompts)
    with switched("0"):
        engine.forward(batch)
        rest = engine.next_chunk(batch, prompts)
        assert rest.extend_lens == [3]
        assert rest.prefix_lens == [37]
        chunked = engine.forward(rest).next_token_logits
        cached, new = prompts[1].cached, prompts[1].new
        whole = engine.forward(engine.schedule([Prompt(cached, (*new, 40, 41, 42))]))
    torch.testing.assert_close(chunked, whole.next_token_logits, atol=TOLERANCE, rtol=1e-4)
