"""Synthetic requests run on both paths, in borrowed slots."""

from __future__ import annotations

import pytest
import torch

from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.checking import requests
from sglang_gemma4_yoco.checking.requests import NotComparableError, synthetic_requests
from sglang_gemma4_yoco.loading import start

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def test_they_run_on_whichever_path_is_on(engine: Engine) -> None:
    state = start.of(engine.text_model)
    with synthetic_requests(engine.runner, state) as synthetic:
        assert synthetic.lens == [7, 6, 5]
        fast = synthetic.run()
        with state.refusing("it is stock's turn"):
            stock = synthetic.run()
        assert (fast.outcome, stock.outcome) == (log.TAIL_EAGER, "it is stock's turn")
        assert torch.allclose(fast.logits, stock.logits, atol=1e-4)
        assert synthetic.run([2, 6, 0]).outcome == log.TAIL_EAGER
        assert synthetic.run(finishes=False).outcome == log.TAIL_SKIPPED
        assert not synthetic.others_changed()
    assert not log.forwards


def test_writes_to_other_slots_are_seen(engine: Engine) -> None:
    [first, *_] = engine.kv_buffers()[0]
    with synthetic_requests(engine.runner, start.of(engine.text_model)) as synthetic:
        first[synthetic.requests[0].window_slots] = 0.5  # those are theirs
        first[0] = 0.5  # and this one is for padding
        assert not synthetic.others_changed()
        first[synthetic.requests[1].window_slots[0]] = 0.5  # of a cached token
        assert synthetic.others_changed()


def test_pools_that_are_too_small(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_lengths", lambda *_: [(5000, 5)])
    too_small = pytest.raises(NotComparableError, match=requests.NO_ROOM)
    with too_small, synthetic_requests(engine.runner, start.of(engine.text_model)):
        pass
