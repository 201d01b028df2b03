"""Forwards that are recorded: torch.compile and CUDA graphs see SGLang's own model.

What is recorded is replayed for other batches without any Python, so nothing of the fast path may
get into it. Tracing is PyTorch's own, the capture flags are SGLang's own; the recording of kernels
itself needs a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
    enable_breakable_cuda_graph,
)
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    enable_tc_piecewise_cuda_graph,
)
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.runtime_context import get_context

from forwards import TWO_PROMPTS, assert_fast, assert_stock
from observe import switched
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import seams, starting
from sglang_gemma4_yoco.cutting.plan import plan_of
from sglang_gemma4_yoco.deciding import gate
from sglang_gemma4_yoco.telling import report

REPLAYED = "does not reach prefills that are replayed"

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def _as_dataclass(struct: Any) -> Any:
    """A msgspec struct's fields and methods in a plain class."""
    from msgspec import NODEFAULT, structs

    fields: list[Any] = [
        (f.name, object)
        if f.default is NODEFAULT
        else (f.name, object, dataclasses.field(default=f.default))
        for f in structs.fields(struct)
    ]
    methods = {name: value for name, value in vars(struct).items() if type(value) is FunctionType}
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


def test_compiled_forward_is_stocks(traceable: Engine) -> None:
    """``torch.compile(fullgraph=True)`` records the same operations with and without the patch."""
    engine, model = traceable, traceable.text_model
    attention = starting.of(model).attention
    assert attention is not None
    batch = releases.forward_batch(engine.schedule(TWO_PROMPTS), engine.runner)
    stock = type(model).forward.__wrapped__
    with (
        switched("1"),
        torch.no_grad(),
        forward_context(ForwardContext(attn_backend=attention.main)),
    ):
        attention.main.init_forward_metadata(batch)
        would_be_cut = plan_of(starting.of(model), batch) is not None
        assert would_be_cut, "were it not being traced"
        # Eagerly first: what SGLang's layers find out on their first call cannot be traced.
        expected = stock(model, batch.input_ids, batch.positions, batch)
        want, computed_by_stock = trace(lambda *args: stock(model, *args), batch)
        got, computed = trace(lambda *args: model(*args), batch)
    assert len(want) > 100
    assert got == want
    assert torch.equal(computed_by_stock, expected)
    assert torch.equal(computed, expected)
    assert not report.forwards
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
        assert_stock(engine, gate.CAPTURING)
    assert_fast(engine)


@pytest.mark.parametrize(
    ("backend", "known"), [(Backend.DISABLED, None), (Backend.FULL, "full"), (None, None)]
)
def test_prefill_graph_of_the_published_arguments(backend: str | None, known: str | None) -> None:
    config = None if backend is None else CudaGraphConfig(prefill=PhaseConfig(backend=backend))
    with get_context().override_server_args(cuda_graph_config=config):
        assert seams.prefill_graph() == known


@pytest.mark.parametrize("backend", [Backend.BREAKABLE, Backend.FULL])
def test_replayed_prefills_are_announced(
    engine: Engine,
    restarted: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    backend: str,
) -> None:
    """A server that replays prefills says so once; those that are not replayed are still cut."""
    config = CudaGraphConfig(prefill=PhaseConfig(backend=backend))
    with caplog.at_level("INFO", "sglang_gemma4_yoco"):
        restarted(cuda_graph_config=config)
        restarted(cuda_graph_config=config)
    (record,) = [r for r in caplog.records if REPLAYED in r.getMessage()]
    assert record.levelname == "WARNING"
    assert repr(backend) in record.getMessage()
    assert "--cuda-graph-backend-prefill=disabled" in record.getMessage()
    assert_fast(engine)


def test_nothing_is_announced_without_prefill_graphs(
    engine: Engine, restarted: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Graphs of decode steps alone are no news; nor are any, to a server that steps aside."""
    decode_only = CudaGraphConfig(prefill=PhaseConfig(backend=Backend.DISABLED))
    replays = CudaGraphConfig(prefill=PhaseConfig(backend=Backend.FULL))
    with caplog.at_level("INFO", "sglang_gemma4_yoco"):
        restarted()
        restarted(cuda_graph_config=decode_only)
        restarted(cuda_graph_config=replays, enable_single_batch_overlap=True)
    assert not [m for m in caplog.messages if REPLAYED in m]
