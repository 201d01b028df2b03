"""Modes in which the fast path steps aside, on SGLang's ModelRunner: stock, bit for bit.

``test_gate.py`` has the whole table of refusals. Here those that change what a forward does run
through SGLang, each followed by an ordinary forward that is cut again.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.models import gemma4_diffusion
from sglang.srt.models.gemma4_causal import Gemma4TextModel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from observe import Observed, assert_same_answers, assert_same_cache, run
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import cut, gate, report

LENGTHS = (40, 3)
LAYERS = E2B_TINY.layers
FIRST_CUT = LAYERS - E2B_TINY.kv_shared_layers - 1

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def scheduled(engine: Engine, *, logprobs: bool = False) -> Any:
    """Two prompts; with ``logprobs`` of their last tokens."""
    draw = random.Random(0)
    prompts = [
        Prompt(
            (),
            tuple(draw.randrange(20, 500) for _ in range(n)),
            logprob_start=n - 1 if logprobs else -1,
        )
        for n in LENGTHS
    ]
    return engine.schedule(prompts)


def assert_stock(engine: Engine, reason: str) -> Observed:
    """The switch makes no difference to anything that is computed, and the reason is counted."""
    batch = scheduled(engine)
    stock, refused = run(engine, batch, "0"), run(engine, batch, "1")
    assert refused.rows == stock.rows == [sum(LENGTHS)] * LAYERS
    assert report.forwards[reason] == 1
    assert report.forwards[report.ACTIVE] == 0
    assert_same_cache(stock, refused)
    assert_same_answers(stock, refused, 0.0)
    assert stock.hidden is not None
    assert refused.hidden is not None
    assert torch.equal(stock.hidden, refused.hidden)
    captured = stock.output.hidden_states
    if captured is not None:
        assert torch.equal(captured, refused.output.hidden_states)
    return refused


def assert_fast(engine: Engine) -> tuple[Observed, Observed]:
    batch = scheduled(engine)
    stock, fast = run(engine, batch, "0"), run(engine, batch, "1")
    kept = [sum(LENGTHS)] * FIRST_CUT + [len(LENGTHS)] * (LAYERS - FIRST_CUT)
    assert fast.rows == kept
    assert report.forwards[report.ACTIVE] == 1
    assert_same_cache(stock, fast)
    assert_same_answers(stock, fast, 5e-5)
    return stock, fast


@pytest.fixture
def batches_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have SGLang make its forward batches with these fields from here on."""
    make = ForwardBatch.init_new

    def change(**fields: Any) -> None:
        @functools.wraps(make)
        def init_new(*args: Any, **kwargs: Any) -> Any:
            batch = make(*args, **kwargs)
            for name, value in fields.items():
                assert hasattr(batch, name)
                setattr(batch, name, value)
            return batch

        monkeypatch.setattr(ForwardBatch, "init_new", init_new)

    return change


ROWS = [torch.tensor([1, 5]), torch.tensor([0])]  # of each request, what a readout wants

FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("hidden states", {"capture_hidden_mode": CaptureHiddenMode.FULL}, gate.HIDDEN_STATES),
    (
        "hidden states of EAGLE",
        {
            "capture_hidden_mode": CaptureHiddenMode.FULL,
            "spec_algorithm": SpeculativeAlgorithm.EAGLE,
        },
        gate.SPECULATIVE,
    ),
    (
        "hidden states of DFlash",
        {
            "capture_hidden_mode": CaptureHiddenMode.FULL,
            "spec_algorithm": SpeculativeAlgorithm.DFLASH,
        },
        gate.SPECULATIVE,
    ),
    ("pooled hidden states", {"return_pooled_hidden_states": True}, "pooled hidden states"),
    ("matryoshka embeddings", {"dimensions": [8, 8]}, gate.EMBEDDINGS),
    ("a LoRA row", {"lora_ids": [None, "adapter"]}, gate.LORA),
    ("a split batch", {"tbo_split_seq_index": 1}, "two-batch overlap"),
    ("token types", {"token_type_ids": torch.zeros(43, dtype=torch.int64)}, "token type ids"),
]


@pytest.mark.parametrize(
    ("fields", "reason"), [row[1:] for row in FIELDS], ids=[r[0] for r in FIELDS]
)
def test_refused_batches(
    engine: Engine, batches_with: Callable[..., None], fields: dict[str, Any], reason: str
) -> None:
    batches_with(**fields)
    assert_stock(engine, reason)


READOUTS = {
    "multi_item_delimiter_indices": "multi-item scoring",
    "token_indices_to_pool": "setwise pooling",
}


@pytest.mark.parametrize("field", READOUTS)
def test_readouts_in_the_middle_of_a_prompt(
    engine: Engine, batches_with: Callable[..., None], field: str
) -> None:
    """Multi-item and setwise scoring read rows that the tail would not compute."""
    batch = scheduled(engine, logprobs=True)
    batches_with(**{field: ROWS}, is_prefill_only=True)
    outputs = []
    for switch in ("0", "1"):
        seen = run(engine, batch, switch)
        assert seen.rows == [sum(LENGTHS)] * LAYERS
        outputs.append(seen.output.input_token_ids_logprobs_val)
    assert report.forwards[READOUTS[field]] == 1
    assert len(outputs[0]) > 0
    for stock, refused in zip(*outputs, strict=True):
        assert torch.equal(torch.as_tensor(stock), torch.as_tensor(refused))


@pytest.mark.parametrize("prefill_only", [False, True])
def test_last_hidden_states(
    engine: Engine, batches_with: Callable[..., None], prefill_only: bool
) -> None:
    """A capture of the last rows alone is served from the kept ones."""
    batches_with(capture_hidden_mode=CaptureHiddenMode.LAST, is_prefill_only=prefill_only)
    stock, fast = assert_fast(engine)
    assert stock.output.hidden_states.shape == (len(LENGTHS), E2B_TINY.hidden_size)
    torch.testing.assert_close(
        fast.output.hidden_states, stock.output.hidden_states, atol=5e-5, rtol=1e-4
    )


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
    batch = scheduled(engine)
    read = [select_last_extend_hidden(batch, seen.output.hidden_states) for seen in (stock, fast)]
    assert read[0].shape == (len(LENGTHS), E2B_TINY.hidden_size)
    torch.testing.assert_close(read[1], read[0], atol=5e-5, rtol=1e-4)


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
def test_layers_captured_behind_the_cut(
    engine: Engine, capturing: Any, batches_with: Callable[..., None], name: str
) -> None:
    CAPTURES[name](capturing)
    batches_with(capture_hidden_mode=CaptureHiddenMode.FULL)
    refused = assert_stock(engine, gate.CAPTURE_IN_TAIL)
    count = len(engine.text_model.layers_to_capture)
    assert refused.output.hidden_states.shape == (sum(LENGTHS), count * E2B_TINY.hidden_size)


def test_layers_captured_before_the_cut(
    engine: Engine, capturing: Any, batches_with: Callable[..., None]
) -> None:
    """Captures of the front are all rows' as always, so a reader of last rows may have them."""
    capturing.set_eagle3_layers_to_capture([0, 1])
    batches_with(capture_hidden_mode=CaptureHiddenMode.LAST)
    stock, fast = assert_fast(engine)
    assert stock.output.hidden_states.shape == (len(LENGTHS), 2 * E2B_TINY.hidden_size)
    assert torch.equal(stock.output.hidden_states, fast.output.hidden_states)


SERVERS: list[tuple[dict[str, Any], str]] = [
    ({"enable_deterministic_inference": True}, "deterministic inference"),
    ({"enable_dp_attention": True}, "data-parallel attention"),
    ({"enable_two_batch_overlap": True}, "two-batch overlap"),
    ({"enable_pdmux": True}, "PD multiplexing"),
    ({"enable_lora": True}, gate.LORA),
    ({"attn_cp_size": 2}, "context parallelism"),
    ({"dcp_size": 2}, "context parallelism"),
    ({"speculative_algorithm": "EAGLE"}, gate.SPECULATIVE),
    ({"speculative_algorithm": "EAGLE3"}, gate.SPECULATIVE),
    ({"speculative_algorithm": "DFLASH"}, gate.SPECULATIVE),
    (
        {"speculative_algorithm": "FROZEN_KV_MTP", "enable_return_hidden_states": True},
        f"{gate.HIDDEN_STATES}, beside speculative decoding",
    ),
    ({"disaggregation_mode": "decode"}, "prefill-decode disaggregation"),
    ({"disaggregation_mode": "prefill"}, "prefill-decode disaggregation"),
]


@pytest.mark.parametrize(("arguments", "reason"), SERVERS)
def test_refused_servers(
    engine: Engine,
    restarted: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any],
    reason: str,
) -> None:
    """The reason is said when the server starts, and nothing is planned for a tail."""
    with caplog.at_level("INFO", "sglang_gemma4_yoco"):
        restarted(**arguments)
    assert caplog.messages == [f"Gemma 4 fast prefill steps aside for this server: {reason}"]
    assert cut.tail_attention(engine.text_model) is None
    assert_stock(engine, reason)


def test_an_embedding_server_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, restarted: Callable[..., None]
) -> None:
    with monkeypatch.context() as served:
        served.setattr(engine.runner, "is_generation", False)
        engine.runner.init_attention_backends()
    assert_stock(engine, gate.EMBEDDINGS)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_input_embeddings_are_refused_by_the_model_itself(
    engine: Engine, batches_with: Callable[..., None], switch: str
) -> None:
    """SGLang's Gemma 4 takes token ids or embeddings, and is given both: on and off it raises."""
    batch = scheduled(engine)
    batches_with(input_embeds=torch.zeros(sum(LENGTHS), E2B_TINY.hidden_size))
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        run(engine, batch, switch)
    assert report.forwards[report.ACTIVE] == 0
    batches_with(input_embeds=None)
    assert_fast(engine)


def test_diffusion_has_a_text_model_of_its_own() -> None:
    """Block diffusion never comes through the patched class."""
    classes = [c for _, c in inspect.getmembers(gemma4_diffusion, inspect.isclass)]
    assert any(c.__module__ == gemma4_diffusion.__name__ for c in classes)
    assert not any(issubclass(c, Gemma4TextModel) for c in classes)
