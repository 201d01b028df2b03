"""A KV cache of the weights' type, and of another one, on SGLang's Triton backend.

Under a cache of another type SGLang's own forward gets no further than the first shared layer: it
hands K and V that a shared layer reads back to its kernel in the cache's type, which the kernel
refuses, in the interpreter as on a GPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

import truth
from batches import batch_of
from layer_rows import FIRST_SHARED, LAYERS
from observe import Observed, assert_same_cache, assert_same_objects, run, watching
from rounding import assert_layers_agree, rounded_otherwise
from sglang_gemma4_reference import interpreter
from sglang_gemma4_reference.checkpoint import (
    E2B_TINY,
    E2B_TINY_SHARP,
    Gemma4Shape,
    write_checkpoint,
)
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.loading import start

interpreter.make_quick()
interpreter.make_exact()

WINDOW = E2B_TINY.sliding_window
BATCH = batch_of((6, 20), (0, 7), (0, 15), (WINDOW, 4), (0, 2))
TOTAL, KEPT = 48, 5
RELEASE = pytest.mark.release
TYPES = {
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def checkpoint_of(tmp_path_factory: pytest.TempPathFactory, shape: Gemma4Shape) -> Path:
    """With two heads: the interpreter runs a kernel once per head, in Python."""
    path = tmp_path_factory.mktemp("checkpoint") / shape.dtype
    return write_checkpoint(path, dataclasses.replace(shape, heads=2))


@pytest.fixture(autouse=True)
def _fresh_decisions() -> None:
    log.reset()


@pytest.mark.parametrize(
    "name",
    [pytest.param("bfloat16", marks=RELEASE), "fp8_e4m3", pytest.param("fp8_e5m2", marks=RELEASE)],
)
def test_a_cache_of_another_type_is_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """Stock answers as it does without the package: with an error at the first shared layer."""
    checkpoint = checkpoint_of(tmp_path_factory, E2B_TINY)
    engine = Engine(
        checkpoint, device="cpu", dtype="float32", max_total_tokens=512, kv_cache_dtype=name
    )
    assert type(engine.runner.attn_backend) is TritonAttnBackend
    assert start.of(engine.text_model).refused == (
        f"a KV cache of {TYPES[name]} beside weights of torch.float32"
    )
    for switch in ("0", "1"):
        seen, scheduled = Observed(), engine.schedule(batch_of((0, 20), (0, 7)))
        with (
            switched(switch),
            watching(engine, seen),
            pytest.raises(Exception, match=r"Unsupported rhs dtype|must be same dtype"),
        ):
            engine.forward(scheduled)
        assert seen.attention_rows == [27] * FIRST_SHARED


def answers(seen: Observed) -> torch.Tensor:
    """Log-probabilities of the token after each prompt: [prompts, vocab]."""
    logprobs: torch.Tensor = seen.output.next_token_logits.float().log_softmax(-1)
    return logprobs


def true_answers(checkpoint: Path) -> torch.Tensor:
    oracle = truth.load(checkpoint)
    return torch.stack([truth.logprobs(oracle, prompt.cached + prompt.new) for prompt in BATCH])


@pytest.mark.parametrize(
    ("shape", "from_fp32"),
    [
        pytest.param(
            dataclasses.replace(E2B_TINY, dtype="bfloat16"), 0.1, id="tame", marks=RELEASE
        ),
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
