"""SGLang's own prefills, captured in segments and replayed on a CPU, beside eager ones.

SGLang 0.5.23 cannot capture these models; here it has the fixes of ``docs/upstream``. The fast path
is off: what is shown is that the reference captures and replays as a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

from batches import batch_of
from forwards import ENGINE
from layer_rows import LAYERS
from prefill_exits import BUCKETS, RECORDED, close, is_intermediate, is_replayed, run
from random_batches import HARD_LAST_ROWS, HARD_LOGPROBS, HARD_UNREAD, Batch, batches
from sglang_gemma4_reference import prefill_graphs, releases
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_reference.recorder import CaptureError, FreedMemoryError
from sglang_gemma4_yoco import settings as package_settings
from upstream_fixes import repaired

pytestmark = pytest.mark.skipif(
    not releases.records_prefills(), reason="tried with the prefill graphs of SGLang 0.5.23"
)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    """It has recorded its prefills, in all buckets."""
    with prefill_graphs.recordable(), repaired():
        with package_settings.changed(prefill_graphs=False):  # which repairs SGLang as well
            engine = Engine(tiny_checkpoint, **ENGINE, **RECORDED)
        assert type(engine.runner.prefill_cuda_graph_runner) is PrefillCudaGraphRunner
        assert engine.runner.model_config.is_multimodal
        yield engine


# ---------------------------------------------------------------- replayed, and eagerly


def assert_replays_are_eager(engine: Engine, prompts: list[Prompt]) -> bool:
    """The same answers, and the same K and V; tells whether it was replayed, as it must be."""
    batch, intermediate = engine.schedule(prompts), is_intermediate(prompts)
    eager, replayed = (
        run(engine, batch, eagerly=e, intermediate=intermediate) for e in (True, False)
    )
    wanted = is_replayed(sum(len(prompt.new) for prompt in prompts))
    assert (eager.segments, replayed.segments) == (0, (LAYERS + 1) * wanted)
    close(replayed.cache, eager.cache)
    assert replayed.logits.isfinite().all()
    if not intermediate:
        close(replayed.logits, eager.logits)
        assert (replayed.logprobs is None) == (eager.logprobs is None)
        if eager.logprobs is not None:
            close(replayed.logprobs, eager.logprobs)
    return wanted


def test_each_stretch_between_two_attentions_is_a_segment(engine: Engine) -> None:
    graphs = engine.runner.prefill_cuda_graph_runner.backend._graphs
    assert sorted(key.size for key in graphs) == BUCKETS
    for graph in graphs.values():
        assert prefill_graphs.segments_of(graph) == len(graph._break_fns) + 1 == LAYERS + 1


HARD = (*HARD_LAST_ROWS, *HARD_LOGPROBS, *HARD_UNREAD)


def test_replays_are_eager_forwards(engine: Engine) -> None:
    window = engine.text_model.config.sliding_window
    replayed: list[bool] = []

    @settings(
        max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(batches(24, 8, logprobs=True))
    def property_(batch: Batch) -> None:
        replayed.append(assert_replays_are_eager(engine, batch.prompts(window)))

    for batch in HARD:
        property_ = example(batch)(property_)
    property_()
    assert sum(replayed) > 20


@pytest.mark.parametrize("rows", [8, 9, 16, 33, 63, 64, 65, 127, 128, 7, 129])
def test_padded_rows(engine: Engine, rows: int) -> None:
    """A bucket that is full, one row short of it, or half empty; none for the last two lengths."""
    assert assert_replays_are_eager(engine, batch_of((0, rows))) == (rows not in (7, 129))


def test_decoding_requests_beside_a_prompt(engine: Engine) -> None:
    decoding = [Prompt(prompt.cached, prompt.new, decodes=True) for prompt in batch_of((40, 1))]
    assert assert_replays_are_eager(engine, [*batch_of((0, 20), (5, 9)), *decoding])


# ---------------------------------------------------------------- what fails as on CUDA


@contextmanager
def changed_rows(engine: Engine, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """In the span ``change`` is made to what the FFN of layer 1 gives."""
    ffn = engine.text_model.layers[1].mlp
    handle = ffn.register_forward_hook(lambda _, __, rows: change(rows))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def recorded_anew(engine: Engine) -> Iterator[None]:
    """Other recordings for the span."""
    runner = engine.runner
    before = runner.prefill_cuda_graph_runner
    try:
        with torch.no_grad():
            runner.init_prefill_cuda_graph()
        yield
    finally:
        runner.prefill_cuda_graph_runner = before


def test_an_input_without_a_slot(engine: Engine) -> None:
    """A replay would read where it lay when it was recorded."""
    held = [torch.full((1,), 2.0)]
    with changed_rows(engine, lambda rows: rows * held[0]), recorded_anew(engine):
        batch = engine.schedule(batch_of((0, 16)))
        run(engine, batch)
        held.clear()
        with pytest.raises(FreedMemoryError, match="nobody holds any more"):
            run(engine, batch)


def test_a_weight_that_lies_elsewhere_now(engine: Engine) -> None:
    batch = engine.schedule(batch_of((0, 16)))
    weight = engine.text_model.layers[LAYERS - 1].mlp.down_proj.weight
    before, weight.data = weight.data.clone(), torch.zeros_like(weight)
    with pytest.raises(FreedMemoryError, match="nobody holds any more"):
        run(engine, batch)
    weight.data = before
    with torch.no_grad():
        engine.runner.init_prefill_cuda_graph()
    assert run(engine, batch).segments == LAYERS + 1


def test_the_host_reads_while_it_is_recorded(engine: Engine) -> None:
    def reading(rows: torch.Tensor) -> torch.Tensor:
        return rows * float(rows.isfinite().all())

    with changed_rows(engine, reading), pytest.raises(CaptureError), recorded_anew(engine):
        pass
    assert assert_replays_are_eager(engine, batch_of((0, 20)))
