"""SGLang's own decode steps, captured by its own runner, and the tail after them.

On a GPU a server does this at start; here ``graph_backend`` records.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.batches import BATCHES, batch_of
from harness.checking import checked
from harness.forwards import ENGINE, assert_fast, state_of
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_reference.recorder import tensors_in
from sglang_gemma4_yoco import compat, settings
from sglang_gemma4_yoco.captured.graphs import TailGraphs


@contextmanager
def recorded_decode_steps(engine: Engine) -> Iterator[Any]:
    """Capture the engine's decode steps with SGLang; yield the runner that replays them."""
    runner = engine.runner
    releases.record_decode_steps(runner)
    decode_steps = runner.decode_cuda_graph_runner
    try:
        yield decode_steps
    finally:
        decode_steps.backend.cleanup()
        runner.decode_cuda_graph_runner = None


def record_tail(engine: Engine, rows: int) -> TailGraphs:
    """Capture the engine's tail for up to ``rows`` rows; decode steps run eagerly.

    Args:
        engine: made with ``cuda_graph_bs_decode``.
    """
    state = state_of(engine)
    if compat.release.is_newer_than_tested():
        pytest.skip("the tail is not captured on a release that was not tested")
    with settings.changed(graph_rows=rows), recorded_decode_steps(engine):
        captured = state.captured
    assert isinstance(captured, TailGraphs), state.report
    assert captured.sizes[-1] == rows
    return captured


def assert_tail_is_replayed(checkpoint: Path, **arguments: Any) -> None:
    """Assert that an engine that captures its tail passes its check, and replays it for prompts."""
    engine = Engine(checkpoint, **ENGINE, **arguments, cuda_graph_bs_decode=[4])
    record_tail(engine, 4)
    assert checked(engine).agrees
    for prompts in (batch_of((0, 40)), BATCHES["three, two of them cached"]):
        assert_fast(engine, prompts, replays=True)


def static_tensors(engine: Engine) -> list[torch.Tensor]:
    """Return a server's static tensors: weights, pools, buffers; not graphs' inputs."""
    runner = engine.runner
    owners = [
        *runner.model.modules(),
        runner.attn_backend,
        runner.token_to_kv_pool,
        runner.graph_shared_output,
    ]
    return tensors_in(
        [
            *runner.model.parameters(),
            *runner.model.buffers(),
            *(buffer for layer in engine.kv_buffers() for buffer in layer),
            runner.req_to_token_pool.req_to_token,
            *(list(vars(owner).values()) for owner in owners),
        ]
    )
