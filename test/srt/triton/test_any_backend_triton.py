"""The tail on SGLang's own Triton kernels, on a server with another kind of backend.

Stock is a server whose layers all run on that other backend, in PyTorch; the fast path's tail reads
the same pools through Triton's planner and kernels. Slots are dealt out in random order, with other
numbers in the window's pool than in the full one; their pages are of 1 to 128 tokens.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from harness.batches import batch_of
from harness.checking import checked
from harness.decode_graphs import record_tail
from harness.fixtures import Checkpoints, left_to_release
from harness.forwards import (
    INTERPRETED_ENGINE,
    assert_fast,
    backends_of,
    no_tail_on_main,
)
from harness.layer_rows import INTERPRETED
from sglang_gemma4_reference import interpreter
from sglang_gemma4_reference.attention import FrontBackend
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import compat

pytestmark = pytest.mark.usefixtures("forgotten_reports")
interpreter.make_quick()

WINDOW = INTERPRETED.sliding_window
# SGLang requires pages of 64 or 128 for intel_xpu; fa4 takes any.
SERVERS: dict[str, dict[str, Any]] = {
    "pages of 1": {"attention_backend": "fa4", "page_size": 1},
    "pages of 16": {"attention_backend": "fa4", "page_size": 16},
    "pages of 64": {"attention_backend": "intel_xpu", "page_size": 64},
    "pages of 128, hybrid": {
        "prefill_attention_backend": "intel_xpu",
        "decode_attention_backend": "triton",
    },
}
PROMPTS = {
    "last rows": batch_of((0, 20), (WINDOW + 5, 7), (WINDOW - 1, 1), (64, 9), (15, 2)),
    "beyond two windows": batch_of((2 * WINDOW + 3, 6), (0, WINDOW + 2)),
    "suffixes": [
        *batch_of((10, 20), logprob_start=22),
        *batch_of((0, 9)),
        *batch_of((WINDOW, 12), logprob_start=WINDOW + 4),
    ],
}


def started(checkpoints: Checkpoints, name: str, **arguments: Any) -> Engine:
    given = INTERPRETED_ENGINE | SERVERS[name] | arguments
    engine = Engine(checkpoints(INTERPRETED), **given | {"max_total_tokens": 2048})
    assert type(engine.runner.attn_backend) in (FrontBackend, HybridAttnBackend)
    assert type(backends_of(engine).tail_backend) is TritonAttnBackend
    return engine


IN_EVERY_RUN = ("pages of 64", "pages of 128, hybrid")


@pytest.fixture(scope="module", params=left_to_release(SERVERS, but=IN_EVERY_RUN))
def engine(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Engine:
    name = request.param
    engine = started(checkpoints, name)
    assert engine.runner.page_size == SERVERS[name].get("page_size", 128)
    return engine


@pytest.mark.parametrize("name", PROMPTS)
def test_forward(engine: Engine, name: str) -> None:
    with no_tail_on_main:
        assert_fast(engine, PROMPTS[name])


def test_the_check_at_start(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check agrees, and fails if the tail's window is one key short, as Triton's own is."""
    found = checked(engine)
    assert found.worst is not None
    assert found.worst.excess < 0.5
    monkeypatch.setattr(compat.attention, "widen_window", lambda _: nullcontext())
    assert not checked(engine).agrees


@pytest.mark.release
def test_captured(checkpoints: Checkpoints) -> None:
    """Triton plans the tail's graphs, over pages of 64."""
    engine = started(checkpoints, "pages of 64", cuda_graph_bs_decode=[2])
    record_tail(engine, 2)
    with no_tail_on_main:
        assert_fast(engine, batch_of((WINDOW + 5, 7), (60, 9)), replays=True)
