"""The helpers of SGLang's open PR on its own model and batches; no batch is kept alive.

``models/`` has the helpers on the PR's mock objects.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from harness.batches import BATCHES, batch_of
from harness.forwards import backends_of, times
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.patched import patched

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def test_the_prs_helper_plans_the_tail_of_an_intermediate_chunk(engine: Engine) -> None:
    """The package runs none of it; the caller gets its metadata, and the residual's rows."""
    main, planned = backends_of(engine).main_backend, list[list[int]]()
    batch = releases.forward_batch(engine.schedule(BATCHES["one prompt"]), engine.runner)
    batch.contains_last_prefill_chunk = False
    main.init_forward_metadata(batch)
    hidden = torch.randn(len(batch.input_ids), E2B_TINY.hidden_size)

    def note(batch: Any) -> None:
        planned.append(list(batch.extend_seq_lens_cpu))

    compat.layers.start_residual(batch, hidden)
    span = forward_context(ForwardContext(attn_backend=main))
    with span, patched(main, init_forward_metadata=note):
        rows, *_, restore = engine.text_model._yoco_truncate_to_last_tokens(
            hidden, batch.positions, None, batch
        )
        assert compat.layers.get_residual(batch) is rows
        restore()
    assert compat.layers.get_residual(batch) is hidden
    assert planned == [[1], [len(hidden)]]


@pytest.mark.parametrize(
    ("prompts", "outcome"),
    [
        (BATCHES["one prompt"], counters.TAIL_EAGER),
        (batch_of((0, 1), (0, 1)), eligibility.NOTHING_TO_SKIP),
    ],
    ids=["cut", "refused"],
)
def test_a_batch_is_not_held(engine: Engine, prompts: list[Prompt], outcome: str) -> None:
    held = []

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held.append(weakref.ref(kwargs.get("forward_batch") or args[2]))

    gc.disable()  # reference counting alone must free it
    try:
        with engine.text_model.register_forward_pre_hook(hook, with_kwargs=True):
            engine.forward(engine.schedule(prompts))
        [batch] = held
        assert batch() is None
    finally:
        gc.enable()
    assert times(outcome) == 1
