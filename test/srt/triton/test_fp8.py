"""SGLang's own fp8 layers (``--quantization fp8``), and a KV cache dtype unlike the weights'.

Such layers have weights and activations of 8 bits. Activations are scaled row by row, so a row's
output does not depend on the rows beside it: the fast path is as right as stock. The kernel
that scales them is Triton's, which is why these tests run in its interpreter. The audio tower is
left in bf16, as docs/modes.md says: SGLang cannot build it from fp8 layers.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

from harness.batches import batch_of, new_rows
from harness.fixtures import Checkpoints, left_to_release
from harness.forwards import ENGINE, INTERPRETED_ENGINE, assert_fast, state_of, times
from harness.layer_rows import INTERPRETED
from harness.observe import Observed, run, watching
from sglang_gemma4_reference import interpreter
from sglang_gemma4_reference.engine import Engine, Prompt, switched
from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.core import per_layer

pytestmark = pytest.mark.usefixtures("forgotten_reports")
interpreter.make_quick()
interpreter.make_exact()

WINDOW = INTERPRETED.sliding_window


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints) -> Engine:
    checkpoint = checkpoints(dataclasses.replace(INTERPRETED, dtype="bfloat16"))
    in_bf16 = INTERPRETED_ENGINE | {"dtype": "bfloat16"}
    with envs.SGLANG_FP8_IGNORED_LAYERS.override("audio_tower"):
        return Engine(checkpoint, **in_bf16, quantization="fp8")


def linear_layers(engine: Engine) -> list[LinearBase]:
    """Return the linear layers of the text model."""
    return [part for part in engine.text_model.modules() if isinstance(part, LinearBase)]


def test_every_linear_layer_is_fp8(engine: Engine) -> None:
    layers = linear_layers(engine)
    assert {type(layer.quant_method) for layer in layers} == {Fp8LinearMethod}
    assert {layer.weight.dtype for layer in layers} == {torch.float8_e4m3fn}
    assert not any(map(compat.layers.is_plain_linear, layers))


def test_a_row_does_not_depend_on_the_rows_beside_it(engine: Engine) -> None:
    """One of them is a thousand times as large as the others: one scale for all would show."""
    draw = torch.Generator().manual_seed(0)
    for layer in linear_layers(engine):
        rows = torch.randn(9, layer.input_size, generator=draw, dtype=torch.bfloat16)
        rows[4] *= 1000
        together, _ = layer(rows)
        for row in (0, 4, 8):
            alone, _ = layer(rows[row : row + 1])
            assert torch.equal(alone[0], together[row])


def projections(engine: Engine, prompts: list[Prompt]) -> list[tuple[int, int]]:
    """Return the projections of per-layer inputs: one for all rows and layers, as in stock."""
    assert not per_layer.can_be_split(engine.text_model)
    return [(new_rows(prompts), INTERPRETED.layers)]


def in_two_chunks(prompt: Prompt) -> Prompt:
    """Return a prompt whose new tokens are the second half, after the first as a chunk."""
    half = len(prompt.new) // 2
    return dataclasses.replace(
        prompt, cached=prompt.cached + prompt.new[:half], new=prompt.new[half:]
    )


def answers(seen: Observed) -> torch.Tensor:
    """Return the logits of the next tokens, and the requested input log-probabilities."""
    found = seen.output.next_token_logits, seen.output.input_token_logprobs
    return torch.cat([part.flatten() for part in found if part is not None])


@pytest.mark.parametrize(
    "prompts",
    [
        batch_of((6, 20), (0, 7), (WINDOW, 4), (0, 2)),
        batch_of((10, 20), logprob_start=25),
    ],
    ids=["last rows", "input logprobs"],
)
def test_answers_are_as_near_as_those_of_two_chunks(engine: Engine, prompts: list[Prompt]) -> None:
    """The fast path is about as far from stock as stock in two chunks is.

    Attention sums a suffix, or one row, in another order than the whole prompt. If that changes the
    last bit of a bf16 number, the next fp8 number may be one step off, in the tail as in chunks.
    """
    stock, fast = assert_fast(
        engine, prompts, tolerance=math.inf, projected=projections(engine, prompts)
    )
    assert times(counters.TAIL_EAGER) == 1
    chunks = run(engine, engine.schedule(list(map(in_two_chunks, prompts))), "0")

    def distance(seen: Observed) -> float:
        return float((answers(seen) - answers(stock)).abs().max())

    assert distance(fast) < 2 * distance(chunks)


def test_an_intermediate_chunk(engine: Engine) -> None:
    """It writes stock's keys and values, bit for bit."""
    prompts = batch_of((6, 20), (0, 7), to_come=(21, 22))
    assert_fast(engine, prompts, projected=projections(engine, prompts))
    assert times(counters.TAIL_SKIPPED) == 1


# ---------------------------------------------------------------- the cache

TYPES = {
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("name", left_to_release(TYPES, but=["fp8_e4m3"]))
def test_a_cache_of_another_type_is_refused(checkpoints: Checkpoints, name: str) -> None:
    """Stock fails as it does without the package: with an error at the first shared layer.

    There SGLang's own forward reads K and V back from the cache, and its kernel refuses their
    dtype, in the interpreter as on a GPU.
    """
    engine = Engine(checkpoints(INTERPRETED), **ENGINE, kv_cache_dtype=name)
    assert type(engine.runner.attn_backend) is TritonAttnBackend
    assert str(state_of(engine).off_because) == (
        f"a KV cache of {TYPES[name]} with weights of torch.float32"
    )
    for switch in ("0", "1"):
        seen, scheduled = Observed(), engine.schedule(batch_of((0, 20), (0, 7)))
        with (
            switched(switch),
            watching(engine, seen),
            pytest.raises(Exception, match=r"Unsupported rhs dtype|must be same dtype"),
        ):
            engine.forward(scheduled)
        assert seen.attention_rows == [27] * (INTERPRETED.layers - INTERPRETED.kv_shared_layers)
