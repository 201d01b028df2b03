"""SGLang's own forward while SGLang captures or compiles.

What is captured is replayed for other batches without any Python, so nothing of the fast path may
get into it. That batches are refused while SGLang captures: ``unit/test_gate``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from harness.fixtures import Change
from harness.forwards import assert_fast, assert_stock
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import compat, log
from sglang_gemma4_yoco.admission import arguments
from sglang_gemma4_yoco.core.forward import wrap_model_forward
from sglang_gemma4_yoco.core.state import STATE_ENTRY

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def test_what_wraps_the_forward_is_traced_as_if_it_were_not_there() -> None:
    """``torch.compile(fullgraph=True)`` traces a model whose prefills are cut."""

    def stock(_: Any, ids: torch.Tensor, positions: torch.Tensor, *__: Any) -> torch.Tensor:
        return ids * 2 + positions

    served, batch = SimpleNamespace(), SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    vars(served)[STATE_ENTRY] = SimpleNamespace()
    compiled = torch.compile(wrap_model_forward(stock), fullgraph=True, backend="eager")
    ids, positions = torch.tensor([3, 4]), torch.tensor([0, 1])
    assert compiled(served, ids, positions, batch).tolist() == [6, 9]
    torch._dynamo.reset()


# ---------------------------------------------------------------- wrong replays of SGLang's


def test_copied_positions_beside_prefill_graphs(
    engine: Engine,
    restarted: Change,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server falls back to stock; the log names SGLang's wrong replays and the remedy.

    Without such graphs prefills are cut, at the model's positions, which the batch has not.
    """
    monkeypatch.setenv(compat.server.POSITIONS_VARIABLE, "1")
    with caplog.at_level("INFO", log.logger.name):
        prefills = PhaseConfig(backend=Backend.BREAKABLE, bs=[4, 8])
        restarted(cuda_graph_config=CudaGraphConfig(prefill=prefills))
    (record,) = [r for r in caplog.records if arguments.WRONG_REPLAYS.text in r.getMessage()]
    assert record.levelname == "WARNING"
    assert "SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION" in record.getMessage()
    assert "unset it" in record.getMessage()
    assert_stock(engine, arguments.WRONG_REPLAYS)
    restarted()
    assert_fast(engine)
