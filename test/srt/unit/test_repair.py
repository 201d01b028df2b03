"""When SGLang's recording of prefills is repaired, and when replays are shortened: asked at start
and by ``doctor``. On a runner: ``forward/test_recorded``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.checking.rounding import Finding
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.core import state
from sglang_gemma4_yoco.loading import repair, starting
from stand_ins import prefill_graphs

pytestmark = pytest.mark.usefixtures("outside_of_a_server", "forgotten_reports")


ASKED = (Backend.BREAKABLE, "breakable")


@pytest.fixture
def unrepaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang 0.5.19 to 0.5.23."""
    monkeypatch.setattr(seams, "_indexes_shared_layers", lambda: False)


@pytest.mark.usefixtures("unrepaired")
@pytest.mark.parametrize(
    ("published", "switch", "needed"),
    [
        (ASKED, True, seams.SHARED_LAYER_IDS),
        (ASKED, False, None),
        ((Backend.BREAKABLE, None), True, None),
        ((Backend.FULL, "full"), True, None),
        ((Backend.DISABLED, "disabled"), True, None),
    ],
    ids=["asked for", "switched off", "chosen by SGLang", "full", "none"],
)
def test_what_is_repaired(
    setting: Callable[..., None],
    published: tuple[str, str | None],
    switch: bool,
    needed: str | None,
) -> None:
    """Only where the operator has named breakable graphs, and has not switched that off."""
    setting(prefill_graphs=switch)
    with prefill_graphs(*published):
        assert repair.needed_for(multimodal=True) == repair.needed_for(multimodal=False) == needed


@pytest.mark.parametrize("multimodal", [True, False])
def test_what_needs_no_repair(monkeypatch: pytest.MonkeyPatch, multimodal: bool) -> None:
    """Where shared layers are no error, a multimodal model alone cannot be recorded."""
    monkeypatch.setattr(seams, "_indexes_shared_layers", lambda: True)
    with prefill_graphs(*ASKED):
        expected = seams.IDS_AND_EMBEDDINGS if multimodal else None
        assert repair.needed_for(multimodal=multimodal) == expected


@pytest.mark.usefixtures("unrepaired")
@pytest.mark.parametrize("switch", [True, False])
def test_a_repair_is_said(
    setting: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    switch: bool,
) -> None:
    """And what it is, and how it is left out; the model is as it was afterwards."""
    setting(prefill_graphs=switch)
    runner = SimpleNamespace(model_config=SimpleNamespace(is_multimodal=True))
    model = SimpleNamespace(forward=lambda *given: given)
    monkeypatch.setattr(served, "find", lambda _: SimpleNamespace(constant_reason=None))
    stock = model.forward
    with prefill_graphs(*ASKED), caplog.at_level("INFO", "sglang_gemma4_yoco"):
        with repair.repaired(runner, model) as done:
            assert done is switch
            assert model.forward(1, 2, 3, 4) == (1, 2, 3, None if switch else 4)
        assert model.forward is stock
    assert len(caplog.messages) == switch
    for message in caplog.messages:
        assert seams.SHARED_LAYER_IDS in message
        assert "SGLANG_GEMMA4_YOCO_PREFILL_GRAPHS=0 leaves it" in message


@pytest.mark.parametrize(
    ("backend", "switch", "refused"),
    [
        (Backend.BREAKABLE, True, None),
        (Backend.FULL, True, repair.NO_BREAKS),
        ("tc_piecewise", True, repair.NO_BREAKS),
        (Backend.BREAKABLE, False, "SGLANG_GEMMA4_YOCO_PREFILL_GRAPHS=0"),
    ],
)
def test_whether_replays_may_be_shortened(
    setting: Callable[..., None], backend: str, switch: bool, refused: str | None
) -> None:
    """Whoever has chosen the graphs."""
    setting(prefill_graphs=switch)
    with prefill_graphs(backend):
        assert repair.doors_refused() == refused


@pytest.mark.parametrize(
    ("found", "others", "closed"),
    [
        (None, None, None),
        (Finding("keys", 0.5, 0.5), None, None),
        (Finding("keys", 0.6, 0.5), None, "the check at start found keys"),
        (Finding("keys", 0.6, 0.5), ranks.NOT_ALIKE, "the check at start found keys"),
        (Finding("keys", 0.5, 0.5), ranks.NOT_ALIKE, ranks.NOT_ALIKE),
    ],
)
def test_a_defect_of_one_rank_closes_the_doors_of_all(
    monkeypatch: pytest.MonkeyPatch, found: Finding | None, others: str | None, closed: str | None
) -> None:
    """Each rank is told what the others found; doors that are closed are not compared."""
    compared: list[str] = []

    def disagreement(findings: str) -> str | None:
        compared.append(findings)
        return others

    monkeypatch.setattr(ranks, "reason_ranks_differ", disagreement)
    known: Any = SimpleNamespace(doors=SimpleNamespace(closed="some reason"))
    assert starting._defect_of_doors(known, found) is None
    assert compared == []
    known.doors.closed = None
    assert str(starting._defect_of_doors(known, found)).startswith(str(closed))
    agrees = found is None or found.is_rounding
    assert compared == [f"doors agree with stock: {agrees}"]
