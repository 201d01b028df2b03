"""When SGLang's capture of prefills fails, when it is repaired, and when prefills are shortened.

Decided at start and by ``doctor``. On a runner: ``forward/test_exits``, ``forward/test_capturing``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup

from harness.forwards import state_of
from harness.stand_ins import prefill_graphs
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.compat import captured_prefills
from sglang_gemma4_yoco.exits import attach, capture

pytestmark = pytest.mark.usefixtures("outside_of_a_server", "forgotten_reports")

ASKED = (Backend.BREAKABLE, "breakable")
INDEX = "index_attention_layers_by_global_id"


@pytest.mark.parametrize(
    ("backend", "shared", "multimodal", "error"),
    [
        (Backend.DISABLED, False, True, None),
        (Backend.BREAKABLE, False, True, captured_prefills.SHARED_LAYER_IDS),
        (Backend.BREAKABLE, False, False, captured_prefills.SHARED_LAYER_IDS),
        (Backend.BREAKABLE, True, True, captured_prefills.IDS_AND_EMBEDDINGS),
        (Backend.FULL, True, True, captured_prefills.IDS_AND_EMBEDDINGS),
        ("tc_piecewise", True, True, None),
        ("tc_piecewise", False, True, captured_prefills.SHARED_LAYER_IDS),
        (Backend.BREAKABLE, True, False, None),
    ],
)
def test_errors_by_release(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    shared: bool,
    multimodal: bool,
    error: str | None,
) -> None:
    """``shared``: as up to 0.5.18."""
    if shared:
        monkeypatch.delattr(cuda_graph_setup, INDEX, raising=False)
    else:
        monkeypatch.setattr(cuda_graph_setup, INDEX, None, raising=False)
    with prefill_graphs(backend):
        assert captured_prefills.find_capture_error(multimodal=multimodal) == error
        monkeypatch.setattr(compat.release, "is_newer_than_tested", lambda: True)
        assert captured_prefills.find_capture_error(multimodal=multimodal) is None


@pytest.mark.parametrize(
    ("published", "switch", "is_needed"),
    [
        (ASKED, True, True),
        (ASKED, False, False),
        ((Backend.BREAKABLE, None), True, False),  # SGLang's own choice, or another flag's
        ((Backend.FULL, "full"), True, False),
        ((Backend.DISABLED, "breakable"), True, False),
    ],
    ids=["asked for", "switched off", "chosen by SGLang", "full", "none"],
)
def test_what_is_repaired(
    setting: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    published: tuple[str, str | None],
    switch: bool,
    is_needed: bool,
) -> None:
    """Only where the operator has named breakable graphs, and has not switched that off."""
    setting(prefill_graphs=switch)
    monkeypatch.setattr(cuda_graph_setup, INDEX, None, raising=False)
    needed = None
    if is_needed:
        needed = captured_prefills.SHARED_LAYER_IDS
    with prefill_graphs(*published):
        assert (
            capture.find_repair(multimodal=True) == capture.find_repair(multimodal=False) == needed
        )


@pytest.mark.parametrize(
    ("backend", "switch", "refused"),
    [
        (Backend.BREAKABLE, True, None),
        (Backend.FULL, True, capture.NO_BREAKS),
        ("tc_piecewise", True, capture.NO_BREAKS),
        (Backend.BREAKABLE, False, "SGLANG_GEMMA4_YOCO_PREFILL_GRAPHS=0"),
    ],
)
def test_whether_captured_prefills_may_be_shortened(
    setting: Callable[..., None], backend: str, switch: bool, refused: str | None
) -> None:
    """Whether the operator or SGLang has chosen the graphs."""
    setting(prefill_graphs=switch)
    with prefill_graphs(backend):
        assert capture.find_closed_reason() == refused


def test_nothing_is_asked_for_outside_of_a_server() -> None:
    assert capture.find_closed_reason() == capture.NO_BREAKS
    assert capture.find_repair(multimodal=True) is None


@pytest.mark.parametrize("named", ["breakable", None])
def test_prefills_that_are_not_captured(
    engine: Engine, said: Callable[..., list[str]], named: str | None
) -> None:
    """Some release may leave out what it cannot capture: an operator who named it is told."""
    state = state_of(engine)
    state.report.pop("exits", None)
    with prefill_graphs(Backend.BREAKABLE, named):
        attach.open_exits(engine.runner, state)
    lines, report = said(logging.WARNING), state.report.pop("exits", None)
    if named is None:
        assert (lines, report) == ([], None)
    else:
        [line] = lines
        assert "captured no prefills, although --cuda-graph-backend-prefill asks for it" in line
        assert report == attach.NOT_CAPTURED


@pytest.mark.parametrize("indexes", [True, False])
def test_shared_layers_are_left_as_they_come(
    monkeypatch: pytest.MonkeyPatch, indexes: bool
) -> None:
    """In the span alone, and where SGLang does not look at them at all, nothing is done."""
    if not indexes:
        monkeypatch.delattr(cuda_graph_setup, INDEX, raising=False)
    stock = getattr(cuda_graph_setup, INDEX, None)
    shared: Any = [SimpleNamespace(layer_id=0), SimpleNamespace(layer_id=0)], [None, None]
    with pytest.raises(MemoryError), captured_prefills.index_shared_layers():
        if stock is not None:
            assert getattr(cuda_graph_setup, INDEX)(*shared) == shared
        raise MemoryError
    assert getattr(cuda_graph_setup, INDEX, None) is stock
