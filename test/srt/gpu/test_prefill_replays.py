"""Prefills that SGLang replays from CUDA graphs: first SGLang's own replays, then exits.

SGLang cannot capture these models without the package's repair, the only part of the package that
the first tests use. SGLang warns that replayed prefills of multimodal models may fault, so the
tests after these are meaningful only if these pass.

``python3 scripts/run_tests.py --gpu``. With ``YOCO_TEST_GPU=cpu`` the same tests run on a CPU, on
the smallest model and the reference's recordings.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

from harness.batches import batch_of
from harness.fixtures import Change
from harness.forwards import state_of

if os.environ.get("YOCO_TEST_GPU") != ("1" if torch.cuda.is_available() else "cpu"):
    pytest.skip("needs a GPU, and run_tests.py --gpu", allow_module_level=True)

from harness.replayed_answers import Answer, find_rounding
from scripts.bench.bench_prefill import (
    OFF_REPLAYED,
    ON_REPLAYED,
    capturable,
    capture,
    captured_rows,
    must_have_spread,
    randomise,
    timed,
)
from sglang_gemma4_reference.checkpoint import PRESETS, write_checkpoint
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_reference.host_reads import refusing_waits
from sglang_gemma4_yoco import counters

ON_A_CPU = os.environ["YOCO_TEST_GPU"] == "cpu"
DEVICE, PRESET = ("cpu", "E2B_TINY") if ON_A_CPU else ("cuda", "E2B")
BUCKETS = [16, 32, 64, 128] if ON_A_CPU else [16, 32, 64, 128, 256, 512, 600, 1024, 2048]
LARGEST = BUCKETS[-1]
FULL = {f"{rows} tokens": batch_of((0, rows)) for rows in BUCKETS}
#: Each batch fills at least half of its bucket, so that it is replayed.
BATCHES = {
    **FULL,
    "one row of padding": batch_of((0, LARGEST - 1)),
    "half of it padding": batch_of((0, LARGEST // 2 + 1)),
    "after a prefix": batch_of((LARGEST // 2, 40)),
    "three prompts": batch_of((0, 3), (0, 50), (9, 1)),
    "beside decode rows": [*batch_of((0, 50)), *batch_of((30, 1), decodes=True)],
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = write_checkpoint(tmp_path_factory.mktemp(PRESET), PRESETS[PRESET], weights=False)
    with capturable(DEVICE):
        engine = Engine(
            path,
            device=DEVICE,
            dtype="float32" if ON_A_CPU else "bfloat16",
            max_total_tokens=16384,
            load_format="dummy",
            cuda_graph_backend_prefill="breakable",
            cuda_graph_bs_prefill=BUCKETS,
            cuda_graph_bs_decode=[4],
        )
    randomise(engine)
    capture(engine)
    return engine


@pytest.fixture(scope="module")
def rounding(engine: Engine) -> float:
    """Return the distance between stock's own answers."""
    return find_rounding(engine)


def answers(engine: Engine, prompts: Sequence[Prompt], *ways: str) -> list[Answer]:
    """Return the batch's answers in these ways."""
    batch = engine.schedule(prompts)
    return [Answer.of(engine, batch, way) for way in ways]


def assert_right(answer: Answer, wanted: Answer, rounding: float) -> None:
    must_have_spread(wanted.logits)
    found = answer.beside(wanted, rounding)
    print(found)
    assert found["right"], found


def assert_same(answer: Answer, wanted: Answer) -> None:
    found = answer.beside(wanted, rounding=0.0)
    assert found["same_cache"], found
    assert found["same_logits"], found


# ---------------------------------------------------------------- SGLang's own prefill graphs


def test_sglang_captures_them(engine: Engine) -> None:
    assert captured_rows(engine) == BUCKETS


@pytest.mark.parametrize("name", BATCHES)
def test_stock_replayed_is_stock_eager(engine: Engine, rounding: float, name: str) -> None:
    eager, replayed = answers(engine, BATCHES[name], "off", OFF_REPLAYED)
    assert_right(replayed, eager, rounding)


@pytest.mark.parametrize("name", FULL)
def test_a_full_bucket_bit_for_bit(engine: Engine, name: str) -> None:
    """Without padding the same kernels run on the same numbers."""
    assert_same(*answers(engine, FULL[name], "off", OFF_REPLAYED))


# ---------------------------------------------------------------- the package, at the exits


@pytest.fixture
def exits(engine: Engine, setting: Change) -> None:
    """Assert that the exits are open and passed their check; cut if one row can be skipped."""
    setting(min_skipped_rows=1)
    facts = state_of(engine).report
    assert str(facts.exits).startswith("open"), facts
    found = facts.exits_check
    assert found is not None
    assert found["largest_difference"] <= found["allowed"], found


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.usefixtures("exits")
def test_it_leaves_at_the_exit(engine: Engine, rounding: float, name: str) -> None:
    """It runs as the eager cut; up to the exit it is the graph that stock replays."""
    # The exit first: the tail's inputs are still another batch's then.
    replayed, eager, stock = answers(engine, BATCHES[name], ON_REPLAYED, "on", OFF_REPLAYED)
    assert eager.path == counters.TAIL_CAPTURED
    assert replayed.path == counters.EXIT_CAPTURED
    assert_right(replayed, eager, rounding)
    assert_right(replayed, stock, rounding)
    assert replayed.beside(stock, rounding)["same_cache"]


@pytest.mark.parametrize("ways", [(OFF_REPLAYED,), (OFF_REPLAYED, "on", ON_REPLAYED)])
@pytest.mark.usefixtures("exits")
def test_replays_leave_nothing_behind(engine: Engine, ways: tuple[str, ...]) -> None:
    """All share one pool and one output: each gives the same after other ways and buckets."""
    first = {name: answers(engine, prompts, ways[-1])[0] for name, prompts in FULL.items()}
    for name in [*reversed(FULL), *list(FULL)[::2]]:
        *_, again = answers(engine, FULL[name], *ways)
        assert_same(again, first[name])


@pytest.mark.skipif(ON_A_CPU, reason="needs CUDA")
@pytest.mark.parametrize("way", [OFF_REPLAYED, ON_REPLAYED])
@pytest.mark.usefixtures("exits")
def test_the_host_waits_for_nothing(engine: Engine, way: str) -> None:
    batch = engine.schedule(FULL["512 tokens"])
    timed(engine, batch, way)
    with refusing_waits(engine.runner.prefill_cuda_graph_runner.backend, "replay"):
        timed(engine, batch, way)
