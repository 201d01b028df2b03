"""Batches and servers that fall back to stock, on SGLang's ModelRunner: bit for bit.

``test_deciding`` has the rules, each by itself. Here SGLang's own code meets what is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.models.gemma4_causal import Gemma4TextModel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from harness.forwards import TWO_PROMPTS, assert_fast, assert_stock
from harness.layer_rows import FIRST_CUT, LAYERS
from harness.observe import TOLERANCE, run
from harness.stand_ins import halved_weights, server_args
from reviewed_arguments import installed
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_yoco import compat, log
from sglang_gemma4_yoco.core import gate
from sglang_gemma4_yoco.core.cut import Plan
from sglang_gemma4_yoco.core.state import ENTRY
from sglang_gemma4_yoco.loading import limits, start

ROWS_IN_ALL = sum(len(prompt.new) for prompt in TWO_PROMPTS)

pytestmark = pytest.mark.usefixtures("forgotten_reports")


@pytest.mark.parametrize("prefill_only", [False, True])
def test_last_hidden_states(
    engine: Engine, batches_with: Callable[..., None], prefill_only: bool
) -> None:
    """A capture of the last rows alone is served from the kept ones."""
    batches_with(capture_hidden_mode=CaptureHiddenMode.LAST, is_prefill_only=prefill_only)
    stock, fast = assert_fast(engine)
    assert stock.output.hidden_states.shape == (len(TWO_PROMPTS), E2B_TINY.hidden_size)
    torch.testing.assert_close(
        fast.output.hidden_states, stock.output.hidden_states, atol=TOLERANCE, rtol=1e-4
    )


def test_a_batch_that_names_no_capture(engine: Engine, batches_with: Callable[..., None]) -> None:
    """ForwardBatch's default. SGLang's logits processor fails on it, so this only plans it."""
    batches_with(capture_hidden_mode=None)
    batch = releases.forward_batch(engine.schedule(TWO_PROMPTS), engine.runner)
    assert batch.capture_hidden_mode is None
    with switched("1"):
        engine.runner.attn_backend.init_forward_metadata(batch)
    assert isinstance(getattr(batch, ENTRY), Plan)


@pytest.mark.parametrize("algorithm", [SpeculativeAlgorithm.NGRAM, SpeculativeAlgorithm.STANDALONE])
def test_drafts_that_read_no_row_but_the_last(
    engine: Engine, batches_with: Callable[..., None], algorithm: SpeculativeAlgorithm
) -> None:
    batches_with(spec_algorithm=algorithm)
    assert_fast(engine)
    # A draft may go on from the token of a chunk that does not finish its prompt.
    before = log.forwards.copy()
    with switched("1"):
        engine.forward(engine.schedule(TWO_PROMPTS), intermediate=True)
    outcomes = set(log.forwards - before)
    assert outcomes
    assert outcomes <= set(log.CUT) - {log.TAIL_SKIPPED}


def test_full_capture_of_frozen_kv_drafts(
    engine: Engine, batches_with: Callable[..., None]
) -> None:
    """Frozen-KV MTP captures all rows; of them the rows that its worker reads are right."""
    from sglang.srt.speculative.frozen_kv_mtp_utils import select_last_extend_hidden

    batches_with(
        capture_hidden_mode=CaptureHiddenMode.FULL,
        spec_algorithm=SpeculativeAlgorithm.FROZEN_KV_MTP,
    )
    stock, fast = assert_fast(engine)
    batch = engine.schedule(TWO_PROMPTS)
    read = [select_last_extend_hidden(batch, seen.output.hidden_states) for seen in (stock, fast)]
    assert read[0].shape == (len(TWO_PROMPTS), E2B_TINY.hidden_size)
    torch.testing.assert_close(read[1], read[0], atol=TOLERANCE, rtol=1e-4)


@pytest.fixture
def capturing(engine: Engine) -> Iterator[Any]:
    """The served model, with whatever layers a test makes it capture."""
    model = engine.runner.model
    before = engine.text_model.layers_to_capture, model.capture_aux_hidden_states
    yield model
    engine.text_model.layers_to_capture, model.capture_aux_hidden_states = before


CAPTURES: dict[str, Callable[[Any], None]] = {
    "EAGLE3's choice": lambda model: model.set_eagle3_layers_to_capture(),
    "EAGLE3, one in the tail": lambda model: model.set_eagle3_layers_to_capture([0, FIRST_CUT + 1]),
    "DFlash, the last donor": lambda model: model.set_dflash_layers_to_capture([FIRST_CUT - 1]),
    "DFlash, the last layer": lambda model: model.set_dflash_layers_to_capture([LAYERS - 1]),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_layers_captured_after_the_cut(
    engine: Engine, capturing: Any, batches_with: Callable[..., None], name: str
) -> None:
    CAPTURES[name](capturing)
    batches_with(capture_hidden_mode=CaptureHiddenMode.FULL)
    refused = assert_stock(engine, gate.CAPTURE_IN_TAIL)
    count = len(engine.text_model.layers_to_capture)
    assert refused.output.hidden_states.shape == (ROWS_IN_ALL, count * E2B_TINY.hidden_size)


def test_layers_captured_before_the_cut(
    engine: Engine, capturing: Any, batches_with: Callable[..., None]
) -> None:
    """Captures of the front are all rows' as always, so a reader of last rows may have them."""
    capturing.set_eagle3_layers_to_capture([0, 1])
    batches_with(capture_hidden_mode=CaptureHiddenMode.LAST)
    stock, fast = assert_fast(engine)
    assert stock.output.hidden_states.shape == (len(TWO_PROMPTS), 2 * E2B_TINY.hidden_size)
    assert torch.equal(stock.output.hidden_states, fast.output.hidden_states)


DRAFTS = {"speculative_algorithm": "FROZEN_KV_MTP"}
NO_CHUNKS = {"chunked_prefill_size": -1, "disable_overlap_schedule": True}
LORA_SHAPE = {"max_lora_rank": 8, "lora_target_modules": ["q_proj"]}
TP, DP = {"tp_size": 2}, {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
MACHINES = {**TP, "nnodes": 2, "dist_init_addr": "127.0.0.1:5000"}
DRAFTS_BESIDE_ROLES = f"{gate.SPECULATIVE} beside prefill-decode disaggregation"

# What is refused, with what SGLang requires for it. Several ranks forward in ``test_ranks`` and
# ``test_parallel``.
SERVERS: list[tuple[dict[str, Any], str | None]] = [
    ({"enable_deterministic_inference": True}, "deterministic inference"),
    ({"enable_dense_mlp_attn_tp": True}, "data-parallel attention"),
    ({"moe_dense_tp_size": 1}, "data-parallel attention"),
    ({"enable_attn_tp_input_scattered": True}, "sequence parallelism"),
    ({"disable_attn_tp_gather": True}, "sequence parallelism"),
    ({"enable_prefill_cp": True, "cp_strategy": "zigzag"}, "context parallelism"),
    ({"elastic_ep_backend": "mooncake"}, "expert parallelism"),
    ({"enable_two_batch_overlap": True, "moe_a2a_backend": "deepep"}, "two-batch overlap"),
    ({"enable_single_batch_overlap": True}, "single-batch overlap"),
    ({"enable_pdmux": True, **NO_CHUNKS}, "PD multiplexing"),
    ({"forward_hooks": [{"name": "a"}]}, "forward hooks, which may read any row"),
    ({"enable_lora": True, **LORA_SHAPE}, gate.LORA),
    ({"lora_paths": ["name=path"]}, gate.LORA),
    ({"enable_return_hidden_states": True}, gate.HIDDEN_STATES),
    (
        {**DRAFTS, "enable_return_hidden_states": True},
        f"{gate.HIDDEN_STATES}, beside speculative decoding",
    ),
    ({**DRAFTS, "disaggregation_mode": "decode"}, DRAFTS_BESIDE_ROLES),
    ({**DRAFTS, "disaggregation_mode": "prefill"}, DRAFTS_BESIDE_ROLES),
    (DP, "data-parallel attention"),
    ({**DP, "enable_dp_lm_head": True}, "data-parallel attention"),
    ({**TP, "attn_cp_size": 2}, "context parallelism"),
    ({**TP, "dcp_size": 2}, "context parallelism"),
    ({**TP, "ep_size": 2}, "expert parallelism"),
    (MACHINES, "ranks on several machines"),
    ({**TP, "pp_size": 2}, "pipeline parallelism (--pp-size) is not supported"),
    # These refuse nothing.
    (TP, None),
    ({**DRAFTS, **TP}, None),
    ({"disaggregation_mode": "prefill"}, None),
    ({"offload_group_size": 0}, None),
    ({"enable_return_hidden_states": True, "return_hidden_states_mode": "last"}, None),
]


@pytest.mark.parametrize(("arguments", "reason"), SERVERS)
def test_refused_servers(
    engine: Engine,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    reason: str | None,
) -> None:
    """The arguments come to the package by SGLang's own resolution and publication."""
    # The platform deals out cores to several ranks, which engines of one rank must not find.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")
    drafts = arguments.items() >= DRAFTS.items()  # any model does as long as none is loaded
    draft = {"speculative_draft_model_path": str(tiny_checkpoint)} if drafts else {}
    args = server_args(model_path=str(tiny_checkpoint), device="cpu", **arguments, **draft)
    with releases.serving(args):
        assert start.model_reason(engine.text_model) == reason


def test_a_refused_server_logs_why_and_plans_nothing(
    engine: Engine, restarted: Callable[..., None], said: Callable[..., list[str]]
) -> None:
    restarted(enable_deterministic_inference=True)
    reason = "deterministic inference"
    assert said() == [f"Gemma 4 fast prefill falls back to stock for this server: {reason}"]
    assert start.of(engine.text_model).attention is None
    assert_stock(engine, reason)
    restarted()
    assert_fast(engine)


@pytest.mark.skipif(
    not limits.judged_arguments() <= installed(),
    reason="a release newer than 0.5.23 has what 0.5.23 has",
)
def test_a_renamed_name_is_logged_when_the_server_starts(
    engine: Engine,
    restarted: Callable[..., None],
    said: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a newer release that has given an argument another name."""
    monkeypatch.setattr(compat, "LAST_TESTED", Version("0.5.16"))
    monkeypatch.setitem(limits.REFUSING_ARGUMENTS, "adapters", {"enable_adapters": 0})
    restarted()
    restarted()
    [line] = said()
    assert " lacks --enable-adapters, which may go by another name now" in line
    assert start.of(engine.text_model).attention is None
    assert_stock(engine, line.partition("server: ")[2])


def test_layers_whose_rows_may_depend_on_each_other(
    engine: Engine, restarted: Callable[..., None], said: Callable[..., list[str]]
) -> None:
    reason = "rows of Doubled may depend on each other"
    with halved_weights(engine.text_model.layers[-1].mlp.down_proj):
        restarted()
        [line] = said()
        assert line == f"Gemma 4 fast prefill falls back to stock for this server: {reason}"
        assert_stock(engine, reason)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_input_embeddings_are_refused_by_the_model_itself(
    engine: Engine, batches_with: Callable[..., None], switch: str
) -> None:
    """SGLang's Gemma 4 takes token ids or embeddings, and is given both: on and off it raises."""
    batch = engine.schedule(TWO_PROMPTS)
    batches_with(input_embeds=torch.zeros(ROWS_IN_ALL, E2B_TINY.hidden_size))
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        run(engine, batch, switch)
    assert log.forwards[log.TAIL_EAGER] == 0
    batches_with(input_embeds=None)
    assert_fast(engine)


def test_diffusion_has_a_text_model_of_its_own() -> None:
    """Block diffusion never comes through the patched class.

    That is what SGLang's classes say; no diffusion model runs here.
    """
    gemma4_diffusion = pytest.importorskip("sglang.srt.models.gemma4_diffusion")  # 0.5.20
    classes = [c for _, c in inspect.getmembers(gemma4_diffusion, inspect.isclass)]
    assert any(c.__module__ == gemma4_diffusion.__name__ for c in classes)
    assert not any(issubclass(c, Gemma4TextModel) for c in classes)
