"""bf16, and a KV cache that rounds since its type is not the weights', on SGLang's Triton backend.

This backend attends to a chunk's own K and V before they are rounded to the cache's type, except in
layers that read another layer's. So under such a cache layer K-1 must attend as in stock, and the
cut comes behind it.

SGLang's own forward gets no further than layer K: it hands K and V that a shared layer reads back
to its kernel in the cache's type, which the kernel refuses, in the interpreter as on a GPU. To
have something to compare with, most tests here convert them for it (``readable``). The fast path
needs none of that: its tail decodes, and the decode kernel takes any type.

A decode step rounds its queries and probabilities to the cache's type as well, so answers are not
those of the repaired stock to the bit: they are to be no further from fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

import truth
from batches import batch_of
from layer_rows import FIRST_SHARED, LAYERS
from observe import (
    Observed,
    assert_same_cache,
    assert_same_objects,
    run,
    switched,
    watching,
)
from rounding import assert_layers_agree, rounded_otherwise
from sglang_gemma4_reference import interpreter
from sglang_gemma4_reference.checkpoint import (
    E2B_TINY,
    E2B_TINY_SHARP,
    Gemma4Shape,
    write_checkpoint,
)
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import report
from sglang_gemma4_yoco.core import forward
from sglang_gemma4_yoco.loading import start
from sglang_gemma4_yoco.core import donor

interpreter.make_quick()
interpreter.make_exact()

WINDOW = E2B_TINY.sliding_window
BATCH = batch_of((6, 20), (0, 7), (0, 15), (WINDOW, 4), (0, 2))
TOTAL, KEPT = 48, 5
# The root mean square error of repaired stock: K and V of 3 and 2 bits of mantissa.
TYPES = {"bfloat16": 0.1, "fp8_e4m3": 0.4, "fp8_e5m2": 0.8}


def checkpoint_of(tmp_path_factory: pytest.TempPathFactory, shape: Gemma4Shape) -> Path:
    """With two heads: the interpreter runs a kernel once per head, in Python."""
    path = tmp_path_factory.mktemp("checkpoint") / shape.dtype
    return write_checkpoint(path, dataclasses.replace(shape, heads=2))


@pytest.fixture(autouse=True)
def _fresh_decisions() -> Iterator[None]:
    report.reset()
    fallback.reset()
    yield
    fallback.reset()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(tmp_path_factory, E2B_TINY)


USUAL = "fp8_e4m3"


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.release] * (name != USUAL)) for name in TYPES],
)
def rounding(request: pytest.FixtureRequest, checkpoint: Path) -> Engine:
    engine = Engine(
        checkpoint,
        device="cpu",
        dtype="float32",
        max_total_tokens=512,
        kv_cache_dtype=request.param,
    )
    assert type(engine.runner.attn_backend) is TritonAttnBackend
    return engine


@contextmanager
def readable() -> Iterator[None]:
    """A shared layer's K and V, read back from the cache, are converted to the queries' type."""
    extend = TritonAttnBackend.forward_extend

    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if k is not None:
            return extend(self, q, k, v, layer, batch, *args, **kwargs)
        pool, slots = self.token_to_kv_pool, batch.out_cache_loc
        if pool.layers_mapping[layer.layer_id][1]:
            slots = self.forward_metadata.swa_out_cache_loc
        k, v = (buffer[slots].to(q.dtype) for buffer in pool.get_kv_buffer(layer.layer_id))
        return extend(self, q, k, v, layer, batch, save_kv_cache=False)

    with mock.patch.object(TritonAttnBackend, "forward_extend", forward_extend):
        yield


@contextmanager
def attended(engine: Engine) -> Iterator[list[torch.Tensor]]:
    """What the attention of each front layer hands to its output projection."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, args: seen.append(args[0].clone())
        )
        for layer in engine.text_model.layers[:FIRST_SHARED]
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def scheduled_on(engine: Engine) -> Any:
    """The batch, its cached tokens computed by the fast path, since stock cannot."""
    return engine.schedule(BATCH, prefix="1")


def answers(seen: Observed) -> torch.Tensor:
    """Log-probabilities of the token after each prompt: [prompts, vocab]."""
    logprobs: torch.Tensor = seen.output.next_token_logits.float().log_softmax(-1)
    return logprobs


def true_answers(checkpoint: Path) -> torch.Tensor:
    oracle = truth.load(checkpoint)
    return torch.stack([truth.logprobs(oracle, prompt.cached + prompt.new) for prompt in BATCH])


def test_cut_behind_the_donor(
    rounding: Engine, checkpoint: Path, request: pytest.FixtureRequest
) -> None:
    vars(start.of(rounding.text_model)).pop("donor_cut", None)
    scheduled = scheduled_on(rounding)
    with readable(), attended(rounding) as by_stock:
        stock = run(rounding, scheduled, "0")
    with attended(rounding) as by_fast:
        fast = run(rounding, scheduled, "1")
    assert stock.rows == stock.attention_rows == [TOTAL] * LAYERS
    wanted = [TOTAL] * FIRST_SHARED + [KEPT] * (LAYERS - FIRST_SHARED)
    assert fast.rows == fast.attention_rows == wanted
    assert start.of(rounding.text_model).donor_cut is DonorCut.NONE
    assert len(by_stock) == len(by_fast) == FIRST_SHARED
    for layer, (want, got) in enumerate(zip(by_stock, by_fast, strict=True)):
        assert torch.equal(got, want), f"layer {layer} attends otherwise"
    assert_same_objects(fast)
    assert_same_cache(stock, fast)
    truth.assert_no_further(
        answers(fast),
        answers(stock),
        true_answers(checkpoint),
        at_most=TYPES[request.node.callspec.params["rounding"]],
    )


def test_a_deeper_cut_would_attend_to_rounded_keys(
    rounding: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the cut behind the attention is for: it can be seen here that it is needed."""
    scheduled = scheduled_on(rounding)
    with attended(rounding) as right:
        run(rounding, scheduled, "1")
    monkeypatch.setattr(donor, "why_not_keys_and_values", lambda *_: None)
    del start.of(rounding.text_model).donor_cut
    with attended(rounding) as rounded:
        deeper = run(rounding, scheduled, "1")
    del start.of(rounding.text_model).donor_cut
    assert deeper.attention_rows == deeper.rows
    last = torch.tensor([len(prompt.new) for prompt in BATCH]).cumsum(0) - 1
    assert (rounded[-1] - right[-1][last]).abs().max() > 1e-3


def test_stock_ends_at_the_first_shared_layer(rounding: Engine) -> None:
    """When SGLang has learned to read such a cache back, ``readable`` can go."""
    scheduled, seen = scheduled_on(rounding), Observed()
    with (
        switched("0"),
        watching(rounding, seen),
        pytest.raises(Exception, match=r"Unsupported rhs dtype|must be same dtype"),
    ):
        rounding.forward(scheduled)
    assert seen.attention_rows == [TOTAL] * FIRST_SHARED


def test_the_reason_is_told(rounding: Engine, caplog: pytest.LogCaptureFixture) -> None:
    vars(start.of(rounding.text_model)).pop("donor_cut", None)
    with caplog.at_level("INFO", "sglang_gemma4_yoco"):
        run(rounding, rounding.schedule(batch_of((0, 4))), "1")
    [told] = [message for message in caplog.messages if "because" in message]
    assert "cut before layer" in told
    assert f"because the KV cache holds {rounding.runner.token_to_kv_pool.dtype}" in told


@pytest.mark.parametrize(
    ("shape", "from_fp32"),
    [
        pytest.param(dataclasses.replace(E2B_TINY, dtype="bfloat16"), 0.1, id="tame"),
        # In bf16 another model than in fp32, by as much as prompts differ.
        pytest.param(E2B_TINY_SHARP, 1.0, id="sharp"),
    ],
)
def test_weights_and_cache_in_bfloat16(
    tmp_path_factory: pytest.TempPathFactory, shape: Gemma4Shape, from_fp32: float
) -> None:
    """One type for both: nothing is rounded that was not, and the cut is the deepest."""
    checkpoint = checkpoint_of(tmp_path_factory, shape)
    engine = Engine(checkpoint, device="cpu", dtype="bfloat16", max_total_tokens=512)
    scheduled = engine.schedule(BATCH)
    stock, fast = run(engine, scheduled, "0"), run(engine, scheduled, "1")
    assert {k.dtype for k, _ in fast.kv} == {torch.bfloat16}
    assert stock.rows == stock.attention_rows == [TOTAL] * LAYERS
    shared = LAYERS - FIRST_SHARED + 1
    assert fast.rows == fast.attention_rows == [TOTAL] * (LAYERS - shared) + [KEPT] * shared
    assert_same_objects(fast)
    assert_same_cache(stock, fast)
    truth.assert_no_further(
        answers(fast), answers(stock), true_answers(checkpoint), at_most=from_fp32
    )
    rounded = []
    for seed in range(2):
        with rounded_otherwise(engine, seed):
            rounded.append(answers(run(engine, scheduled, "0")))
    truth.assert_as_near_as_rounding(answers(fast), answers(stock), rounded)
    assert_layers_agree(engine, scheduled, BATCH)
