"""SGLang's runner of CUDA graphs on its own Triton backend: its planner, its kernels, the recorder.

Each launch is one node. The planner runs outside of the graph, into the backend's static buffers,
so a step that reads anything else of the live batch fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from batches import batch_of
from decode_graphs import decoded, recorded_decode_steps, static_tensors
from observe import TOLERANCE
from sglang_gemma4_reference import interpreter
from sglang_gemma4_reference.checkpoint import E2B_TINY, write_checkpoint
from sglang_gemma4_reference.engine import Engine

pytest.importorskip(
    "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend",
    reason="this SGLang asks no platform for its graphs",
)
interpreter.make_quick()

SHAPE = replace(  # sfs fsf: s for a layer with a window, f for one without
    E2B_TINY, layers=6, kv_shared_layers=3, sliding_per_full=1, heads=2, sliding_window=5, seed=1
)
TOKENS = (7, 11)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    engine = Engine(
        write_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPE),
        device="cpu",
        dtype="float32",
        max_total_tokens=512,
        max_running_requests=8,
        context_length=256,
        triton_attention_num_kv_splits=2,  # each part of a request's keys is a program
        cuda_graph_bs_decode=[2],
    )
    assert type(engine.runner.attn_backend) is TritonAttnBackend
    return engine


@pytest.fixture(scope="module")
def graphs(engine: Engine) -> Iterator[Any]:
    with recorded_decode_steps(engine) as graphs:
        yield graphs


@pytest.mark.parametrize("lengths", [((0, 12), (5, 3)), ((0, 9),)], ids=["two", "one, padded"])
def test_replayed_steps_equal_eager_ones(engine: Engine, graphs: Any, lengths: Any) -> None:
    prompts = batch_of(*lengths)
    eager = decoded(engine, prompts, TOKENS, eagerly=True)
    replayed = decoded(engine, prompts, TOKENS)
    assert eager.layer_calls == SHAPE.layers * len(TOKENS)
    assert replayed.layer_calls == 0
    torch.testing.assert_close(replayed.logits, eager.logits, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(replayed.cache, eager.cache, rtol=0, atol=TOLERANCE)


def test_nothing_is_captured_by_accident(engine: Engine, graphs: Any) -> None:
    (graph,) = graphs.backend.graphs.values()
    assert graph.undeclared(static_tensors(engine)) == []
    without_plan = [
        tensor
        for tensor in static_tensors(engine)
        if tensor.data_ptr() != engine.runner.attn_backend.cuda_graph_kv_indices.data_ptr()
    ]
    ((_, call),) = graph.undeclared(without_plan)
    assert "fwd" in call, "a kernel of attention read what was planned"
