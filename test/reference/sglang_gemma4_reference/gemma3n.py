"""Small random Gemma 3n checkpoints, of the text model alone or inside the multimodal one."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    Gemma3nAudioFeatureExtractor,
    Gemma3nConfig,
    Gemma3nForCausalLM,
    Gemma3nProcessor,
    Gemma3nTextConfig,
    SiglipImageProcessor,
)

from sglang_gemma4_reference import checkpoint
from sglang_gemma4_reference.checkpoint import CHAT_TEMPLATE, build_tokenizer


@dataclass(frozen=True)
class Gemma3nShape:
    """Everything that determines a checkpoint's content. Every fifth layer has no window."""

    layers: int
    kv_shared_layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    sliding_window: int
    """Keys that a row of a layer with a window sees in Hugging Face's model, its own included."""
    ple_width: int
    laurel_rank: int
    vocab_size: int
    sparse_layers: int
    """Number of first layers whose FFNs keep one activation in twenty."""
    seed: int = 0
    sharpness: float = 1.0
    """Multiplies the weights of q_norm and k_norm; with 1 attention is smooth."""


# Only the widths are smaller. The real models have hidden size 2048, 8 heads of 256, FFNs of 8192
# and 16384, per-layer inputs of 256, and LAuReL of rank 64.
E2B_MINI = Gemma3nShape(
    layers=30,
    kv_shared_layers=10,
    hidden_size=512,
    heads=8,
    kv_heads=2,
    head_dim=64,
    intermediate_size=2048,
    sliding_window=512,
    ple_width=64,
    laurel_rank=16,
    vocab_size=4096,
    sparse_layers=10,
)
E4B_MINI = dataclasses.replace(E2B_MINI, layers=35, kv_shared_layers=15, intermediate_size=4096)
E2B_TINY = Gemma3nShape(
    layers=15,
    kv_shared_layers=5,
    hidden_size=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    sliding_window=32,
    ple_width=16,
    laurel_rank=8,
    vocab_size=512,
    sparse_layers=4,
)
#: For Triton's interpreter: fewer layers and heads, and a window shorter than most prompts.
INTERPRETED = dataclasses.replace(
    E2B_TINY, layers=10, kv_shared_layers=5, heads=2, kv_heads=1, sliding_window=8, sparse_layers=2
)
PRESETS = {"E2B_MINI": E2B_MINI, "E4B_MINI": E4B_MINI, "E2B_TINY": E2B_TINY}


def text_config(shape: Gemma3nShape) -> Gemma3nTextConfig:
    """Return Hugging Face's config of the text model."""
    dense = shape.layers - shape.sparse_layers
    return Gemma3nTextConfig(
        vocab_size=shape.vocab_size,
        vocab_size_per_layer_input=shape.vocab_size,
        hidden_size=shape.hidden_size,
        hidden_size_per_layer_input=shape.ple_width,
        intermediate_size=[shape.intermediate_size] * shape.layers,
        num_hidden_layers=shape.layers,
        num_kv_shared_layers=shape.kv_shared_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        sliding_window=shape.sliding_window,
        laurel_rank=shape.laurel_rank,
        layer_types=([*["sliding_attention"] * 4, "full_attention"]) * (shape.layers // 5),
        activation_sparsity_pattern=[0.95] * shape.sparse_layers + [0.0] * dense,
        max_position_embeddings=32768,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )


def build_model(shape: Gemma3nShape) -> Gemma3nForCausalLM:
    """Return a model in fp32 with random weights whose answers depend on the whole prompt."""
    torch.manual_seed(shape.seed)
    model = Gemma3nForCausalLM(text_config(shape)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            randomise(name, weight)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight *= shape.sharpness
    return model


#: End of a matrix's name -> factor of its scale; 1 keeps its input's scale.
_MATRICES = {
    "embed_tokens.weight": 0.4,
    # So that streams are mixed, and one token's coefficients differ from another's.
    "modality_router.weight": 0.7,
    "prediction_coefs.weight": 0.2,
    "correction_coefs.weight": 0.4,
}


def randomise(name: str, weight: nn.Parameter) -> None:
    """Fill one parameter so that values keep a scale of about 1 on their way through the model."""
    if weight.dim() > 1:
        scale = weight[0].numel() ** -0.5
        if name.endswith("modality_router.weight"):
            scale = weight.shape[1] ** 0.5  # its input is divided by the width
        for ending, factor in _MATRICES.items():
            if name.endswith(ending):
                scale *= factor
        weight.normal_(std=scale)
        return
    checkpoint.randomise(f"model.language_model.{name.removeprefix('model.')}", weight)


def build_processor(shape: Gemma3nShape) -> Gemma3nProcessor:
    """Return the processor that a server of the multimodal model loads, also for text alone."""
    return Gemma3nProcessor(
        feature_extractor=Gemma3nAudioFeatureExtractor(),
        image_processor=SiglipImageProcessor(size={"height": 32, "width": 32}),
        tokenizer=build_tokenizer(shape.vocab_size),
        chat_template=CHAT_TEMPLATE,
    )


def write_config(path: Path, shape: Gemma3nShape, *, multimodal: bool = False) -> None:
    """Write config, tokenizer and processor to this directory, which is made if need be.

    The towers of a multimodal model are the smallest ones.
    """
    path.mkdir(parents=True, exist_ok=True)
    config, architecture = text_config(shape).to_dict(), "Gemma3nForCausalLM"
    build_tokenizer(shape.vocab_size).save_pretrained(path)
    if multimodal:
        towers = Gemma3nConfig(
            text_config=config,
            vision_config={"architecture": "test_resnet", "hidden_size": 64, "vocab_size": 16},
            audio_config={"hidden_size": 64, "vocab_size": 16, "conf_num_hidden_layers": 1},
            tie_word_embeddings=True,
        )
        config, architecture = towers.to_dict(), "Gemma3nForConditionalGeneration"
        build_processor(shape).save_pretrained(path)
    config["architectures"] = [architecture]
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_checkpoint(path: str | Path, shape: Gemma3nShape, *, multimodal: bool = False) -> Path:
    """Write a checkpoint to the directory ``path``, made if need be, and return it.

    The same weights of the text model are in both kinds; a multimodal one has none for its towers.
    """
    path = Path(path)
    prefix = "model."
    if multimodal:
        prefix = "model.language_model."
    weights = {}
    for name, weight in build_model(shape).named_parameters():
        weights[prefix + name.removeprefix("model.")] = weight.detach()
    write_config(path, shape, multimodal=multimodal)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
