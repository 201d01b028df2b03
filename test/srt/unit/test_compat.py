"""Version-dependent behaviour of the installed SGLang."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from harness.stand_ins import eligible_batch
from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.core.backend_pair import BackendPair


class Planning(TritonAttnBackend):
    """SGLang's Triton backend, reduced to recording the window of its plan."""

    def __init__(self, window: int | None) -> None:
        self.device = "cpu"
        self.sliding_window_size = window
        self.planned: list[int | None] = []
        self.rooms: list[int | None] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.planned.append(self.sliding_window_size)
        given = getattr(triton_backend.update_sliding_window_buffer, "keywords", {})
        self.rooms.append(len(given["window_kv_indices"]) if given else None)
        if forward_batch.fails:
            raise MemoryError


def batch(mode: ForwardMode, *, fails: bool = False) -> SimpleNamespace:
    lengths = torch.zeros(3)
    return SimpleNamespace(forward_mode=mode, fails=fails, batch_size=3, seq_lens=lengths)


@pytest.mark.parametrize(
    ("window", "mode", "planned", "room"),
    [
        (511, ForwardMode.DECODE, 512, 3 * 512),
        (511, ForwardMode.EXTEND, 511, 3 * 511),
        (None, ForwardMode.DECODE, None, None),
        (-1, ForwardMode.DECODE, -1, None),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_decode_step_of_the_tail_is_planned_over_the_whole_window(
    window: int | None, mode: ForwardMode, planned: int | None, room: int | None, fails: bool
) -> None:
    """The buffer has room for it: a planner that writes past its buffer raises no error.

    The backend's own window comes back, also where planning fails.
    """
    stock = triton_backend.update_sliding_window_buffer
    backend = Planning(window)
    with suppress(MemoryError):
        compat.attention.init_tail_metadata(backend, batch(mode, fails=fails))
    assert backend.planned == [planned]
    assert backend.rooms == [room]
    assert backend.sliding_window_size == window
    assert triton_backend.update_sliding_window_buffer is stock


@pytest.mark.parametrize(
    ("installed", "is_newer"),
    [
        ("0.5.22.post1", False),
        ("0.5.23", False),
        ("0.5.23+cu129", False),
        ("0.5.23rc1", False),
        ("0.5.23.dev7+g0123456", False),
        ("0.5.24.dev0", True),
        ("0.5.24", True),
        ("0.5.23.1", True),
        ("1!0.5.0", True),
    ],
)
def test_what_is_newer_than_the_last_tested_release(
    monkeypatch: pytest.MonkeyPatch, installed: str, is_newer: bool
) -> None:
    """On these the tail runs in extend mode, on all others in decode mode.

    Captured prefills are left at exits on 0.5.23, neither before nor after it.
    """
    monkeypatch.setattr(compat.release, "LAST_TESTED", Version("0.5.23"))
    monkeypatch.setattr(compat.release, "_RELEASE", compat.release.find_release(installed))
    assert compat.release.is_newer_than_tested() == is_newer
    assert compat.release.has_exits() == (not is_newer and "0.5.23" in installed)
    assert BackendPair(object(), Planning(511)).decodes != is_newer


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_slots_of_the_window_are_those_of_the_plan(is_hybrid: bool) -> None:
    """With ``trtllm_mha`` the scheduler may already have rewritten their table."""
    planned = torch.tensor([4, 2])
    main = TRTLLMHAAttnBackend.__new__(TRTLLMHAAttnBackend)
    main.forward_metadata = SimpleNamespace(swa_out_cache_loc=planned)
    if is_hybrid:
        hybrid = HybridAttnBackend.__new__(HybridAttnBackend)
        hybrid.prefill_backend = hybrid.decode_backend = main
        main = hybrid
    pool = mock.Mock(layers_mapping={3: (0, True)})
    rows = torch.zeros(2, 1, 8)
    attention = SimpleNamespace(layer_id=3)
    compat.pools.write_keys_and_values(main, pool, attention, eligible_batch(), rows, rows)
    [[_, target, *_], _] = pool.set_kv_buffer.call_args
    assert torch.equal(target.swa_loc, planned)
    assert not pool.translate_loc_from_full_to_swa.called
