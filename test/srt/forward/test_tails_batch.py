"""The batch as the tail's layers find it, and what becomes of it afterwards.

Some of these fields no kernel on a CPU reads, and Triton's read few of them; others may, so all of
them must describe the kept rows: looked at from inside a layer of the tail.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from harness.batches import BATCHES, batch_of, kept_rows
from harness.forwards import MARKS_CHUNKS, attention_of
from harness.layer_rows import FIRST_CUT, LAYERS
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.replaced import replaced

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def kept_index(prompts: Sequence[Prompt]) -> list[int]:
    """The kept rows among all new ones."""
    ends = itertools.accumulate(len(p.new) for p in prompts)
    lens = kept_rows(prompts)
    found: list[int] = []
    for m, end in zip(lens, ends, strict=True):
        for row in range(end - m, end):
            found.append(row)
    return found


class TailsView:
    """Copies of what one attention layer of the tail was called with."""

    def __init__(self, engine: Engine, layer: int) -> None:
        self.fields: dict[str, Any] = {}
        self.rows = 0
        self.positions: list[int] = []
        attention = engine.text_model.layers[layer].self_attn
        self._hook = attention.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _: Any, __: Any, call: dict[str, Any]) -> None:
        self.rows = call["hidden_states"].shape[0]
        self.positions = call["positions"].tolist()
        self.fields = {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in vars(call["forward_batch"]).items()
        }

    def __enter__(self) -> TailsView:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


@pytest.mark.parametrize("layer", [FIRST_CUT, LAYERS - 1])
@pytest.mark.parametrize("name", BATCHES)
def test_every_field_describes_the_kept_rows(engine: Engine, name: str, layer: int) -> None:
    prompts = BATCHES[name]
    lens = kept_rows(prompts)
    ends = []
    for p in prompts:
        ends.append(len(p.cached) + len(p.new))
    # SGLang's multimodal Gemma 4 counts positions from 1.
    positions = [at + 1 for m, end in zip(lens, ends, strict=True) for at in range(end - m, end)]
    scheduled = engine.schedule(prompts)
    slots, ids = scheduled.out_cache_loc.tolist(), scheduled.input_ids.tolist()
    rows = kept_index(prompts)
    with TailsView(engine, layer) as tail:
        engine.forward(scheduled)

    assert tail.rows == len(rows)
    assert tail.positions == positions
    seen = tail.fields
    assert seen["positions"] == positions
    assert seen["input_ids"] == [ids[row] for row in rows]
    assert seen["extend_num_tokens"] == len(rows)
    assert seen["extend_seq_lens"] == list(seen["extend_seq_lens_cpu"]) == lens
    before = [end - m for m, end in zip(lens, ends, strict=True)]
    assert seen["extend_prefix_lens"] == list(seen["extend_prefix_lens_cpu"]) == before
    assert seen["extend_start_loc"] == [sum(lens[:i]) for i in range(len(lens))]
    assert seen["seq_lens"] == ends
    for counted in ("num_token_non_padded_cpu", "global_num_token_non_padded_cpu"):
        assert seen.get(counted, len(rows)) == len(rows)
    if lens == [1] * len(lens):
        assert seen["forward_mode"] is ForwardMode.DECODE
        assert seen["out_cache_loc"] == slots  # all of them are written already
        assert seen.get("kv_loc_cols") is None
    else:
        assert seen["forward_mode"] is ForwardMode.EXTEND
        assert seen["out_cache_loc"] == [slots[row] for row in rows]
        assert seen.get("kv_loc_cols", rows) == rows


@pytest.fixture
def planned(engine: Engine) -> Iterator[Callable[[Sequence[Prompt]], Any]]:
    """Batches that are planned on the runner's backend, inside a forward's context."""
    main = attention_of(engine).main

    def plan(prompts: Sequence[Prompt]) -> Any:
        batch = releases.forward_batch(engine.schedule(prompts), engine.runner)
        main.init_forward_metadata(batch)
        return batch

    with forward_context(ForwardContext(attn_backend=main)):
        yield plan


@contextmanager
def noting_plans(backend: Any, plans: list[list[int]]) -> Iterator[None]:
    """The new tokens of each request of every batch that is planned on this backend."""
    stock = backend.init_forward_metadata

    def init_forward_metadata(batch: Any) -> None:
        plans.append(list(batch.extend_seq_lens_cpu))
        stock(batch)

    with replaced(backend, init_forward_metadata=init_forward_metadata):
        yield


class TestPublishedHelpers:
    """On SGLang's own model and batches; ``models/`` has them on the published stand-ins."""

    @MARKS_CHUNKS
    @pytest.mark.usefixtures("planned")
    def test_truncation_of_an_intermediate_chunk(self, engine: Engine) -> None:
        """The package runs no tail of it; a caller of the helper gets its attention planned."""
        attention = attention_of(engine)
        batch = releases.forward_batch(engine.schedule(BATCHES["one prompt"]), engine.runner)
        batch.contains_last_prefill_chunk = False
        attention.main.init_forward_metadata(batch)
        hidden = torch.randn(len(batch.input_ids), E2B_TINY.hidden_size)
        plans: list[list[int]] = []
        with noting_plans(attention.tail, plans):
            *_, restore = engine.text_model._yoco_truncate_to_last_tokens(
                hidden, batch.positions, None, batch
            )
            restore()
        assert plans == [[1]]

    @pytest.mark.skipif(not compat.layers.HAS_RESIDUAL_STREAM, reason="layers pass plain tensors")
    def test_the_residual_is_that_of_the_kept_rows(
        self, engine: Engine, planned: Callable[..., Any]
    ) -> None:
        batch, model = planned(BATCHES["one prompt"]), engine.text_model
        hidden = torch.randn(len(batch.input_ids), E2B_TINY.hidden_size)
        compat.layers.start_residual(batch, hidden)
        rows, *_, restore = model._yoco_truncate_to_last_tokens(
            hidden, batch.positions, None, batch
        )
        assert compat.layers.residual_is_written(batch, rows)
        assert not compat.layers.residual_is_written(batch, hidden)
        restore()
        assert compat.layers.residual_is_written(batch, hidden)


@pytest.mark.parametrize(
    ("prompts", "outcome"),
    [
        (BATCHES["one prompt"], counters.TAIL_EAGER),
        (batch_of((0, 1), (0, 1)), eligibility.NOTHING_TO_SKIP),
    ],
    ids=["cut", "refused"],
)
def test_a_batch_is_not_held(engine: Engine, prompts: list[Prompt], outcome: str) -> None:
    held: list[weakref.ref[Any]] = []

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held.append(weakref.ref(kwargs.get("forward_batch") or args[2]))

    gc.disable()  # its memory is given back at once
    try:
        with engine.text_model.register_forward_pre_hook(hook, with_kwargs=True):
            engine.forward(engine.schedule(prompts))
        [batch] = held
        assert batch() is None
    finally:
        gc.enable()
    assert counters.forwards[outcome] == 1
