"""Waits of the host for the device: no prefill on the fast path adds one.

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

import pytest

from harness import batches
from harness.batches import new_rows
from harness.forwards import CHUNKS
from harness.layer_rows import whole
from harness.observe import Observed, expected, watching
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_reference.host_reads import counted
from sglang_gemma4_yoco import log

PACKAGE = str(Path(log.__file__).parent)
BATCHES = {**batches.BATCHES, "an intermediate chunk": CHUNKS}


@pytest.mark.parametrize("name", BATCHES)
def test_a_text_prefill_reads_nothing_that_stock_does_not(engine: Engine, name: str) -> None:
    """Neither the package's code nor what it calls in planning, model and logits reads more."""
    prompts = BATCHES[name]
    scheduled, wanted = engine.schedule(prompts), expected(engine, prompts)
    assert wanted is not None
    rows: list[list[int]] = []
    reads: list[Counter[tuple[str, str]]] = []
    for switch in ("0", "1"):
        seen = Observed()
        with switched(switch), watching(engine, seen), counted(__file__) as found:
            engine.forward(scheduled, intermediate=prompts is CHUNKS)
        rows.append(seen.rows)
        reads.append(found)
    assert rows == [whole(new_rows(prompts)), wanted.rows]
    stock, fast = reads
    # The CPU's own attention reads lengths in each layer: the stock forward is not free of them.
    assert stock
    assert [site for _, site in fast if site.startswith(PACKAGE)] == []
    assert fast - stock == Counter()
