"""On equals off equals Hugging Face where Gemma 4 takes the code that it takes on CUDA.

The platform's mode ``cuda_branches`` says what runs then, and what it cannot show. Of every forward
it is asserted first which kernels ran, and how often: stock's counts follow from the layers, and
the fast path's from the rows that it keeps. No oracle is used for decode steps, in which Triton
sees one key fewer than Hugging Face; there on equals off bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any
from unittest import mock

import pytest
import torch

from sglang_gemma4_reference import cuda_branches
from sglang_gemma4_reference.checkpoint import E2B_TINY, Gemma4Shape, sharpened, write_checkpoint
from sglang_gemma4_reference.engine import reset_log

if version("sglang") != cuda_branches.SGLANG:
    pytest.skip(f"the mode knows SGLang {cuda_branches.SGLANG} alone", allow_module_level=True)

from transformers import Gemma4ForConditionalGeneration

from harness import truth
from harness.batches import batch_of
from harness.forwards import assert_served_by_stock, failing
from harness.observe import (
    TOLERANCE,
    Observed,
    assert_same_answers,
    assert_same_cache,
    assert_same_objects,
    run,
)
from harness.rounding import assert_layers_agree, rounded_otherwise
from sglang_gemma4_reference import interpreter
from sglang_gemma4_reference.cuda_kernels import calls, norms
from sglang_gemma4_reference.engine import Engine, Prompt, switched
from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.core import donor

interpreter.make_quick()

W = 8
# Of float32 logits, against sums in an order that is Hugging Face's.
ORACLE_TOLERANCE = 1e-4

# Its heads' rotary kernel is that of the real models' 256 and 512. Small: Triton's interpreter runs
# the fused norm once per row and head, in Python.
WIDE = dataclasses.replace(
    E2B_TINY,
    sliding_per_full=1,
    heads=2,
    kv_heads=1,
    sliding_window=W,
    layers=6,
    kv_shared_layers=3,
    head_dim=64,
    global_head_dim=128,
)


@dataclasses.dataclass
class Bench:
    """One model, as SGLang serves it and as Hugging Face computes it."""

    shape: Gemma4Shape
    engine: Engine
    oracle: Gemma4ForConditionalGeneration


_MODELS = {
    "wide": (WIDE, "float32"),
    "bfloat16": (WIDE, "bfloat16"),
    "sharp": (sharpened(dataclasses.replace(WIDE, outlier_share=1 / 8)), "bfloat16"),
}


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The model that the test names; all tests of one model run before the next one is built."""
    shape, dtype = _MODELS[request.param]
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape)
    engine = Engine(path, device="cpu", dtype=dtype, max_total_tokens=1024)
    return Bench(shape, engine, truth.load(path))


def model(name: str) -> pytest.MarkDecorator:
    """The one that the test is of."""
    return pytest.mark.parametrize("bench", [name], indirect=True)


@pytest.fixture(autouse=True)
def _nothing_failed(forgotten_reports: None) -> Iterator[None]:
    """A check of a kernel that refuses the fast path would be served by stock, and fails here."""
    yield
    assert log.FAILED not in log.forwards


# -- which kernels ran -----------------------------------------------------------------------------

NORM, ADD_NORM, ROW_NORM = "_gemma_qkv_rmsnorm_kernel", "fused_add_rmsnorm", "rmsnorm"
EXTEND, DECODE = "_fwd_kernel", "_fwd_grouped_kernel_stage1"
KERNELS = (
    *(NORM, ADD_NORM, "run_rope", "store_cache", "run_activation"),
    *(EXTEND, DECODE, "_fwd_kernel_stage2"),
)
# How often they run depends on what the backend plans, and on which logits are wanted.
ALSO = ("softcap_inplace_logits_kernel", "create_flashinfer_kv_indices_triton", ROW_NORM)


def expected_calls(shape: Gemma4Shape, tail: str | None) -> Counter[str]:
    """How often each of ``KERNELS`` runs in one forward.

    Args:
        tail: ``decode``, ``extend`` (suffixes) or ``skipped`` (an intermediate chunk); None for
            the stock forward.
    """
    layers, own = shape.layers, shape.layers - shape.kv_shared_layers
    front = own - 1
    # Layers of which more runs than K and V.
    whole = front if tail == "skipped" else layers
    decoded = layers - front if tail == "decode" else 0
    # The donor's q, K and V are normed in separate calls, and k is rotated in one of its own.
    extra_norms, extra_ropes = (0, 0) if tail is None else (2, 1)
    return +Counter(
        {
            NORM: whole + extra_norms,
            "run_rope": whole + extra_ropes,
            ADD_NORM: whole,
            "run_activation": whole,
            "store_cache": own,
            EXTEND: whole - decoded,
            DECODE: decoded,
            "_fwd_kernel_stage2": decoded,
        }
    )


def watched(engine: Engine, scheduled: Any, switch: str) -> tuple[Observed, Counter[str]]:
    """One forward, and the kernels that it ran."""
    calls.clear()
    seen = run(engine, scheduled, switch)
    ran = Counter(calls)
    assert all(ran[name] for name in ALSO), ran
    return seen, Counter({name: ran[name] for name in KERNELS if ran[name]})


def both_ways(
    bench: Bench, prompts: list[Prompt], kept: int, *, tail: str = "decode"
) -> tuple[Observed, Observed]:
    """The forward off and on, K/V equal byte for byte, after the kernels and rows were counted."""
    scheduled = bench.engine.schedule(prompts)
    reset_log()
    norms.clear()
    stock, stock_calls = watched(bench.engine, scheduled, "0")
    of_stock = set(norms)
    fast, fast_calls = watched(bench.engine, scheduled, "1")
    assert norms == of_stock  # a request that is cut has none compiled that stock does not
    assert all(dense for _, _, dense in norms)
    assert bool(norms) == (bench.engine.runner.dtype != torch.float32)
    shape, total = bench.shape, sum(len(prompt.new) for prompt in prompts)
    assert stock_calls == expected_calls(shape, None)
    assert fast_calls == expected_calls(shape, tail)
    assert stock.rows == stock.attention_rows == [total] * shape.layers
    front = shape.layers - shape.kv_shared_layers - 1
    rows = [total] * front + [kept] * (shape.layers - front if kept else 0)
    assert fast.rows == fast.attention_rows == rows
    assert_same_objects(stock)
    assert_same_objects(fast)
    assert_same_cache(stock, fast)
    return stock, fast


# -- the oracle ------------------------------------------------------------------------------------


@torch.no_grad()
def oracle_logprobs(bench: Bench, prompt: Prompt) -> torch.Tensor:
    """Log-probabilities of the next token after each of the prompt's, [tokens, vocab]."""
    ids = torch.tensor([prompt.cached + prompt.new])
    logprobs: torch.Tensor = bench.oracle(input_ids=ids).logits[0].log_softmax(-1)
    return logprobs


def assert_as_the_oracle(
    bench: Bench, prompts: list[Prompt], *seen: Observed, tolerance: float = ORACLE_TOLERANCE
) -> None:
    """Log-probabilities of each prompt's next token agree over the whole vocabulary."""
    want = torch.stack([oracle_logprobs(bench, prompt)[-1] for prompt in prompts])
    for observed in seen:
        got = observed.output.next_token_logits.float().log_softmax(-1)
        torch.testing.assert_close(got, want, atol=tolerance, rtol=0)


@model("wide")
@torch.no_grad()
def test_two_heads_of_keys(bench: Bench) -> None:
    """As E4B has them: each is normed by itself."""
    norm = bench.engine.text_model.layers[0].self_attn.k_norm
    width = norm.weight.shape[0]
    rows = norm.weight.new_empty(3, 2 * width).normal_()
    each = [donor._headwise_norm(norm, head.clone(), 1, width) for head in rows.split(width, 1)]
    calls.clear()
    with mock.patch.object(cuda_branches, "_inside", 1):
        found = donor._headwise_norm(norm, rows.clone(), 2, width)
    assert calls[NORM] == 1
    torch.testing.assert_close(found, torch.cat(each, 1))


# -- batches ---------------------------------------------------------------------------------------

BATCHES = {
    "one prompt": batch_of((0, 20)),
    "three, two of them cached": batch_of((10, 9), (0, 5), (17, 1)),
    "around the window": batch_of((0, W - 1), (0, W), (0, W + 1), (0, 3 * W + 1)),
    "one row beside many": batch_of((W, 1), (0, 15), (W - 1, 1), (W + 1, 2)),
    "prefill beside decode rows": [
        *batch_of((W, 3), (0, W + 2)),
        *batch_of((W - 1, 1), (2 * W, 1), decodes=True),
    ],
}
USUAL = ("around the window", "prefill beside decode rows")


def assert_right(bench: Bench, prompts: list[Prompt], stock: Observed, fast: Observed) -> None:
    """Both answer alike, and as Hugging Face's model does."""
    assert_same_answers(stock, fast, TOLERANCE)
    assert_as_the_oracle(bench, prompts, stock, fast)


@model("wide")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.release] * (name not in USUAL)) for name in BATCHES],
)
def test_one_row_per_request(bench: Bench, name: str) -> None:
    prompts = BATCHES[name]
    assert_right(bench, prompts, *both_ways(bench, prompts, len(prompts)))


@pytest.mark.release
@model("wide")
def test_a_prompt_whose_norm_kernel_walks_the_heads(bench: Bench) -> None:
    """Above 256 rows the fused norm is launched once per row, not once per row and head."""
    prompts = batch_of((0, 260))
    assert_right(bench, prompts, *both_ways(bench, prompts, 1))


@model("wide")
def test_suffixes_beside_last_rows(bench: Bench) -> None:
    start, prompts = 13, [*batch_of((6, 14), logprob_start=13), *batch_of((0, 5))]
    stock, fast = both_ways(bench, prompts, 7 + 1, tail="extend")
    assert_right(bench, prompts, stock, fast)
    ids = torch.tensor(prompts[0].cached + prompts[0].new)
    want = oracle_logprobs(bench, prompts[0])[start:-1].gather(1, ids[start + 1 :, None])[:, 0]
    got = torch.as_tensor(fast.output.input_token_logprobs)[: len(want)]
    torch.testing.assert_close(got, want, atol=ORACLE_TOLERANCE, rtol=0)


@model("wide")
def test_intermediate_chunks(bench: Bench) -> None:
    chunk = batch_of((10, 8), (0, 5), to_come=(21, 22))
    _, fast = both_ways(bench, chunk, 0, tail="skipped")
    assert fast.hidden is not None
    assert fast.hidden.isfinite().all()


@model("wide")
def test_decode_steps_after_the_prefill(bench: Bench) -> None:
    prompts = batch_of((W, 3), (0, W + 2))
    answers = []
    for switch in "01":
        scheduled = bench.engine.schedule(prompts)
        prefill = run(bench.engine, scheduled, switch)
        assert prefill.rows[-1] == (len(prompts) if switch == "1" else 3 + W + 2)
        logits = []
        for _ in range(2):
            calls.clear()
            with switched(switch):
                output = bench.engine.decode(scheduled, [30, 40])
            assert calls[DECODE] == calls["_fwd_kernel_stage2"] == bench.shape.layers
            assert calls["store_cache"] == bench.shape.layers - bench.shape.kv_shared_layers
            logits.append(output.next_token_logits.clone())
        answers.append((torch.stack(logits), bench.engine.kv()))
    (stock, stock_kv), (fast, fast_kv) = answers
    assert torch.equal(stock, fast)
    for pair, fast_pair in zip(stock_kv, fast_kv, strict=True):
        assert all(map(torch.equal, pair, fast_pair))


# -- what the kernels overwrite --------------------------------------------------------------------


@model("wide")
def test_embeddings_are_gone_after_layer_0(bench: Bench) -> None:
    """Its fused add-norm writes over them: a later reader reads something else."""
    before: list[torch.Tensor] = []
    embedded: list[torch.Tensor] = []

    def keep(_: Any, __: Any, embeds: torch.Tensor) -> None:
        before.append(embeds.clone())
        embedded.append(embeds)

    with bench.engine.text_model.embed_tokens.register_forward_hook(keep):
        stock, fast = both_ways(bench, BATCHES["one prompt"], 1)
    for was, embeds in zip(before[-2:], embedded[-2:], strict=True):
        assert (was - embeds).abs().mean() > 0.01
    assert_same_answers(stock, fast, TOLERANCE)


@model("wide")
def test_a_failure_in_the_tail_is_served_by_stock(bench: Bench) -> None:
    """From the same embeddings, which the first try has overwritten by then."""
    scheduled = bench.engine.schedule(BATCHES["one prompt"])
    front = bench.shape.layers - bench.shape.kv_shared_layers - 1
    stock = run(bench.engine, scheduled, "0")
    with failing(bench.engine, "last tail layer"):
        seen = run(bench.engine, scheduled, "1")
    assert seen.rows == [20] * front + [1] * bench.shape.kv_shared_layers + stock.rows
    assert log.forwards.pop(log.FAILED) == 1
    assert_served_by_stock(stock, seen)


# -- the type that is served -----------------------------------------------------------------------


@pytest.mark.release  # a sharp model shows more
@model("bfloat16")
def test_bfloat16(bench: Bench) -> None:
    """The kernels take the served type as well, beside a rotary cache of float32.

    Bfloat16 keeps 8 bits. Some hundred roundings of 1/512 add up to hundredths of a logit of size
    1, and the last norm of these checkpoints makes its logits six times as large: 0.05 on average
    and 0.24 at most was measured. Fast must not be further off on average than stock.
    """
    prompts = BATCHES["three, two of them cached"]
    stock, fast = both_ways(bench, prompts, len(prompts))
    want = torch.stack([oracle_logprobs(bench, prompt)[-1] for prompt in prompts])
    off, on = (
        (seen.output.next_token_logits.float().log_softmax(-1) - want).abs()
        for seen in (stock, fast)
    )
    assert max(off.max(), on.max()) < 0.5
    assert off.mean() < 0.1
    assert on.mean() < 1.1 * off.mean()
    assert_layers_agree(bench.engine, bench.engine.schedule(prompts), prompts)


@model("sharp")
def test_bfloat16_of_a_sharp_model(bench: Bench) -> None:
    """Whose answers in bf16 are those of another model than in fp32: stock is the measure."""
    prompts = BATCHES["three, two of them cached"]
    stock, fast = both_ways(bench, prompts, len(prompts))
    scheduled = bench.engine.schedule(prompts)
    rounded = []
    for seed in range(2):
        with rounded_otherwise(bench.engine, seed):
            rounded.append(run(bench.engine, scheduled, "0"))
    of_stock, of_fast, *of_rounded = (
        seen.output.next_token_logits.float().log_softmax(-1) for seen in (stock, fast, *rounded)
    )
    truth.assert_as_near_as_rounding(of_fast, of_stock, of_rounded)
    assert_layers_agree(bench.engine, scheduled, prompts)
