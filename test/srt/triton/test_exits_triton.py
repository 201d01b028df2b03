"""Early exits from captured prefills, on SGLang's own Triton backend.

Specific to it: the breaks before the exit read its plan of the live batch, and K and V of layer S-1
go to the window slots that it has planned.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.batches import batch_of
from harness.decode_graphs import record_tail
from harness.fixtures import Checkpoints, left_to_release
from harness.forwards import INTERPRETED_ENGINE, backends_of
from harness.layer_rows import TWO_POOLS
from harness.prefill_exits import RECORDED, ROWS, assert_served_alike
from sglang_gemma4_reference import interpreter, prefill_graphs
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.prefill_exits.graph_exits import TAIL_NOT_CAPTURED

interpreter.make_quick()

WINDOW = TWO_POOLS.sliding_window
DECODING = batch_of((WINDOW - 1, 1), decodes=True)
BATCHES = {
    "prefixes at the window": (
        batch_of((WINDOW - 1, 2), (WINDOW, 3), (WINDOW + 1, 2), (40, 5)),
        counters.EXIT_CAPTURED,
    ),
    "beside a decode row": (
        [*batch_of((WINDOW, 3), (0, WINDOW + 2)), *DECODING],
        counters.EXIT_CAPTURED,
    ),
    "intermediate chunks": (
        batch_of((WINDOW + 1, 4), (0, WINDOW + 1), to_come=(3, 2)),
        counters.EXIT_SKIPPED,
    ),
    "input logprobs": (batch_of((WINDOW, 9), logprob_start=WINDOW + 3), TAIL_NOT_CAPTURED),
}


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints) -> Iterator[Engine]:
    """Yield an engine that has captured its prefills and its tail."""
    with prefill_graphs.recordable():
        engine = Engine(
            checkpoints(TWO_POOLS),
            **INTERPRETED_ENGINE,
            **(RECORDED | {"cuda_graph_bs_prefill": [16, 32]}),
        )
        record_tail(engine, ROWS)
        yield engine


IN_EVERY_RUN = ("prefixes at the window", "intermediate chunks", "input logprobs")


@pytest.mark.parametrize("name", left_to_release(BATCHES, but=IN_EVERY_RUN))
def test_exits(engine: Engine, name: str) -> None:
    assert type(backends_of(engine).main_backend).__name__ == "TritonAttnBackend"
    prompts, outcome = BATCHES[name]
    assert assert_served_alike(engine, prompts) == outcome
