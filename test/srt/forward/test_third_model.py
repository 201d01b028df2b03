"""A third model, added by one file and one entry: ``harness.third_yoco``, registered here.

Of 6 layers the last 3 are KV-shared, so the cut is in layer 2. Nothing else in the package, and
nothing in SGLang, knows this model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.plugins import load_plugins

from harness import third_model, third_yoco
from harness.batches import BATCHES
from harness.checking import assert_audited, checked
from harness.decode_graphs import assert_tail_is_replayed
from harness.forwards import ENGINE
from harness.random_batches import KINDS, assert_cut
from sglang_gemma4_reference.checkpoint import build_tokenizer
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import settings
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.startup import patch

pytestmark = pytest.mark.usefixtures("forgotten_reports")

CUT = 2
CONFIG = {
    "architectures": ["ThirdForCausalLM"],
    "model_type": "llama",  # whose config transformers knows
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("third")
    build_tokenizer(512).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"none": torch.zeros(1)}, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module", autouse=True)
def _known() -> Iterator[None]:
    """Register the model in SGLang and in the package, and wrap its forward as loading does.

    Its code is third-party code, so a setting trusts it.
    """
    load_plugins()
    model: Any = third_model.ThirdTextModel
    trusting = settings.changed(trust=(third_model.__name__,))
    with pytest.MonkeyPatch.context() as registered, trusting:
        registered.setitem(ModelRegistry.models, "ThirdForCausalLM", third_model.ThirdForCausalLM)
        registered.setattr(registry, "MODELS", [*registry.MODELS, third_yoco])
        registered.setattr(model, "forward", patch.wrap_forward(model))
        yield


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    engine = Engine(checkpoint, text_model=third_model.ThirdTextModel, **ENGINE)
    check = checked(engine)
    assert check.agrees, check  # the first place that names a mistake in the model's file
    return engine


@pytest.mark.parametrize("name", KINDS)
def test_random_batches(engine: Engine, name: str) -> None:
    assert_cut(engine, name, longest=200, most=5, examples=5)


def test_audits(engine: Engine) -> None:
    """Embeddings are scaled in place, so stock must start from the original ones."""
    assert_audited(engine, BATCHES["three, two of them cached"], CUT)


def test_a_captured_tail(checkpoint: Path) -> None:
    assert_tail_is_replayed(checkpoint, text_model=third_model.ThirdTextModel)
