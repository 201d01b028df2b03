"""What depends on the installed SGLang's version."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    breakable_cuda_graph,
)
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph import (  # noqa: E501 - its name
    BreakableCUDAGraph,
)

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.core.attention import TailBackend
from stand_ins import prefill_graphs


class Planning(TritonAttnBackend):
    """SGLang's Triton backend, but that it only notes the window that it plans with."""

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


class OtherBackend(Planning):
    """Derived from it, and planning as it does."""


def batch(mode: ForwardMode, *, fails: bool = False) -> SimpleNamespace:
    return SimpleNamespace(forward_mode=mode, fails=fails, batch_size=3)


@pytest.mark.parametrize(
    ("window", "mode", "planned", "room"),
    [
        (511, ForwardMode.DECODE, 512, 3 * 512),
        (511, ForwardMode.EXTEND, 511, 3 * 511),
        (None, ForwardMode.DECODE, None, None),
        (-1, ForwardMode.DECODE, -1, None),
    ],
)
def test_a_decode_step_of_the_tail_is_planned_over_the_whole_window(
    window: int | None, mode: ForwardMode, planned: int | None, room: int | None
) -> None:
    """And there is room for all of it: a planner that writes behind its buffer says nothing."""
    stock = triton_backend.update_sliding_window_buffer
    backend = Planning(window)
    seams.plan(backend, batch(mode))
    assert backend.planned == [planned]
    assert backend.rooms == [room]
    assert backend.sliding_window_size == window
    assert triton_backend.update_sliding_window_buffer is stock


def test_the_window_comes_back_after_an_exception() -> None:
    stock = triton_backend.update_sliding_window_buffer
    backend = Planning(511)
    with pytest.raises(MemoryError):
        seams.plan(backend, batch(ForwardMode.DECODE, fails=True))
    assert backend.sliding_window_size == 511
    assert triton_backend.update_sliding_window_buffer is stock


def test_a_planner_that_takes_no_buffer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a newer release may have it: it then reads how large one must be."""
    calls: list[Any] = []
    monkeypatch.setattr(triton_backend, "update_sliding_window_buffer", lambda *a: calls.append(a))
    seams._window_planner.cache_clear()
    try:
        backend = Planning(511)
        seams.plan(backend, batch(ForwardMode.DECODE))
    finally:
        seams._window_planner.cache_clear()
    assert backend.planned == [512]
    assert backend.rooms == [None]


def test_a_model_whose_loop_has_no_end_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(
        self: Any, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any
    ) -> None:
        for layer in self.layers:
            layer(positions)

    monkeypatch.setattr(seams.gemma4_causal.Gemma4TextModel, "forward", forward)
    with pytest.raises(seams.SeamError, match=r"loop up to self\.end_layer"):
        seams.check()


def test_an_untested_release_does_not_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seams.decodes_like_extend(Planning(511))
    monkeypatch.setattr(seams, "LAST_TESTED", Version("0.5.0"))
    assert not seams.decodes_like_extend(Planning(511))
    assert not seams.decodes_like_extend(OtherBackend(511))
    assert seams.decodes_like_extend(Planning(None))
    assert seams.decodes_like_extend(object())


def test_the_tails_own_backend_decides_whether_the_tail_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seams, "LAST_TESTED", Version("0.5.0"))
    assert TailBackend(Planning(511), object()).decodes
    assert not TailBackend(object(), Planning(511)).decodes


# ---------------------------------------------------------------- recorded prefills


class BreakableCudaGraphBackend:
    """SGLang's, as far as this package reads it."""

    def __init__(self, buckets: Iterable[int] = (4, 8)) -> None:
        self._graphs: dict[Any, Any] = {bucket: recorded_prefill() for bucket in buckets}
        self._outputs: dict[Any, Any] = {bucket: torch.zeros(bucket, 2) for bucket in buckets}

    def replay(self) -> None:
        """Nothing is recorded."""


def recorded_prefill(segments: int = 3) -> BreakableCUDAGraph:
    graph = BreakableCUDAGraph()
    graph._segments = list(range(segments))
    graph._break_fns = [str(number) for number in range(segments - 1)]
    return graph


def runner_of(backend: Any, **changes: Any) -> SimpleNamespace:
    """A ``ModelRunner`` that has recorded prefills."""
    prefills = SimpleNamespace(**{"backend": backend, "execute": None} | changes)
    return SimpleNamespace(prefill_cuda_graph_runner=prefills)


def test_recordings_that_can_be_left() -> None:
    runner = runner_of(BreakableCudaGraphBackend())
    assert seams.RecordedPrefills.why_not(runner) is None
    recorded = seams.RecordedPrefills(runner.prefill_cuda_graph_runner)
    assert recorded.graphs.keys() == recorded.outputs.keys() == {4, 8}
    whole = recorded.graphs[8]
    first = recorded.first_segments(whole, 2)
    assert type(first) is BreakableCUDAGraph
    assert (first._segments, first._break_fns) == ([0, 1], ["0"])
    assert (whole._segments, whole._break_fns) == ([0, 1, 2], ["0", "1"])


class FullBackend(BreakableCudaGraphBackend):
    """Of another name."""


def test_recordings_that_cannot_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(backend: Any) -> str | None:
        return seams.RecordedPrefills.why_not(runner_of(backend))

    assert why_not(FullBackend()) == "recorded by FullBackend, without breaks"
    assert why_not(BreakableCudaGraphBackend(())) == "there are none"
    several = BreakableCudaGraphBackend()
    several._outputs[8] = (torch.zeros(8, 2), torch.zeros(8, 2))
    assert why_not(several) == "what they return is no tensor"
    lacking: dict[str, Any] = {name: BreakableCudaGraphBackend() for name in ("outputs", "a break")}
    del lacking["outputs"]._outputs
    lacking["a break"]._graphs[8]._break_fns.pop()
    lacking["another class"] = BreakableCudaGraphBackend()
    lacking["another class"]._graphs[4] = SimpleNamespace(_segments=[0], _break_fns=[])
    named = {name: str(why_not(backend)) for name, backend in lacking.items()}
    assert named["outputs"].endswith(" lacks backend._outputs")
    assert named["a break"].endswith(" lacks graphs of segments and breaks")
    assert named["another class"] == named["a break"]
    # What SGLang has is looked up once.
    monkeypatch.setattr(seams, "_breaks", seams._breaks.__wrapped__)
    monkeypatch.delattr(breakable_cuda_graph, "_current_capture_var")
    assert why_not(BreakableCudaGraphBackend()) == named["a break"]
    runner = runner_of(BreakableCudaGraphBackend())
    del runner.prefill_cuda_graph_runner.execute
    assert " lacks runner.execute, " in str(seams.RecordedPrefills.why_not(runner))


@pytest.mark.parametrize(
    ("backend", "named", "asked"),
    [
        (Backend.BREAKABLE, "breakable", True),
        (Backend.BREAKABLE, None, False),  # SGLang's own choice, or another flag's
        (Backend.DISABLED, "breakable", False),
        (Backend.FULL, "full", False),
    ],
)
def test_prefill_graphs_that_are_asked_for(backend: str, named: str | None, asked: bool) -> None:
    with prefill_graphs(backend, named):
        assert seams.prefill_graphs_are_asked_for() is asked
        assert seams.prefill_graph_has_breaks() is (backend == Backend.BREAKABLE)


@pytest.mark.parametrize(
    ("sizes", "longest"),
    [({}, None), ({"max_bs": 512}, 512), ({"bs": [4, 8], "max_bs": 512}, 8), ({"bs": []}, None)],
)
def test_the_longest_recorded_prefill(sizes: dict[str, Any], longest: int | None) -> None:
    with prefill_graphs(Backend.BREAKABLE, **sizes):
        assert seams.longest_recorded_prefill() == longest


@pytest.mark.usefixtures("outside_of_a_server")
def test_nothing_is_recorded_outside_of_a_server() -> None:
    assert seams.longest_recorded_prefill() is None
    assert not seams.prefill_graph_has_breaks()
    assert not seams.prefill_graphs_are_asked_for()


@pytest.mark.parametrize("indexes", [True, False])
def test_shared_layers_are_left_as_they_come(
    monkeypatch: pytest.MonkeyPatch, indexes: bool
) -> None:
    """In the span alone, and where SGLang does not look at them at all, nothing is done."""
    name = "index_attention_layers_by_global_id"
    if not indexes:
        monkeypatch.delattr(cuda_graph_setup, name, raising=False)
    stock = getattr(cuda_graph_setup, name, None)
    shared: Any = [SimpleNamespace(layer_id=0), SimpleNamespace(layer_id=0)], [None, None]
    with pytest.raises(MemoryError), seams.indexing_shared_layers():
        if stock is not None:
            assert getattr(cuda_graph_setup, name)(*shared) == shared
        raise MemoryError
    assert getattr(cuda_graph_setup, name, None) is stock


def test_text_is_recorded_from_its_ids() -> None:
    """Where there are ids, embeddings beside them are left out; per-layer inputs stay."""

    def forward(
        input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None, **others: Any
    ) -> tuple[Any, ...]:
        return input_ids, positions, forward_batch, input_embeds, others

    of_ids = seams.without_embeddings_beside_ids(forward)
    assert inspect.signature(of_ids) == inspect.signature(forward)
    assert of_ids(1, 2, 3, input_embeds=4, more=5) == (1, 2, 3, None, {"more": 5})
    assert of_ids(1, 2, 3, 4) == (1, 2, 3, None, {})
    assert of_ids(None, 2, 3, input_embeds=4) == (None, 2, 3, 4, {})
