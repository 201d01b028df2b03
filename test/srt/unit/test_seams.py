"""What depends on the installed SGLang's version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_gemma4_yoco import seams


class Planning(TritonAttnBackend):
    """SGLang's Triton backend, but that it only notes the window that it plans with."""

    def __init__(self, window: int | None) -> None:
        self.sliding_window_size = window
        self.planned: list[int | None] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.planned.append(self.sliding_window_size)
        if forward_batch.fails:
            raise MemoryError


class OtherBackend(Planning):
    """Derived from it, and planning as it does."""


def batch(mode: ForwardMode, *, fails: bool = False) -> SimpleNamespace:
    return SimpleNamespace(forward_mode=mode, fails=fails)


@pytest.mark.parametrize(
    ("window", "mode", "planned"),
    [
        (511, ForwardMode.DECODE, 512),
        (511, ForwardMode.EXTEND, 511),
        (None, ForwardMode.DECODE, None),
        (-1, ForwardMode.DECODE, -1),
    ],
)
def test_a_decode_step_of_the_tail_is_planned_over_the_whole_window(
    window: int | None, mode: ForwardMode, planned: int | None
) -> None:
    backend = Planning(window)
    seams.plan(backend, batch(mode))
    assert backend.planned == [planned]
    assert backend.sliding_window_size == window


def test_the_window_comes_back_after_an_exception() -> None:
    backend = Planning(511)
    with pytest.raises(MemoryError):
        seams.plan(backend, batch(ForwardMode.DECODE, fails=True))
    assert backend.sliding_window_size == 511


def test_an_untested_release_does_not_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seams.decodes_like_extend(Planning(511))
    monkeypatch.setattr(seams, "LAST_TESTED", Version("0.5.0"))
    assert not seams.decodes_like_extend(Planning(511))
    assert not seams.decodes_like_extend(OtherBackend(511))
    assert seams.decodes_like_extend(Planning(None))
    assert seams.decodes_like_extend(object())
