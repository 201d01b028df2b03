"""On equals off equals Hugging Face where Gemma 4 takes the code that it takes on CUDA.

The platform's mode ``cuda_branches`` says what runs then, and what it cannot show. Of every forward
it is asserted first which kernels ran, and how often: stock's counts follow from the layers, and
the fast path's from the rows that it keeps. No oracle is asked about decode steps, in which Triton
sees one key fewer than Hugging Face; there on equals off bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_gemma4_reference import cuda_branches
from sglang_gemma4_reference.checkpoint import E2B_TINY, Gemma4Shape, write_checkpoint

if version("sglang") != cuda_branches.SGLANG:
    pytest.skip(f"the mode knows SGLang {cuda_branches.SGLANG} alone", allow_module_level=True)

from transformers import Gemma4ForConditionalGeneration

from batches import batch_of
from observe import (
    Observed,
    assert_same_answers,
    assert_same_cache,
    assert_same_objects,
    run,
    switched,
)
from sglang_gemma4_reference.cuda_kernels import calls
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import donor, per_layer, report
from sglang_gemma4_yoco.donor import DonorCut

W = 16
# Of float32 logits: sums in another order, in some hundred operations.
TOLERANCE = 5e-5
ORACLE_TOLERANCE = 1e-4

_SMALL = dataclasses.replace(
    E2B_TINY, layers=6, sliding_per_full=1, heads=2, kv_heads=1, sliding_window=W
)
SHAPES = {
    # The widths' kernel is that of the real models' 256 and 512.
    "rope of wide heads, donor with a window": dataclasses.replace(
        _SMALL, kv_shared_layers=3, head_dim=64, global_head_dim=128
    ),
    # Without per-layer inputs a layer ends in one more fused kernel.
    "rope of narrow heads, full donor, no per-layer inputs": dataclasses.replace(
        _SMALL, kv_shared_layers=2, ple_width=0
    ),
}
WIDE, NARROW = SHAPES


@dataclasses.dataclass
class Bench:
    """One model, as SGLang serves it and as Hugging Face computes it."""

    shape: Gemma4Shape
    path: Path
    engine: Engine
    oracle: Gemma4ForConditionalGeneration


def bench_of(name: str, tmp_path_factory: pytest.TempPathFactory, dtype: str) -> Bench:
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPES[name])
    engine = Engine(path, device="cpu", dtype=dtype, max_total_tokens=1024)
    oracle = Gemma4ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    return Bench(SHAPES[name], path, engine, oracle)


@pytest.fixture(scope="module", params=SHAPES)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Bench:
    return bench_of(request.param, tmp_path_factory, "float32")


@pytest.fixture(autouse=True)
def _nothing_failed(forgotten_reports: None) -> Iterator[None]:
    """A check of a kernel that refuses the fast path would be served by stock, and fails here."""
    yield
    assert report.FAILED not in report.forwards


# -- which kernels ran -----------------------------------------------------------------------------

NORM, ADD_NORM, ROW_NORM = "_gemma_qkv_rmsnorm_kernel", "fused_add_rmsnorm", "rmsnorm"
LAYER_END = "_gemma_rmsnorm_residual_kernel"
EXTEND, DECODE = "_fwd_kernel", "_fwd_grouped_kernel_stage1"
KERNELS = (
    *(NORM, ADD_NORM, LAYER_END, "run_rope", "rotary_embedding", "store_cache", "run_activation"),
    *(EXTEND, DECODE, "_fwd_kernel_stage2"),
)
# How often they run depends on what the backend plans, and on what is asked of the logits.
ALSO = ("softcap_inplace_logits_kernel", "create_flashinfer_kv_indices_triton", ROW_NORM)


def expected_calls(shape: Gemma4Shape, cut: DonorCut | None, tail: str) -> Counter[str]:
    """How often each of ``KERNELS`` runs in one forward.

    Args:
        cut: of layer K-1; None for the stock forward.
        tail: ``decode``, ``extend`` (suffixes) or ``unread``.
    """
    layers, own = shape.layers, shape.layers - shape.kv_shared_layers
    behind_kv = cut is DonorCut.KEYS_AND_VALUES
    # Layers of which more runs than K and V: an unread chunk ends at the donor.
    whole = layers if tail != "unread" or cut is None else own - behind_kv
    decoded = 0
    if tail == "decode" and cut is not None:
        decoded = layers - own + behind_kv
    # For an unread chunk a backend writes where it attends: one more call, whose answer is dropped.
    dropped = int(tail == "unread" and behind_kv)
    # Cut behind K and V, the donor norms k, v and, if someone reads, q apart, and rotates twice.
    extra_norms, extra_ropes = 2 * behind_kv, int(behind_kv and not dropped)
    rope = "run_rope" if shape.head_dim in (64, 128, 256, 512) else "rotary_embedding"
    return +Counter(
        {
            NORM: whole + extra_norms,
            rope: whole + dropped + extra_ropes,
            ADD_NORM: whole,
            LAYER_END: 0 if shape.ple_width else whole,
            "run_activation": whole,
            "store_cache": own,
            EXTEND: whole - decoded,
            DECODE: decoded + dropped,
            "_fwd_kernel_stage2": decoded + dropped,
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
    bench: Bench,
    prompts: list[Prompt],
    kept: int,
    *,
    cut: DonorCut = DonorCut.KEYS_AND_VALUES,
    tail: str = "decode",
) -> tuple[Observed, Observed]:
    """The forward off and on, K/V equal byte for byte, after the kernels and rows were counted."""
    bench.engine.text_model.__dict__["_yoco_donor_cut"] = cut
    scheduled = bench.engine.schedule(prompts)
    report.reset()
    (stock, stock_calls), (fast, fast_calls) = (
        watched(bench.engine, scheduled, switch) for switch in "01"
    )
    shape, total = bench.shape, sum(len(prompt.new) for prompt in prompts)
    assert stock_calls == expected_calls(shape, None, tail)
    if tail == "extend" and cut is DonorCut.KEYS_AND_VALUES:
        cut = DonorCut.AFTER_ATTENTION  # an extend call takes no fewer queries than keys to write
    assert fast_calls == expected_calls(shape, cut, tail)
    assert stock.rows == stock.attention_rows == [total] * shape.layers
    own = shape.layers - shape.kv_shared_layers
    front = own - (cut is not DonorCut.NONE)
    attended = own - (cut is DonorCut.KEYS_AND_VALUES)
    assert fast.rows == [total] * front + [kept] * (shape.layers - front if kept else 0)
    assert fast.attention_rows == [total] * attended + [kept] * (
        shape.layers - attended if kept else 0
    )
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


# -- batches ---------------------------------------------------------------------------------------

BATCHES = {
    "one prompt": batch_of((0, 40)),
    "three, two of them cached": batch_of((20, 13), (0, 7), (33, 1)),
    "around the window": batch_of((0, W - 1), (0, W), (0, W + 1), (0, 3 * W + 1)),
    "one row beside many": batch_of((W, 1), (0, 30), (W - 1, 1), (W + 1, 2)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_one_row_per_request(bench: Bench, name: str) -> None:
    prompts = BATCHES[name]
    stock, fast = both_ways(bench, prompts, len(prompts))
    assert_same_answers(stock, fast, TOLERANCE)
    assert_as_the_oracle(bench, prompts, stock, fast)


@pytest.mark.parametrize("cut", [DonorCut.AFTER_ATTENTION, DonorCut.NONE])
def test_other_cuts(bench: Bench, cut: DonorCut) -> None:
    prompts = batch_of((W + 3, 9), (0, 14))
    stock, fast = both_ways(bench, prompts, len(prompts), cut=cut)
    assert_same_answers(stock, fast, TOLERANCE)
    assert_as_the_oracle(bench, prompts, stock, fast)


def test_a_prompt_whose_norm_kernel_walks_the_heads(bench: Bench) -> None:
    """Above 256 rows the fused norm is launched once per row, not once per row and head."""
    prompts = batch_of((0, 260))
    stock, fast = both_ways(bench, prompts, 1)
    assert_same_answers(stock, fast, TOLERANCE)
    assert_as_the_oracle(bench, prompts, stock, fast)


def test_suffixes_beside_last_rows(bench: Bench) -> None:
    wants, other = *batch_of((10, 24), logprob_start=25), *batch_of((0, 9))
    stock, fast = both_ways(bench, [wants, other], 9 + 1, tail="extend")
    assert_same_answers(stock, fast, TOLERANCE)
    assert_as_the_oracle(bench, [wants, other], stock, fast)
    ids = torch.tensor(wants.cached + wants.new)
    want = oracle_logprobs(bench, wants)[25:-1].gather(1, ids[26:, None])[:, 0]
    got = torch.as_tensor(fast.output.input_token_logprobs)[: len(want)]
    torch.testing.assert_close(got, want, atol=ORACLE_TOLERANCE, rtol=0)


@pytest.mark.parametrize("cut", list(DonorCut))
def test_unread_chunks(bench: Bench, cut: DonorCut) -> None:
    chunk = batch_of((20, 15), (0, 8), to_come=(21, 22))
    _, fast = both_ways(bench, chunk, 0, cut=cut, tail="unread")
    assert fast.hidden is not None
    assert fast.hidden.isfinite().all()


def test_decode_steps_after_the_prefill(bench: Bench) -> None:
    prompts = batch_of((W, 5), (0, 2 * W))
    answers = []
    for switch in "01":
        scheduled = bench.engine.schedule(prompts)
        run(bench.engine, scheduled, switch)
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
