"""Counts of ``host_work`` on forwards whose work is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from harness.batches import batch_of
from scripts.bench import host_work
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_reference.recorder import RecordedGraph
from triton import language as tl

pytestmark = pytest.mark.usefixtures("forgotten_reports")


@pytest.fixture
def forward(engine: Engine) -> Callable[[], Any]:
    """Return a stock forward."""
    batch = engine.schedule(batch_of((0, 12)))

    def stock() -> Any:
        with switched("0"):
            return engine.forward(batch)

    return stock


def copied(x: torch.Tensor, out: torch.Tensor) -> None:
    """Triton kernel, whose arguments are pointers."""
    tl.store(out + tl.arange(0, 4), tl.load(x + tl.arange(0, 4)))


def test_all_that_a_layer_does_besides_is_counted(
    engine: Engine, forward: Callable[[], Any]
) -> None:
    x, out = torch.arange(4.0), torch.zeros(4)
    kernel = InterpretedFunction(copied)
    graph = RecordedGraph.of(lambda: (x + 1) * 2)
    plain = host_work.count(forward)
    layer = engine.text_model.layers[0].mlp
    stock = layer.forward

    def more(*arguments: Any, **named: Any) -> Any:
        _ = x.sum().item(), x.tolist(), kernel[(1,)](x, out)
        graph.replay()
        return stock(*arguments, **named)

    with mock.patch.object(layer, "forward", more):
        found = host_work.count(forward)
    assert plain.operations > 100
    assert (plain.triton_launches, plain.replays) == (0, 0)
    assert (found.triton_launches, found.replays) == (1, 1)
    assert found.device_reads - plain.device_reads == 2
    assert found.operations - plain.operations == 3, "the sum, its reading, the replay"
    assert out.tolist() == x.tolist()
    assert graph.outputs.tolist() == [2, 4, 6, 8]
