"""The arithmetic of ceilings, against multiply-adds that real models are seen to do."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import truth
from batches import batch_of
from forwards import assert_fast
from observe import run
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco.commands.ceiling import FULL, LENGTHS, SLIDING, Arithmetic

LINEAR = ("mm", "addmm")


@pytest.fixture
def text_config(tiny_checkpoint: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((tiny_checkpoint / "config.json").read_text())
    return config["text_config"]  # type: ignore[no-any-return]


@pytest.fixture
def arithmetic(text_config: dict[str, Any]) -> Arithmetic:
    return Arithmetic.of(text_config, E2B_TINY.layers - E2B_TINY.kv_shared_layers)


def linear_alone(arithmetic: Arithmetic) -> Arithmetic:
    layers = [dataclasses.replace(layer, key=0) for layer in arithmetic.layers]
    return dataclasses.replace(arithmetic, layers=tuple(layers))


@pytest.mark.parametrize("tokens", [5, 70])
def test_linear_layers_of_sglangs_model(
    engine: Engine, arithmetic: Arithmetic, tokens: int
) -> None:
    """Every matrix product of a forward, stock and cut, but the vocabulary's."""
    prompt = batch_of((0, tokens))
    assert_fast(engine, prompt)
    counted = {}
    for switched in ("0", "1"):
        scheduled = engine.schedule(prompt)
        with FlopCounterMode(display=False) as counter:
            run(engine, scheduled, switched)
        by_operation = counter.get_flop_counts()["Global"]
        flops = sum(n for op, n in by_operation.items() if str(op).removeprefix("aten.") in LINEAR)
        counted[switched] = flops // 2 - E2B_TINY.hidden_size * E2B_TINY.vocab_size
    linear = linear_alone(arithmetic)
    assert counted == {"0": linear.stock(tokens), "1": linear.fast(tokens)}


@pytest.mark.parametrize("tokens", [5, 32, 70])
def test_keys_that_rows_attend_to(
    tiny_checkpoint: Path, arithmetic: Arithmetic, tokens: int
) -> None:
    """As Hugging Face's model masks them, of all rows and of the last."""
    counted: Counter[str] = Counter()

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **_: Any) -> tuple[Any, None]:
        seen = (mask == 0)[..., : k.shape[-2]]
        for rows, visible in (("all", seen), ("last", seen[..., -1:, :])):
            counted[rows] += 2 * q.shape[1] * q.shape[-1] * int(visible.sum())
            counted[f"{rows}, layer {module.layer_idx}"] += int(visible.sum())
        return torch.zeros_like(q).transpose(1, 2).contiguous(), None

    AttentionInterface.register("counted", attend)
    AttentionMaskInterface.register("counted", eager_mask)
    model = truth.load(tiny_checkpoint)
    model.set_attn_implementation("counted")
    with torch.no_grad():
        model.model.language_model(input_ids=torch.arange(20, 20 + tokens)[None])
    assert counted["all"] == sum(layer.attended(tokens) for layer in arithmetic.layers)
    assert counted["last"] == sum(layer.attended_by_the_last(tokens) for layer in arithmetic.layers)
    # Window layers see less than full ones, from a window on.
    assert (counted["all, layer 0"] < counted["all, layer 3"]) == (tokens > 32)


def test_the_published_models() -> None:
    """E2B's and E4B's ceilings by linear layers: 3.59 and 1.83, as counted by hand."""
    e2b: dict[str, Any] = {
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "use_double_wide_mlp": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
    }
    e4b = e2b | {
        "layer_types": ([SLIDING] * 5 + [FULL]) * 7,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "use_double_wide_mlp": False,
        "num_key_value_heads": 2,
    }
    for config, first_shared, ceiling in ((e2b, 15, 3.59), (e4b, 24, 1.83)):
        linear = linear_alone(Arithmetic.of(config, first_shared))
        assert round(linear.ceiling(10**6), 2) == ceiling
        assert linear.ceiling(128) < ceiling
    # Full layers weigh more the longer the prompt: of E4B's 7 the fast path has 3.
    long = [Arithmetic.of(e4b, 24).ceiling(tokens) for tokens in LENGTHS]
    assert long == sorted(long)
    assert long[-1] > 1.9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_head_dim": None}, "no global_head_dim"),
        ({"enable_moe_block": True}, "experts are not counted"),
        ({"layer_types": ["linear_attention"]}, "linear_attention are not counted"),
    ],
)
def test_what_is_not_known_is_not_counted(
    text_config: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    config = {name: value for name, value in (text_config | change).items() if value is not None}
    with pytest.raises(ValueError, match=words):
        Arithmetic.of(config, 4)
