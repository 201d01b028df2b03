"""SGLang's own decode steps, recorded by its own runner and replayed, beside eager ones.

A GPU's server does this at its start; here ``graph_backend`` records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_reference.recorder import tensors_in
from sglang_gemma4_yoco import settings
from sglang_gemma4_yoco.captured.graphs import TailGraphs
from sglang_gemma4_yoco.core.state import find


@contextmanager
def recorded_decode_steps(engine: Engine) -> Iterator[Any]:
    """Has SGLang record the engine's decode steps; yields the runner that replays them."""
    runner = engine.runner
    releases.record_decode_steps(runner)
    decode_steps = runner.decode_cuda_graph_runner
    try:
        yield decode_steps
    finally:
        decode_steps.backend.cleanup()
        runner.decode_cuda_graph_runner = None


def record_tail(engine: Engine, rows: int, *, of: int | None = None) -> TailGraphs:
    """Have the engine's tail captured for up to so many rows; decode steps run eagerly.

    Args:
        engine: made with ``cuda_graph_bs_decode``.
        of: how many there may be, where that is less.
    """
    state = find(engine.text_model)
    assert state is not None
    with settings.changed(graph_rows=rows), recorded_decode_steps(engine):
        captured = state.captured
    assert isinstance(captured, TailGraphs), state.facts
    assert captured.rows[-1] == (of or rows)
    return captured


@dataclass(frozen=True)
class Decoded:
    """What some decode steps of a batch did.

    Attributes:
        logits: of each step, [requests, vocabulary].
        cache: K and V of each layer with some, at all slots that may be given to a token.
        layer_calls: how many times a layer ran, in all steps.
    """

    logits: list[torch.Tensor]
    cache: list[tuple[torch.Tensor, torch.Tensor]]
    layer_calls: int


def decoded(
    engine: Engine, prompts: Sequence[Prompt], tokens: Sequence[int], *, eagerly: bool = False
) -> Decoded:
    """Prefill ``prompts``, then one decode step of all of them after each of ``tokens``."""
    batch, calls = engine.schedule(prompts), []
    engine.forward(batch)
    hooks = [
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
        for layer in engine.text_model.layers
    ]
    without_graphs = mock.patch.object(engine.runner, "decode_cuda_graph_runner", None)
    try:
        with without_graphs if eagerly else nullcontext():
            logits = [
                engine.decode(batch, [token] * len(prompts)).next_token_logits.clone()
                for token in tokens
            ]
    finally:
        for hook in hooks:
            hook.remove()
    # Slot 0 is nobody's: rows that pad a recorded batch write there.
    cache = [(keys[1:], values[1:]) for keys, values in engine.kv()]
    return Decoded(logits, cache, len(calls))


def static_tensors(engine: Engine) -> list[torch.Tensor]:
    """All that stays where it is while a server runs: weights, pools, static inputs, buffers."""
    runner = engine.runner
    decode_steps = runner.decode_cuda_graph_runner
    owners = [
        *runner.model.modules(),
        runner.attn_backend,
        runner.token_to_kv_pool,
        runner.graph_shared_output,
        decode_steps.buffers,
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
