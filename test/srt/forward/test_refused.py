"""Refused batches, which equal stock bit for bit; and hidden states that may be read.

``unit/test_gate`` and ``unit/test_limits`` have all reasons. Here SGLang's own code runs refused
batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardMode,
)
from sglang.srt.models import gemma4_diffusion
from sglang.srt.models.gemma4_causal import Gemma4TextModel
from sglang.srt.speculative.frozen_kv_mtp_utils import select_last_extend_hidden
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from harness.batches import batch_of
from harness.fixtures import Change, Said
from harness.forwards import TWO_PROMPTS, assert_fast, assert_stock, state_of
from harness.layer_rows import FIRST_CUT, LAYERS, cut
from harness.observe import TOLERANCE, both_ways
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine, Prompt, switched
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.counters import Outcome

pytestmark = pytest.mark.usefixtures("forgotten_reports")

ROWS_IN_ALL = 43  # of the two prompts


# ---------------------------------------------------------------- refused


def test_a_refused_batch_is_stock(engine: Engine, batches_with: Change) -> None:
    batches_with(capture_hidden_mode=CaptureHiddenMode.FULL)
    assert_stock(engine, eligibility.HIDDEN_STATES)


def test_a_refused_server_logs_why_and_plans_nothing(
    engine: Engine, restarted: Change, said: Said
) -> None:
    restarted(enable_deterministic_inference=True)
    reason = "deterministic inference (--enable-deterministic-inference)"
    assert said() == [f"YOCO fast prefill falls back to stock for this server: {reason}"]
    assert state_of(engine).backends is None
    assert_stock(engine, reason)
    restarted()
    assert_fast(engine)


def test_diffusion_has_a_text_model_of_its_own() -> None:
    """Block diffusion never reaches the patched class.

    That is what SGLang's classes say; no diffusion model runs here.
    """
    own = []
    for _, kind in inspect.getmembers(gemma4_diffusion, inspect.isclass):
        assert not issubclass(kind, Gemma4TextModel)
        own += [kind] * (kind.__module__ == gemma4_diffusion.__name__)
    assert own


# ---------------------------------------------------------------- captured hidden states


@pytest.fixture
def capturing(engine: Engine) -> Iterator[Any]:
    """Yield the served model, set to capture the layers that a test names."""
    model = engine.runner.model
    before = engine.text_model.layers_to_capture, model.capture_aux_hidden_states
    yield model
    engine.text_model.layers_to_capture, model.capture_aux_hidden_states = before


@pytest.mark.parametrize("layer", [FIRST_CUT - 1, LAYERS - 1])
def test_layers_captured_after_the_cut(
    engine: Engine, capturing: Any, batches_with: Change, layer: int
) -> None:
    """DFlash captures such layers: here the donor's input, or the last layer's output."""
    capturing.set_dflash_layers_to_capture([layer])
    batches_with(capture_hidden_mode=CaptureHiddenMode.FULL)
    refused = assert_stock(engine, eligibility.CAPTURED_LAYERS)
    assert refused.output.hidden_states.shape == (ROWS_IN_ALL, E2B_TINY.hidden_size)


def test_layers_captured_before_the_cut(
    engine: Engine, capturing: Any, batches_with: Change
) -> None:
    """Layers before the cut have all rows, as in stock: a reader of last rows may capture them."""
    capturing.set_eagle3_layers_to_capture([0, 1])
    batches_with(capture_hidden_mode=CaptureHiddenMode.LAST)
    stock, fast = assert_fast(engine)
    assert stock.output.hidden_states.shape == (len(TWO_PROMPTS), 2 * E2B_TINY.hidden_size)
    assert torch.equal(stock.output.hidden_states, fast.output.hidden_states)


def test_a_server_that_captures_layers(engine: Engine, restarted: Change, capturing: Any) -> None:
    """Its model returns them beside its rows in each forward, the check's included."""
    capturing.set_eagle3_layers_to_capture([0, 1])
    restarted()
    assert_stock(engine, eligibility.CAPTURED_LAYERS)


@pytest.mark.parametrize("prefill_only", [False, True])
def test_last_hidden_states(engine: Engine, batches_with: Change, prefill_only: bool) -> None:
    """A capture of the last rows alone is served from the kept ones."""
    batches_with(capture_hidden_mode=CaptureHiddenMode.LAST, is_prefill_only=prefill_only)
    stock, fast = assert_fast(engine)
    assert stock.output.hidden_states.shape == (len(TWO_PROMPTS), E2B_TINY.hidden_size)
    torch.testing.assert_close(
        fast.output.hidden_states, stock.output.hidden_states, atol=TOLERANCE, rtol=1e-4
    )
    # The last row of a chunk is captured too.
    assert outcome_of_chunk(engine) in CUT_WITH_TAIL


def test_full_capture_of_frozen_kv_drafts(engine: Engine, batches_with: Change) -> None:
    """Frozen-KV MTP captures all rows; those that its worker reads are right."""
    batches_with(
        capture_hidden_mode=CaptureHiddenMode.FULL,
        spec_algorithm=SpeculativeAlgorithm.FROZEN_KV_MTP,
    )
    stock, fast = assert_fast(engine)
    batch = engine.schedule(TWO_PROMPTS)
    wanted = select_last_extend_hidden(batch, stock.output.hidden_states)
    read = select_last_extend_hidden(batch, fast.output.hidden_states)
    assert wanted.shape == (len(TWO_PROMPTS), E2B_TINY.hidden_size)
    torch.testing.assert_close(read, wanted, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("algorithm", [SpeculativeAlgorithm.NGRAM, SpeculativeAlgorithm.STANDALONE])
def test_drafts_that_read_no_row_but_the_last(
    engine: Engine, batches_with: Change, algorithm: SpeculativeAlgorithm
) -> None:
    batches_with(spec_algorithm=algorithm)
    assert_fast(engine)
    # A draft may go on from the token of a chunk that does not finish its prompt.
    assert outcome_of_chunk(engine) in CUT_WITH_TAIL


CUT_WITH_TAIL = counters.CUT - {counters.TAIL_SKIPPED}


def outcome_of_chunk(engine: Engine) -> Outcome:
    """Return the outcome of a batch that finishes no prompt."""
    before = counters.served.forwards.copy()
    with switched("1"):
        engine.forward(engine.schedule(TWO_PROMPTS), intermediate=True)
    [outcome] = counters.served.forwards - before
    return outcome


@pytest.mark.parametrize("has_processor", [True, False])
def test_a_custom_logit_processor_reads_the_logits_of_chunks(
    engine: Engine, batches_with: Change, has_processor: bool
) -> None:
    sampling = SimpleNamespace(has_custom_logit_processor=has_processor)
    batches_with(sampling_info=sampling)
    keeps_rows = has_processor or not releases.marks_intermediate()
    assert (outcome_of_chunk(engine) in CUT_WITH_TAIL) == keeps_rows


# ---------------------------------------------------------------- mixed batches


def test_a_mixed_batch_that_stays_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang runs it as an extend batch, but plans it as it is where a prefill is replayed."""
    decoding = Prompt((30, 31), (32,), decodes=True)
    scheduled = engine.schedule([*batch_of((20, 30)), decoding])
    assert scheduled.forward_mode is ForwardMode.MIXED
    monkeypatch.setattr(ForwardMode, "is_mixed", lambda _: False)
    _, fast = both_ways(engine, scheduled)
    assert fast.before["forward_mode"] is ForwardMode.MIXED
    assert fast.rows == cut(31, 2)
