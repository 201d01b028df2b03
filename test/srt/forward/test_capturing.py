"""While SGLang captures or compiles, the forward is SGLang's own.

What is captured is replayed for other batches without any Python, so nothing of the fast path may
get into it. Tracing is PyTorch's own, the capture flags are SGLang's own; the capture of kernels
itself needs a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner.eager_runner import EagerRunner
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
    enable_breakable_cuda_graph,
)
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    enable_tc_piecewise_cuda_graph,
)
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.runtime_context import get_context

from harness.forwards import TWO_PROMPTS, assert_fast, assert_stock
from harness.observe import assert_stock as assert_all_rows
from harness.observe import run
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.compat import captured_prefills
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.core.plan import PLAN_ENTRY, Plan
from sglang_gemma4_yoco.loading import limits, start

ERRORS = {
    captured_prefills.SHARED_LAYER_IDS: "invalid or duplicate attention layer_id",
    captured_prefills.IDS_AND_EMBEDDINGS: "exactly one of input_ids or inputs_embeds",
}

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def _as_dataclass(struct: Any) -> Any:
    """A msgspec struct's fields and methods in a plain class."""
    from msgspec import NODEFAULT, structs

    fields: list[Any] = []
    for f in structs.fields(struct):
        fields.append(
            (f.name, object)
            if f.default is NODEFAULT
            else (f.name, object, dataclasses.field(default=f.default))
        )
    methods = {}
    for name, value in vars(struct).items():
        if type(value) is FunctionType:
            methods[name] = value
    return dataclasses.make_dataclass(struct.__name__, fields, namespace=methods)


@pytest.fixture
def traceable(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine without what keeps the stock forward of its SGLang from being traced as a whole.

    PyTorch cannot follow a msgspec struct that is made on the way (SGLang 0.5.22 and later hand
    their residual along in two of them), nor the reference attention, which reads host integers.
    """
    residual = pytest.importorskip("sglang.srt.layers.layer_boundary.residual.stream")
    leaving = pytest.importorskip("sglang.srt.layers.layer_boundary.exit")
    monkeypatch.setattr(residual, "Contribution", _as_dataclass(residual.Contribution))
    monkeypatch.setattr(leaving, "ExitDecision", _as_dataclass(leaving.ExitDecision))

    def queries(q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return q.reshape(q.shape[0], -1) * 0.5

    monkeypatch.setattr(engine.runner.attn_backend, "forward", queries)
    return engine


def trace(forward: Callable[..., Any], batch: Any) -> tuple[list[str], Any]:
    """The operations of the one graph that ``forward`` compiles to, and what it computes."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        compiled: Callable[..., Any] = graph.forward
        return compiled

    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    output = compiled(batch.input_ids, batch.positions, batch)
    (graph,) = graphs
    return [f"{node.op} {node.target}" for node in graph.graph.nodes], output


def test_a_forward_that_is_compiled(engine: Engine) -> None:
    """Nothing is decided, nor counted, while PyTorch traces it."""
    scheduled = engine.schedule(TWO_PROMPTS)
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        seen = run(engine, scheduled, "1")
    assert_all_rows(engine, TWO_PROMPTS, seen)
    assert not counters.forwards
    assert_fast(engine)


@pytest.mark.release
def test_compiled_forward_is_stocks(traceable: Engine) -> None:
    """``torch.compile(fullgraph=True)`` traces the same operations with and without the patch."""
    engine, model = traceable, traceable.text_model
    attention = start.get_state(model).attention
    assert attention is not None
    batch = releases.forward_batch(engine.schedule(TWO_PROMPTS), engine.runner)
    stock = type(model).forward.__wrapped__
    with (
        switched("1"),
        torch.no_grad(),
        forward_context(ForwardContext(attn_backend=attention.main)),
    ):
        attention.main.init_forward_metadata(batch)
        would_be_cut = isinstance(getattr(batch, PLAN_ENTRY), Plan)
        assert would_be_cut, "were it not being traced"
        # Eagerly first: what SGLang's layers find out on their first call cannot be traced.
        expected = stock(model, batch.input_ids, batch.positions, batch)
        want, computed_by_stock = trace(lambda *args: stock(model, *args), batch)
        got, computed = trace(lambda *args: model(*args), batch)
    assert len(want) > 100
    assert got == want
    assert torch.equal(computed_by_stock, expected)
    assert torch.equal(computed, expected)
    assert not counters.forwards
    torch._dynamo.reset()


CAPTURES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "breakable": enable_breakable_cuda_graph,
    "full": capture_mode.model_capture_mode,
    "piecewise": enable_tc_piecewise_cuda_graph,
}


@pytest.mark.parametrize("name", CAPTURES)
def test_captured_forward_is_stocks(engine: Engine, name: str) -> None:
    """Inside SGLang's capture and replay spans the forward is the stock one, bit for bit."""
    with CAPTURES[name]():
        assert_stock(engine, eligibility.CAPTURING)
    assert_fast(engine)


@pytest.mark.parametrize(
    ("backend", "known"), [(Backend.DISABLED, None), (Backend.FULL, "full"), (None, None)]
)
def test_prefill_graph_of_the_published_arguments(backend: str | None, known: str | None) -> None:
    config = None
    if backend is not None:
        config = CudaGraphConfig(prefill=PhaseConfig(backend=backend))
    with get_context().override_server_args(cuda_graph_config=config):
        assert compat.server.get_cuda_graph_backend("prefill") == known


def replaying(backend: str) -> CudaGraphConfig:
    """A server whose prefills would be replayed."""
    return CudaGraphConfig(prefill=PhaseConfig(backend=backend, bs=[4, 8]))


# ---------------------------------------------------------------- what SGLang cannot capture


@pytest.mark.parametrize("multimodal", [True, False])
@pytest.mark.parametrize("refused", [None, "some reason"])
def test_what_cannot_be_captured_is_said(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    multimodal: bool,
    refused: str | None,
) -> None:
    """Before SGLang's own runner of prefill graphs fails on the model, whatever else is refused."""
    runner, state = engine.runner, start.get_state(engine.text_model)
    # Put back afterwards: SGLang takes it away before it fails.
    monkeypatch.setattr(runner, "prefill_cuda_graph_runner", runner.prefill_cuda_graph_runner)
    monkeypatch.setattr(runner.model_config, "is_multimodal", multimodal)
    monkeypatch.setattr(state, "unsupported", refused)
    with releases.published(cuda_graph_config=replaying(Backend.BREAKABLE)):
        why = captured_prefills.find_capture_error(multimodal=multimodal)
        if why is None:
            pytest.skip("this SGLang captures the prefills of such a model")
        with pytest.raises(ValueError, match=ERRORS[why]):
            runner.init_prefill_cuda_graph()
    (record,) = [r for r in caplog.records if "cannot capture prefill CUDA" in r.getMessage()]
    assert record.levelname == "WARNING"
    assert why in record.getMessage()
    assert "--cuda-graph-backend-prefill=disabled" in record.getMessage()


def test_nothing_is_said_without_prefill_graphs(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """No line for graphs of decode steps alone, nor for what SGLang has left out by itself."""
    assert type(engine.runner.prefill_cuda_graph_runner) is EagerRunner
    with (
        caplog.at_level("INFO", "sglang_gemma4_yoco"),
        start.set_up_after_capture(engine.runner, engine.text_model),
    ):
        pass
    assert not [m for m in caplog.messages if "prefill CUDA graphs" in m or "exits" in m]


# ---------------------------------------------------------------- what SGLang replays wrongly


def test_copied_positions_beside_prefill_graphs(
    engine: Engine,
    restarted: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server falls back to stock, and logs that SGLang's replays are wrong and what to do."""
    monkeypatch.setenv(compat.server.POSITIONS_VARIABLE, "1")
    with caplog.at_level("INFO", "sglang_gemma4_yoco"):
        restarted(cuda_graph_config=replaying(Backend.BREAKABLE))
    (record,) = [r for r in caplog.records if limits.WRONG_REPLAYS in r.getMessage()]
    assert record.levelname == "WARNING"
    assert "SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION" in record.getMessage()
    assert "unset it" in record.getMessage()
    assert_stock(engine, limits.WRONG_REPLAYS)
    restarted()
    assert_fast(engine)
