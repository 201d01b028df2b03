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
from pathlib import Path
from typing import Any

import pytest

from harness import batches
from harness.batches import batch_of
from harness.layer_rows import FIRST_CUT, LAYERS
from harness.observe import Observed, watching
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_reference.host_reads import counted
from sglang_gemma4_yoco import log

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


BATCHES = {
    **batches.BATCHES,
    "an intermediate chunk": batch_of((20, 60), (0, 30), to_come=(21, 22)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_text_prefill_reads_nothing_that_stock_does_not(engine: Engine, name: str) -> None:
    """The package's code reads nothing, and what it calls nowhere more often than stock."""
    scheduled = engine.schedule(BATCHES[name])
    intermediate = name == "an intermediate chunk"
    stock = read_by(engine, scheduled, "0", intermediate=intermediate)
    fast = read_by(engine, scheduled, "1", intermediate=intermediate)
    # The CPU's own attention reads lengths in each layer: the stock forward is not free of them.
    assert stock
    assert [site for _, site in fast if site.startswith(PACKAGE)] == []
    assert fast - stock == Counter()
