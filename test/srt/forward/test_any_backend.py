"""Starts on servers whose attention backend cannot run a tail, which gets its own backend.

Here both compute in PyTorch; ``triton/test_any_backend_triton`` has forwards whose tail runs on
SGLang's Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from harness.batches import BATCHES, batch_of
from harness.decode_graphs import record_tail
from harness.forwards import ENGINE, assert_fast, backends_of, no_tail_on_main, state_of, times
from harness.layer_rows import LAYERS
from harness.observe import run
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.attention import FrontBackend, WindowedTorchNativeBackend
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.admission import runner_parts

pytestmark = pytest.mark.usefixtures("forgotten_reports")

ALONE: dict[str, Any] = {"attention_backend": "intel_xpu", "page_size": 64}
#: The hybrid's pages are of 128 tokens, as SGLang requires.
SERVERS = {
    "alone": ALONE | {"cuda_graph_bs_decode": [2]},
    "hybrid": {"prefill_attention_backend": "intel_xpu", "decode_attention_backend": "triton"},
}


@pytest.fixture(scope="module", params=SERVERS)
def engine(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Engine:
    return Engine(tiny_checkpoint, **ENGINE, **SERVERS[request.param])


def test_the_captured_tail(engine: Engine) -> None:
    if type(engine.runner.attn_backend) is not FrontBackend:
        pytest.skip("the hybrid's decode steps are captured in the tests of server/")
    record_tail(engine, 2)
    try:
        for prompts in (batch_of((0, 70)), batch_of((64, 9), (100, 41))):
            with no_tail_on_main:
                assert_fast(engine, prompts, replays=True)
        assert times(counters.TAIL_CAPTURED) == 2
    finally:
        engine.runner.init_attention_backends()


# ---------------------------------------------------------------- at start


@pytest.mark.parametrize("build", [mock.Mock(side_effect=MemoryError), FrontBackend])
def test_no_tail_runs_without_a_suitable_backend(
    engine: Engine, build: Callable[[Any], Any]
) -> None:
    """No tail runs if its backend cannot be built, or if the registered one cannot run a tail."""
    with pytest.MonkeyPatch.context() as broken:
        broken.setitem(ATTENTION_BACKENDS, "triton", build)
        if type(engine.runner.attn_backend) is HybridAttnBackend:
            broken.setattr(compat.attention, "build_backend", build)
            broken.setitem(ATTENTION_BACKENDS, "triton", WindowedTorchNativeBackend)
        engine.runner.init_attention_backends()
        assert state_of(engine).backends is None
        assert state_of(engine).off_because == runner_parts.NO_TAIL
        with no_tail_on_main:
            seen = run(engine, engine.schedule(BATCHES["one prompt"]), "1")
        assert seen.rows == [70] * LAYERS
        assert times(runner_parts.NO_TAIL) == 1
    engine.runner.init_attention_backends()
    assert state_of(engine).off_because is None


def test_the_prs_helper_looks_at_the_current_backend(engine: Engine) -> None:
    """The batch that it cuts is planned on the current backend."""
    batch = releases.forward_batch(engine.schedule(BATCHES["one prompt"]), engine.runner)
    backends = backends_of(engine)
    for backend, eligible in ((backends.main_backend, False), (backends.tail_backend, True)):
        with forward_context(ForwardContext(attn_backend=backend)):
            assert engine.text_model._yoco_eligibility(batch) is eligible


# ---------------------------------------------------------------- refused servers


def test_pools_in_hnd_layout(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    engine = Engine(tiny_checkpoint, **ENGINE, **ALONE)
    reason = "K and V are not stored slot by slot, but in 4 dimensions"
    assert str(state_of(engine).off_because) == reason
