"""Small random Gemma 4 checkpoints, complete enough to be served.

``python -m sglang_gemma4_reference.checkpoint E2B_TINY /tmp/tiny`` writes one. Its weights are
well-conditioned, see ``scale``; those of ``E2B_TINY_SHARP`` are not.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    PreTrainedTokenizerFast,
)

# In the order of their token ids, from 0.
_SPECIAL_TOKENS = {
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "bos_token": "<bos>",
    "unk_token": "<unk>",
    "sot_token": "<|turn>",
    "eot_token": "<turn|>",
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "video_token": "<|video|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
_TOKEN_ID = {name: token_id for token_id, name in enumerate(_SPECIAL_TOKENS)}

# Turns as in Gemma 4. The processor replaces the one token for an image or audio by as many as
# the encoder returns rows.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- else -%}
{{- '<|' + part['type'].removesuffix('_url') + '|>' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<turn|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|turn>model\n' -}}
{%- endif -%}
"""


@dataclass(frozen=True)
class Tower:
    """Dimensions of a vision or audio encoder."""

    hidden_size: int
    layers: int
    heads: int


@dataclass(frozen=True)
class Gemma4Shape:
    """Everything that determines a checkpoint's content.

    The last ``kv_shared_layers`` layers share earlier layers' K/V. Layers come in groups of
    ``sliding_per_full`` sliding-window layers and one full-attention layer.
    """

    hidden_size: int
    layers: int
    kv_shared_layers: int
    sliding_per_full: int
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a head in sliding-window layers."""
    global_head_dim: int
    """Width of a head in full-attention layers."""
    intermediate_size: int
    double_wide_mlp: bool
    """The MLP of KV-shared layers is twice as wide."""
    sliding_window: int
    """Keys that a row of a sliding-window layer sees, its own included."""
    ple_width: int
    """Per-layer embedding values per token and layer; 0 for none."""
    vocab_size: int
    max_positions: int
    vision: Tower
    audio: Tower | None
    image_tokens: int
    """At most this many tokens per image: 70, 140, 280, 560 or 1120."""
    dtype: str = "float32"
    seed: int = 0
    # These multiply what ``randomise`` draws; with 1 weights are well-conditioned, see ``scale``.
    sharpness: float = 1.0
    """Factor of the q_norm and k_norm weights in sliding-window layers."""
    global_sharpness: float | None = None
    """The same in full-attention layers; None for ``sharpness``."""
    post_norms: float = 1.0
    """Factor of the weights of norms after attention, FFN and per-layer input."""
    outliers: float = 1.0
    """Factor of some channels' weights, in every norm of a layer as wide as the residual."""
    outlier_share: float = 0.01
    """Share of these channels: the same ones in all layers, and at least one."""

    @property
    def layer_types(self) -> list[str]:
        """Return ``sliding_attention`` or ``full_attention`` for each layer."""
        group = ["sliding_attention"] * self.sliding_per_full + ["full_attention"]
        return (group * self.layers)[: self.layers]


E2B = Gemma4Shape(
    hidden_size=1536,
    layers=35,
    kv_shared_layers=20,
    sliding_per_full=4,
    heads=8,
    kv_heads=1,
    head_dim=256,
    global_head_dim=512,
    intermediate_size=6144,
    double_wide_mlp=True,
    sliding_window=512,
    ple_width=256,
    vocab_size=262144,
    max_positions=131072,
    vision=Tower(hidden_size=768, layers=16, heads=12),
    audio=Tower(hidden_size=1024, layers=12, heads=8),
    image_tokens=280,
    dtype="bfloat16",
)

#: The layers of E4B, and their sharing.
_LAYERS_OF_E4B: dict[str, Any] = {
    "layers": 42,
    "kv_shared_layers": 18,
    "sliding_per_full": 5,
    "kv_heads": 2,
    "double_wide_mlp": False,
}
E4B = dataclasses.replace(E2B, **_LAYERS_OF_E4B, hidden_size=2560, intermediate_size=10240)

_SMALL_TOWER = Tower(hidden_size=64, layers=2, heads=4)

# Widths are the real models' divided by 3 (E2B) and 5 (E4B), rounded to widths that kernels accept.
E2B_MINI = dataclasses.replace(
    E2B,
    hidden_size=512,
    head_dim=80,
    global_head_dim=160,
    intermediate_size=2048,
    ple_width=88,
    vocab_size=4096,
    max_positions=32768,
    vision=_SMALL_TOWER,
    audio=_SMALL_TOWER,
    image_tokens=70,
    dtype="float32",
)

E4B_MINI = dataclasses.replace(
    E2B_MINI, **_LAYERS_OF_E4B, head_dim=48, global_head_dim=96, ple_width=48
)

# The real models' layers and sharing, but so narrow that the host determines the time of a forward.
E2B_HOST = dataclasses.replace(
    E2B_MINI,
    hidden_size=64,
    heads=4,
    head_dim=16,
    global_head_dim=32,
    intermediate_size=128,
    sliding_window=32,
    ple_width=16,
    vocab_size=512,
    max_positions=8192,
)
E4B_HOST = dataclasses.replace(E2B_HOST, **_LAYERS_OF_E4B)
E2B_TINY = dataclasses.replace(E2B_HOST, layers=8, kv_shared_layers=4, sliding_per_full=3)

# As models are served: in bf16, and not well-conditioned, its heads, layers and channels as unequal
# as a trained model's may be. Of 64 channels 8 are outliers: a single one would use nearly all of
# bf16's precision, and a layer would see little more than its sign.
E2B_TINY_SHARP = dataclasses.replace(
    E2B_TINY,
    dtype="bfloat16",
    # These make the weights of q_norm and k_norm about 1.
    sharpness=E2B_TINY.head_dim**0.25,
    global_sharpness=E2B_TINY.global_head_dim**0.25,
    post_norms=2.0,
    outliers=50.0,
    outlier_share=1 / 8,
)

PRESETS = {name: shape for name, shape in globals().items() if isinstance(shape, Gemma4Shape)}


def config_dict(shape: Gemma4Shape) -> dict[str, Any]:
    """Return config.json's content, in the style of the official checkpoints."""
    text = {
        "model_type": "gemma4_text",
        "dtype": shape.dtype,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_kv_shared_layers": shape.kv_shared_layers,
        "layer_types": shape.layer_types,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "global_head_dim": shape.global_head_dim,
        "intermediate_size": shape.intermediate_size,
        "use_double_wide_mlp": shape.double_wide_mlp,
        "sliding_window": shape.sliding_window,
        "hidden_size_per_layer_input": shape.ple_width,
        "vocab_size_per_layer_input": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "pad_token_id": _TOKEN_ID["pad_token"],
        "eos_token_id": _TOKEN_ID["eos_token"],
        "bos_token_id": _TOKEN_ID["bos_token"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1_000_000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    }
    vision_head_dim = shape.vision.hidden_size // shape.vision.heads
    vision = {
        "model_type": "gemma4_vision",
        "dtype": shape.dtype,
        "hidden_size": shape.vision.hidden_size,
        "intermediate_size": 4 * shape.vision.hidden_size,
        "num_hidden_layers": shape.vision.layers,
        "num_attention_heads": shape.vision.heads,
        "num_key_value_heads": shape.vision.heads,
        "head_dim": vision_head_dim,
        "global_head_dim": vision_head_dim,
    }
    audio = shape.audio and {
        "model_type": "gemma4_audio",
        "dtype": shape.dtype,
        "hidden_size": shape.audio.hidden_size,
        "num_hidden_layers": shape.audio.layers,
        "num_attention_heads": shape.audio.heads,
        "output_proj_dims": 3 * shape.audio.hidden_size // 2,
    }
    return {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "dtype": shape.dtype,
        "text_config": text,
        "vision_config": vision,
        "audio_config": audio,
        "tie_word_embeddings": True,
        "eos_token_id": [_TOKEN_ID["eos_token"], _TOKEN_ID["eot_token"]],
        **{
            f"{kind}_token_id": _TOKEN_ID[f"{kind}_token"]
            for kind in ("image", "boi", "eoi", "video", "audio", "boa")
        },
        "eoa_token_index": _TOKEN_ID["eoa_token"],
    }


def build_model(shape: Gemma4Shape) -> Gemma4ForConditionalGeneration:
    """Return a model with random weights whose answers depend on all of the prompt."""
    torch.manual_seed(shape.seed)
    config = Gemma4Config.from_dict(config_dict(shape))
    model = Gemma4ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            randomise(name, weight)
        scale(model.model.language_model, shape)
    _give_shared_layers_projections(model.model.language_model)
    model.to(getattr(torch, shape.dtype))
    model.eval()
    return model


def scale(model: Any, shape: Gemma4Shape) -> None:
    """Scale the randomly drawn weights of a language model as its shape specifies.

    Random weights are made well-conditioned, as trained ones are not. ``E2B_TINY_SHARP`` leaves
    out the first three of these measures, which make the rounding of a layer small:

    - q_norm and k_norm are small. Gemma 4 does not divide scores by sqrt(head_dim): with weights of
      1 each head would attend to few keys, and a rounding that changes these changes its output.
    - A layer's output does not dominate the residual stream, so rounding errors do not multiply.
    - All channels are alike. Trained models have a few that are many times larger than the others.
      They make up most of a row's norm, and use most of bf16's precision.
    - The residual stream keeps its scale: a layer's output is multiplied by 0.9 to 1.
    - The embedding, which is the output layer too, is small: no token predicts itself. Those of
      special tokens are smaller still: no answer ends early, and none contains the placeholder of
      an image, which transformers and SGLang embed differently in an answer.
    - The last norm is large: rounding does not decide which logit is largest.

    Args:
        model: Hugging Face's, or SGLang's ``Gemma4TextModel``.
    """
    for layer in model.layers:
        layer.layer_scalar.uniform_(0.9, 1.0)
    model.embed_tokens.weight[: len(_SPECIAL_TOKENS)] *= 0.1
    sharpness = {"sliding_attention": shape.sharpness, "full_attention": shape.sharpness}
    if shape.global_sharpness is not None:
        sharpness["full_attention"] = shape.global_sharpness
    draw = torch.Generator().manual_seed(shape.seed)  # apart from the weights'
    count = max(1, round(shape.outlier_share * shape.hidden_size))
    outliers = torch.randperm(shape.hidden_size, generator=draw)[:count]
    for layer, kind in zip(model.layers, shape.layer_types, strict=True):
        for name, weight in layer.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight *= sharpness[kind]
            elif weight.dim() == 1:
                weight[outliers] *= shape.outliers
                if name.startswith("post_"):
                    weight *= shape.post_norms


def _give_shared_layers_projections(model: Any) -> None:
    """Add K and V weights, which no forward uses, to the layers that share K and V.

    Published checkpoints have them too. SGLang allocates them beside the queries' weights, and if
    it quantises these together, their values matter.
    """
    donors: dict[str, Any] = {}
    for layer in model.layers:
        attention = layer.self_attn
        donor = donors.setdefault(attention.layer_type, attention)
        if attention.is_kv_shared_layer:
            attention.k_proj = copy.deepcopy(donor.k_proj)
            attention.v_proj = copy.deepcopy(donor.v_proj)


def randomise(name: str, weight: nn.Parameter) -> None:
    """Fill one parameter so that values keep a scale of about 1 on their way through the model.

    ``scale`` gives the reasons for scales other than 1.
    """
    if weight.dim() > 1:
        std = weight[0].numel() ** -0.5
        if name.endswith(".embed_tokens.weight"):
            std *= 0.4
        weight.normal_(std=std)
        return
    scale = 1.0
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        scale = weight.numel() ** -0.25
    elif name == "model.language_model.norm.weight":
        scale = 6.0
    elif ".language_model.layers." in name and ".post_" in name:
        scale = 0.5
    weight.normal_(mean=scale, std=0.1 * scale)


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer: special tokens, 256 bytes, then made-up words."""
    tokens = [*_SPECIAL_TOKENS.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size < len(tokens):
        raise ValueError(f"vocab_size {vocab_size} is below the minimum of {len(tokens)}")
    tokens += [f"Ġt{token_id}" for token_id in range(len(tokens), vocab_size)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    named = ("pad_token", "eos_token", "bos_token", "unk_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{name: _SPECIAL_TOKENS[name] for name in named},
        extra_special_tokens={
            name: token for name, token in _SPECIAL_TOKENS.items() if name not in named
        },
        clean_up_tokenization_spaces=False,
    )


def build_processor(shape: Gemma4Shape) -> Gemma4Processor:
    """Return the processor for text, images, videos and audio."""
    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(max_soft_tokens=shape.image_tokens),
        tokenizer=build_tokenizer(shape.vocab_size),
        video_processor=Gemma4VideoProcessor(max_soft_tokens=70, num_frames=4),
        chat_template=CHAT_TEMPLATE,
        image_seq_length=shape.image_tokens,
    )


def write_checkpoint(path: str | Path, shape: Gemma4Shape, *, weights: bool = True) -> Path:
    """Write a checkpoint to the directory ``path``, made if need be, and return it.

    Without ``weights`` it can be served with ``--load-format dummy``.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if weights:
        build_model(shape).save_pretrained(path)
    build_processor(shape).save_pretrained(path)
    # Replaces the one that transformers wrote, which SGLang's text-only path cannot read.
    (path / "config.json").write_text(json.dumps(config_dict(shape), indent=2) + "\n")
    return path


def assistant_config_dict(target: Gemma4Shape) -> dict[str, Any]:
    """Return config.json's content of a multi-token-prediction assistant of ``target``.

    Two layers, one of each kind; all of their K/V is the target's.
    """
    text = config_dict(target)["text_config"]
    text |= {
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    }
    return {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "dtype": target.dtype,
        "text_config": text,
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
    }


def write_assistant(path: str | Path, target: Gemma4Shape) -> Path:
    """Write a random assistant that drafts for ``target``, and return its directory.

    Its output layer is the target's own, so that some of its drafts are accepted.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    embeddings = build_model(target).model.language_model.embed_tokens.weight
    torch.manual_seed(target.seed + 1)
    assistant = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig.from_dict(assistant_config_dict(target))
    )
    with torch.no_grad():
        for name, weight in assistant.named_parameters():
            randomise(name, weight)
        assistant.lm_head.weight.copy_(embeddings)
        half = target.hidden_size
        # The target's hidden state, passed through: the next token from it is the best guess.
        assistant.pre_projection.weight[:, :half] *= 0.1
        assistant.pre_projection.weight[:, half:] = torch.eye(half)
        assistant.post_projection.weight.copy_(torch.eye(half))
    assistant.to(getattr(torch, target.dtype)).save_pretrained(path)
    build_tokenizer(target.vocab_size).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(assistant_config_dict(target), indent=2) + "\n")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Write the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--no-weights", action="store_true", help="config and processor only")
    args = parser.parse_args(argv)
    print(write_checkpoint(args.path, PRESETS[args.preset], weights=not args.no_weights))


if __name__ == "__main__":
    main()
