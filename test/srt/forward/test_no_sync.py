"""With the fast path on, no prefill makes the host wait for the device where stock does not.

On a GPU a value that travels from the device to the host stalls the host until all queued kernels
have run; every launch after it is then paid in full. No GPU is needed to see such reads: each goes
through one of a few PyTorch operations (``host_reads``), counted here with the code that reads.

What a CPU shows: no read by the package's own code at all, and none in a whole forward that the
stock forward does not do as well. ``triton/test_planning`` shows it of SGLang's Triton backend, and
``gpu/`` uses CUDA's own check.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from harness import batches
from harness.batches import batch_of
from harness.forwards import attention_of
from harness.layer_rows import FIRST_CUT, LAYERS
from harness.media import MediaPrompt, media_batch
from harness.observe import Observed, watching
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_reference.host_reads import counted
from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.replaced import replaced

PACKAGE = str(Path(log.__file__).parent)


Reads = Counter[tuple[str, str]]


def read_by(engine: Engine, scheduled: Any, switch: str, *, intermediate: bool) -> Reads:
    """What one forward reads: planning, model, logits."""
    seen = Observed()
    with switched(switch), watching(engine, seen), counted(__file__) as reads:
        engine.forward(scheduled, intermediate=intermediate)
    kept = 0
    if len(seen.rows) == LAYERS:
        kept = seen.rows[-1]
    total = sum(scheduled.extend_lens)
    cut_rows = [total] * FIRST_CUT + [kept] * (LAYERS - FIRST_CUT if kept else 0)
    assert seen.rows == (cut_rows if switch == "1" else [total] * LAYERS)
    assert switch == "0" or kept < total
    return reads


def assert_no_more_reads(fast: Reads, stock: Reads) -> None:
    """The package's code reads nothing, and what it calls nowhere more often than stock."""
    assert [site for _, site in fast if site.startswith(PACKAGE)] == []
    assert fast - stock == Counter()


BATCHES = {
    **batches.BATCHES,
    "an intermediate chunk": batch_of((20, 60), (0, 30), to_come=(21, 22)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_text_prefill_reads_nothing_that_stock_does_not(engine: Engine, name: str) -> None:
    scheduled = engine.schedule(BATCHES[name])
    intermediate = name == "an intermediate chunk"
    stock = read_by(engine, scheduled, "0", intermediate=intermediate)
    fast = read_by(engine, scheduled, "1", intermediate=intermediate)
    # The CPU's own attention reads lengths in each layer: the stock forward is not free of them.
    assert stock
    assert_no_more_reads(fast, stock)


@pytest.mark.parametrize("cached", [0, 5])
def test_an_image_prefill_reads_nothing_that_stock_does_not(engine: Engine, cached: int) -> None:
    prompt = MediaPrompt("what is <|image|> there?", cached=cached)
    stock = read_by(engine, media_batch(engine, prompt), "0", intermediate=False)
    assert any("gemma4_vision" in site for _, site in stock), "the image was not encoded"
    fast = read_by(engine, media_batch(engine, prompt), "1", intermediate=False)
    assert_no_more_reads(fast, stock)


@pytest.mark.parametrize("name", BATCHES)
def test_the_tail_is_planned_before_the_first_layer(engine: Engine, name: str) -> None:
    attention, layers = attention_of(engine), engine.text_model.layers
    scheduled = engine.schedule(BATCHES[name])
    events = mock.Mock()
    with ExitStack() as stack:
        for backend, planned in ((attention.main, "main"), (attention.tail, "tail")):
            plan = getattr(events, planned)
            plan.side_effect = backend.init_forward_metadata
            stack.enter_context(replaced(backend, init_forward_metadata=plan))
        events.first_layer.return_value = None
        stack.enter_context(layers[0].register_forward_pre_hook(events.first_layer))
        engine.forward(scheduled, intermediate=name == "an intermediate chunk")
    order = [call[0] for call in events.mock_calls]
    if name == "an intermediate chunk":  # which has no tail
        assert order == ["main", "first_layer"]
    else:
        assert order == ["main", "tail", "first_layer"]


def test_a_read_in_the_package_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled = engine.schedule(BATCHES["one prompt"])
    stock = read_by(engine, scheduled, "0", intermediate=False)
    check = eligibility.check_eligibility

    def reading(state: Any, forward_batch: Any) -> Any:
        assert int(forward_batch.seq_lens.max()) > 0
        return check(state, forward_batch)

    monkeypatch.setattr(eligibility, "check_eligibility", reading)
    fast = read_by(engine, scheduled, "1", intermediate=False)
    with pytest.raises(AssertionError):
        assert_no_more_reads(fast, stock)
