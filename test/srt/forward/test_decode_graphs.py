"""SGLang's own runner of CUDA graphs records stock decode steps through the CPU's recorder.

So the recorder has the interface that SGLang really calls, start-up to replay, and a decode step
that SGLang can record passes it: host reads, stray tensors and stale memory would fail here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import batch_of
from decode_graphs import decoded, recorded_decode_steps, static_tensors
from forwards import ENGINE
from layer_rows import LAYERS
from observe import TOLERANCE
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_reference.graph_backend import RecordedGraphBackend
from sglang_gemma4_reference.recorder import CaptureError

pytest.importorskip(
    "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend",
    reason="this SGLang asks no platform for its graphs",
)

BUCKETS = [1, 2, 4]
TOKENS = (7, 11, 13)
LENGTHS = ((0, 40), (5, 3), (0, 33), (30, 9))


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    """The engine of other tests, whose decode steps may be recorded for 1, 2 and 4 requests."""
    return Engine(tiny_checkpoint, **ENGINE, cuda_graph_bs_decode=BUCKETS)


@pytest.fixture(scope="module")
def graphs(engine: Engine) -> Iterator[Any]:
    with recorded_decode_steps(engine) as graphs:
        yield graphs


@pytest.mark.parametrize("requests", [1, 2, 3, 4])
def test_replayed_steps_equal_eager_ones(engine: Engine, graphs: Any, requests: int) -> None:
    assert type(graphs.backend) is RecordedGraphBackend
    assert [key.size for key in graphs.backend.graphs] == BUCKETS[::-1], "the largest first"
    prompts = batch_of(*LENGTHS[:requests])
    eager = decoded(engine, prompts, TOKENS, eagerly=True)
    replayed = decoded(engine, prompts, TOKENS)
    assert eager.layer_calls == LAYERS * len(TOKENS)
    assert replayed.layer_calls == 0, "a replay runs no Python"
    # A matrix product of padded rows may sum in another order.
    tolerance = 0.0 if requests in BUCKETS else TOLERANCE
    for want, got in zip(eager.logits, replayed.logits, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    for layer, (want_kv, got_kv) in enumerate(zip(eager.cache, replayed.cache, strict=True)):
        for want, got in zip(want_kv, got_kv, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=tolerance, msg=f"layer {layer}")


def test_nothing_is_captured_by_accident(engine: Engine, graphs: Any) -> None:
    for graph in graphs.backend.graphs.values():
        assert len(graph) > 20 * LAYERS
        assert graph.undeclared(static_tensors(engine)) == []
        # Of what the batch says, only its lengths, slots and positions are read.
        without_positions = [
            tensor
            for tensor in static_tensors(engine)
            if tensor.data_ptr() != graphs.buffers.positions.data_ptr()
        ]
        assert len(graph.undeclared(without_positions)) == 1


def test_a_step_that_reads_values_is_not_recorded(engine: Engine) -> None:
    def read(_: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        args[0].sum().item()

    hook = engine.text_model.layers[2].mlp.register_forward_pre_hook(read)
    try:
        with (
            pytest.raises(Exception, match="_local_scalar_dense") as failure,
            recorded_decode_steps(engine),
        ):
            pass
    finally:
        hook.remove()
    assert isinstance(failure.value.__context__, CaptureError), "as SGLang wraps what CUDA raises"
