"""Gemma 3n with the fast path on, off, and in Hugging Face, on SGLang's own classes.

Of 15 layers the last 5 are KV-shared, so the cut is in layer 9. Stock's window has one key more
than Hugging Face's: the oracle is given a window that is one key larger.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.models.gemma3n_causal import Gemma3nForCausalLM
from sglang.srt.models.gemma3n_mm import Gemma3nForConditionalGeneration
from transformers import Gemma3nForCausalLM as HuggingFaceModel

from harness.batches import BATCHES, batch_of
from harness.checking import (
    assert_audited,
    assert_keys_have_their_scale,
    checked,
    find_defect,
)
from harness.decode_graphs import assert_tail_is_replayed
from harness.fixtures import Change
from harness.forwards import CHUNKS, ENGINE, assert_fast, assert_stock
from harness.observe import assert_same_cache, run
from harness.random_batches import KINDS, assert_cut
from harness.stand_ins import prefill_graphs
from sglang_gemma4_reference import gemma3n as reference
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco.admission import runner_parts
from sglang_gemma4_yoco.compat import backends
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.core.model import OTHER_END, NotCuttableError
from sglang_gemma4_yoco.models import gemma3n, gemma4
from sglang_gemma4_yoco.startup import graphs_captured

pytestmark = pytest.mark.usefixtures("forgotten_reports")

SHAPE = reference.E2B_TINY
WINDOW = SHAPE.sliding_window
CUT = SHAPE.layers - SHAPE.kv_shared_layers - 1
LAST_ROWS = {
    "half a window": batch_of((0, WINDOW // 2)),
    "a window": batch_of((0, WINDOW)),
    "three windows": batch_of((0, 3 * WINDOW + 5)),
    "behind a prefix": batch_of((2 * WINDOW, 9)),
    "one row behind a prefix": batch_of((2 * WINDOW, 1), (0, 5)),
    "three prompts": batch_of((0, 2 * WINDOW), (3, 5), (WINDOW + 3, WINDOW + 7)),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.write_checkpoint(tmp_path_factory.mktemp("gemma3n"), SHAPE)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return Engine(checkpoint, **ENGINE)


@pytest.mark.parametrize("name", KINDS)
def test_random_batches(engine: Engine, name: str) -> None:
    assert type(engine.runner.model) is Gemma3nForCausalLM
    assert_cut(engine, name, longest=200, most=5, examples=5)


@pytest.mark.parametrize("name", LAST_ROWS)
def test_last_rows_are_those_of_hugging_face(engine: Engine, oracle: Any, name: str) -> None:
    prompts = LAST_ROWS[name]
    _, fast = assert_fast(engine, prompts)
    found = fast.output.next_token_logits
    errors = {}
    for keys in (WINDOW, WINDOW + 1):
        expected = torch.stack([hugging_face(oracle, keys, prompt) for prompt in prompts])
        errors[keys] = float((found - expected).abs().max())
    assert errors[WINDOW + 1] < 1e-4, errors
    if "window" not in name or name == "three windows":  # it sees that one key
        assert errors[WINDOW] > 1e-2, errors


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return HuggingFaceModel.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def hugging_face(model: Any, keys: int, prompt: Prompt) -> torch.Tensor:
    """Return the logits after the prompt, with a window of ``keys`` keys: [vocab]."""
    model.config.sliding_window = model.model.config.sliding_window = keys
    ids = torch.tensor([prompt.cached + prompt.new])
    logits: torch.Tensor = model(ids, use_cache=False).logits[0, -1]
    return logits


def test_images_run_as_stock(engine: Engine, batches_with: Change) -> None:
    """Image prompts are untested on the fast path, so they run as stock."""
    batches_with(mm_inputs=[SimpleNamespace(mm_items=[]), None])
    assert_stock(engine, eligibility.MEDIA)


# ---------------------------------------------------------------- the self-check, and audits


def test_it_finds_other_keys_and_values(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the stream itself, not of the donor's prediction."""

    def compute(layer: Any, rows: torch.Tensor, positions: torch.Tensor) -> Any:
        normed = layer.input_layernorm(rows[:, 0])
        return gemma4.project_keys_and_values(layer.self_attn, normed, positions)

    monkeypatch.setattr(gemma3n, "compute_keys_and_values", compute)
    assert find_defect(engine).startswith(("keys of layer 9", "values of layer 9"))


def test_it_finds_streams_in_another_order(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = gemma3n.run_tail

    def run_tail(model: Any, layers: Any, batch: Any, rows: torch.Tensor, *others: Any) -> Any:
        return stock(model, layers, batch, rows.flip(1), *others)

    monkeypatch.setattr(gemma3n, "run_tail", run_tail)
    assert find_defect(engine) == f"output of layer {CUT - 1}"


def test_keys_have_their_scale(engine: Engine) -> None:
    assert_keys_have_their_scale(engine)


def test_audits(engine: Engine) -> None:
    assert_audited(engine, BATCHES["three, two of them cached"], CUT)


# ---------------------------------------------------------------- unknown models


def test_another_layer_loop() -> None:
    """The model merges something other than the tensor that its layers have returned."""
    streams = torch.arange(12.0).view(4, 3, 1)

    def layer(hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + 1

    for calls in (0, 1, 2):
        model = SimpleNamespace(layers=[layer] * 3, norm=SimpleNamespace())
        with gemma3n.stop_before_cut(model, 2, partial) as at_cut:
            for _ in range(calls):
                assert model.layers[-1](hidden_states=streams).shape == (4, 1, 1)
            if calls == 1:
                assert torch.equal(model.norm.forward(streams), streams[0] + 1)
            else:
                with pytest.raises(NotCuttableError, match=OTHER_END):
                    model.norm.forward(streams)
        assert [rows.shape for rows in at_cut] == [(3, 4, 1)] * (calls == 1)
        assert model.layers == [layer] * 3


def test_flashinfer() -> None:
    """It cannot run here."""
    module, _, name = backends.FLASHINFER.rpartition(".")
    kind = type(name, (), {"__module__": module})
    assert (
        runner_parts.find_backend_reason(kind(), gemma3n.ATTENTION_BACKENDS)
        == backends.FLASHINFER_DIFFERS
    )


def test_no_exit_is_noted_in_captured_prefills(engine: Engine) -> None:
    """Exits of these models are untested: their captured prefills run to their end."""
    with (
        prefill_graphs(Backend.BREAKABLE),
        graphs_captured.prepare_capture(engine.runner, engine.text_model),
    ):
        assert "forward" not in vars(engine.text_model.layers[CUT])
    graphs_captured.set_up(engine.runner, engine.text_model)
    assert_fast(engine)


# ---------------------------------------------------------------- engines of their own


def test_inside_the_multimodal_model(tmp_path: Path) -> None:
    engine = Engine(reference.write_checkpoint(tmp_path, SHAPE, multimodal=True), **ENGINE)
    assert type(engine.runner.model) is Gemma3nForConditionalGeneration
    for prompts in (*BATCHES.values(), CHUNKS):
        assert_fast(engine, prompts)


def test_another_stream_is_the_active_one(checkpoint: Path, tmp_path: Path) -> None:
    """Layers read the active stream, which in the published models is the first."""
    path = Path(shutil.copytree(checkpoint, tmp_path / "second"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"altup_active_idx": 1}))
    engine = Engine(path, **ENGINE)
    for prompts in (*BATCHES.values(), CHUNKS):
        assert_fast(engine, prompts)


def test_in_bf16_with_sharp_attention(tmp_path: Path) -> None:
    """On and off agree on weights that are not made to be well-conditioned."""
    sharp = dataclasses.replace(SHAPE, sharpness=SHAPE.head_dim**0.25)
    path = reference.write_checkpoint(tmp_path, sharp)
    engine = Engine(path, **ENGINE | {"dtype": "bfloat16"})
    found = checked(engine)
    assert found.worst is not None
    assert found.worst.is_rounding, found
    prompts = BATCHES["three, two of them cached"]
    scheduled = engine.schedule(prompts)
    stock, fast = run(engine, scheduled, "0"), run(engine, scheduled, "1")
    assert (stock.rows[CUT], fast.rows[CUT]) == (48, 3)
    assert_same_cache(stock, fast)


def test_a_captured_tail(checkpoint: Path) -> None:
    assert_tail_is_replayed(checkpoint)
