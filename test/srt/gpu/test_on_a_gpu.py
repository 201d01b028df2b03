"""Tests that need a GPU: its kernels' answers, waits, launches, graphs and memory.

``python3 scripts/run_tests.py --gpu``, in an environment whose SGLang runs on the GPU. The model
has E2B's dimensions and random weights: no checkpoint is needed. Answers may be twice as far from
stock's as stock's decode steps are from its prefills.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from harness.batches import batch_of, tokens

if os.environ.get("YOCO_TEST_GPU") != "1" or not torch.cuda.is_available():
    pytest.skip("needs a GPU, and run_tests.py --gpu", allow_module_level=True)

from harness.forwards import state_of, times
from harness.replayed_answers import (
    ALLOWED,
    LARGEST_CACHE_ERROR,
    Answer,
    find_distance,
    find_rounding,
)
from scripts.bench.bench_prefill import must_have_spread, randomise, timed
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import PRESETS, write_checkpoint
from sglang_gemma4_reference.engine import Engine, Prompt, reset_log, switched
from sglang_gemma4_reference.host_reads import refusing_waits
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.captured import graphs, lifecycle
from sglang_gemma4_yoco.captured.graphs import Bucket, TailGraphs
from sglang_gemma4_yoco.checking import tail_graphs
from sglang_gemma4_yoco.startup import graphs_captured

# Around the window of 512, and where SGLang changes kernels. A key more or less in a window is
# below rounding in bf16: the layer by layer check and the tests on a CPU see that.
LENGTHS = (6, 40, 257, 300, 511, 512, 513, 600, 1024, 2048)
BATCHES = {
    **{f"{length} tokens": batch_of((0, length)) for length in LENGTHS},
    "three prompts": batch_of((0, 3), (0, 700), (0, 1)),
    "second chunks around the window": batch_of((511, 40), (512, 40), (513, 40)),
    "beside decode rows": [*batch_of((0, 300)), *batch_of((100, 1), decodes=True)],
    "more rows than are captured": batch_of(*[(10 * i, 9 + i) for i in range(40)]),
    "input logprobs": [*batch_of((10, 300), logprob_start=280), *batch_of((0, 90))],
    "an intermediate chunk": batch_of((0, 300), to_come=(21, 22)),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = write_checkpoint(tmp_path_factory.mktemp("E2B"), PRESETS["E2B"], weights=False)
    engine = Engine(
        path, device="cuda", dtype="bfloat16", max_total_tokens=16384, load_format="dummy"
    )
    assert type(engine.runner.attn_backend).__name__ == "TritonAttnBackend"
    randomise(engine)
    return engine


@pytest.fixture(scope="module")
def rounding(engine: Engine) -> float:
    """Return the distance between stock's own answers."""
    engine.runner.decode_cuda_graph_runner = None
    return find_rounding(engine)


def captured_by(engine: Engine) -> TailGraphs:
    """Return the newly captured tail; decode steps run eagerly."""
    engine.runner.decode_cuda_graph_runner = None
    state = state_of(engine)
    assert isinstance(state.captured, TailGraphs), state.report
    return state.captured


@pytest.fixture
def tail(engine: Engine) -> TailGraphs:
    """Return the captured tail."""
    if state_of(engine).captured is None:
        releases.record_decode_steps(engine.runner)
    return captured_by(engine)


@pytest.fixture
def eager(engine: Engine) -> None:
    """Make the tail eager."""
    lifecycle.drop_tail(state_of(engine), lifecycle.NOT_YET)


def assert_alike(engine: Engine, prompts: Sequence[Prompt], outcome: str, rounding: float) -> None:
    batch = engine.schedule(prompts)
    stock, fast = Answer.of(engine, batch, "off"), Answer.of(engine, batch, "on")
    assert fast.path == outcome
    found = fast.beside(stock, rounding)
    if outcome == counters.TAIL_SKIPPED:
        assert found["cache_error"] <= LARGEST_CACHE_ERROR, found
        return
    must_have_spread(stock.logits)
    assert found["right"], found


def outcome_of(name: str, *, captured: bool) -> str:
    if name == "an intermediate chunk" and releases.marks_intermediate():
        return counters.TAIL_SKIPPED
    if captured and name not in ("more rows than are captured", "input logprobs"):
        return counters.TAIL_CAPTURED
    return counters.TAIL_EAGER


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kind", ["eager", "tail"])
def test_answers(
    engine: Engine, rounding: float, request: pytest.FixtureRequest, kind: str, name: str
) -> None:
    request.getfixturevalue(kind)
    assert_alike(engine, BATCHES[name], outcome_of(name, captured=kind == "tail"), rounding)


# ---------------------------------------------------------------- waits and launches


@pytest.mark.parametrize("name", ["600 tokens", "input logprobs", "an intermediate chunk"])
@pytest.mark.parametrize("kind", ["eager", "tail"])
def test_the_host_waits_for_nothing(
    engine: Engine, request: pytest.FixtureRequest, kind: str, name: str
) -> None:
    request.getfixturevalue(kind)
    scheduled = engine.schedule(BATCHES[name])
    for switch in ("0", "1"):
        with switched(switch):
            engine.forward(scheduled)  # compiles its kernels
            reset_log()
            with refusing_waits(engine.text_model, "forward"):
                engine.forward(scheduled)
    assert times(outcome_of(name, captured=kind == "tail")) == 1


def launches(engine: Engine, batch: Any, way: str) -> Counter[str]:
    """Count the host's launches of kernels and graphs through the CUDA driver."""
    timed(engine, batch, way)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        timed(engine, batch, way)
    found: Counter[str] = Counter()
    for event in profile.events() or ():
        for part in ("LaunchKernel", "GraphLaunch"):
            found[part] += part in event.name and "cu" in event.name[:4]
    return found


def test_a_replay_is_one_launch(engine: Engine, tail: TailGraphs) -> None:
    """Predicted: about 900 launches as stock and eager, about 400 replayed."""
    batch = engine.schedule(batch_of((0, 512)))
    seen = {"stock": launches(engine, batch, "off"), "replayed": launches(engine, batch, "on")}
    lifecycle.drop_tail(state_of(engine), lifecycle.NOT_YET)
    seen["eager"] = launches(engine, batch, "on")
    print(seen)
    assert (seen["replayed"]["GraphLaunch"], seen["eager"]["GraphLaunch"]) == (1, 0)
    assert seen["replayed"]["LaunchKernel"] <= 0.6 * seen["stock"]["LaunchKernel"]


# ---------------------------------------------------------------- graphs


def test_replayed_equals_eager_bit_for_bit(engine: Engine, tail: TailGraphs) -> None:
    """For as many rows as were captured, the same kernels run on the same numbers."""
    generator = torch.Generator("cuda").manual_seed(0)

    def fill(inputs: graphs.Inputs) -> None:
        for tensor in (inputs.rows, inputs.embeds, inputs.embedded):
            if tensor is not None:
                tensor.normal_(generator=generator)
        inputs.positions.zero_()
        inputs.requests.zero_()
        inputs.lengths.fill_(1)

    for rows in tail.sizes:
        inputs = tail.inputs[rows]
        fill(inputs)
        bucket = tail.buckets[rows]
        replay = bucket.fill(inputs.make_decode_step(), torch.arange(rows))
        captured = bucket.replay()
        assert torch.equal(tail_graphs.run_eagerly(replay), captured), rows


def test_what_the_capture_costs(engine: Engine, eager: None) -> None:
    """It costs at most twice the 70 MiB that README names, beside SGLang's own graphs."""
    engine.runner.init_decode_cuda_graph()
    lifecycle.drop_tail(state_of(engine), lifecycle.NOT_YET)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    graphs_captured.set_up(engine.runner, engine.text_model)
    torch.cuda.synchronize()
    used = (free - torch.cuda.mem_get_info()[0]) / 2**20
    print(f"capture: {used:.0f} MiB")
    assert captured_by(engine)
    assert used <= 2 * 70


def test_a_capture_that_fails_leaves_a_working_device(
    engine: Engine, rounding: float, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture fails if the host waits for a value: CUDA refuses that."""
    stock = Bucket._run

    def waiting(bucket: Bucket) -> torch.Tensor:
        rows = stock(bucket)
        rows.sum().item()
        return rows

    with monkeypatch.context() as broken:
        broken.setattr(Bucket, "_run", waiting)
        releases.record_decode_steps(engine.runner)
    state = state_of(engine)
    assert state.captured is None
    assert str(state.report.tail_mode).startswith("eager (capturing failed")
    torch.zeros(64 << 20, device="cuda").sum().item()
    torch.multinomial(torch.rand(1, 100, device="cuda"), 1).item()  # as tokens are sampled
    assert_alike(engine, BATCHES["600 tokens"], counters.TAIL_EAGER, rounding)
    graphs_captured.set_up(engine.runner, engine.text_model)
    assert captured_by(engine)
    assert_alike(engine, BATCHES["600 tokens"], counters.TAIL_CAPTURED, rounding)


def test_decode_steps_after_a_replay(engine: Engine, rounding: float, tail: TailGraphs) -> None:
    """They read the K and V that were written before the replay."""
    prompts, steps = batch_of((0, 600), (512, 40)), tokens(random.Random(0), 4)
    logits = {}
    for switch in ("0", "1"):
        batch = engine.schedule(prompts)
        with switched(switch):
            engine.forward(batch)
            logits[switch] = [
                engine.decode(batch, [token] * 2).next_token_logits.double() for token in steps
            ]
    for wanted, got in zip(logits["0"], logits["1"], strict=True):
        assert find_distance(got, wanted) <= ALLOWED * rounding
