"""Model of a prefill's duration, from a model's sizes, a data sheet and assumptions.

On a GPU a forward takes as long as its host or its device needs, whichever is longer; without
overlap, as on a CPU, their sum. The host needs some time for each operation that PyTorch
dispatches. The device needs for each layer's matrix products
the larger of operations / achieved peak and bytes / bandwidth, plus the time of attention and of
elementwise kernels. ``benchmark/model.toml`` contains the data sheets, the counts of operations,
and the ranges of the assumed values.

Arguments of several functions:
    case: a measurement or a prediction: the model, its prompts, and how they are served.
    device: a data sheet.
    values: the assumed values; each a number, or an array of draws, [draws, 1].
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, Gemma3nTextConfig, Gemma4TextConfig

from scripts.environment import REPO
from sglang_gemma4_reference import checkpoint

MODEL = tomllib.loads((REPO / "benchmark" / "model.toml").read_text())


@cache
def find_config(model: str) -> Any:
    """Return the configuration of a text model: of Gemma 4 by its preset, or Gemma 3n E4B."""
    if model not in checkpoint.PRESETS:
        return Gemma3nTextConfig()
    return Gemma4TextConfig(**checkpoint.config_dict(checkpoint.PRESETS[model])["text_config"])


@cache
def find_layers(model: str) -> Any:
    """Return the sizes of each layer: [6, layers].

    They are the weights, the widths of all heads, of a head and of the FFN, the window (infinite
    where there is none), and whether the layer is KV-shared.
    """
    with torch.device("meta"):
        layers = AutoModel.from_config(find_config(model)).layers
    sizes = []
    for layer in layers:
        attention = layer.self_attn
        weights = sum(map(torch.numel, layer.parameters()))
        widths = attention.q_proj.out_features, attention.head_dim, layer.mlp.gate_proj.out_features
        window = attention.sliding_window or math.inf
        sizes.append((weights, *widths, window, attention.is_kv_shared_layer))
    return np.array(sizes, dtype=float).T


def count_rows(case: Any) -> int:
    """Return the rows of a forward: those of all prompts, or of one chunk on a server."""
    rows: int = case.prompts * case.tokens
    if case.what != "forward":
        rows = min(rows, MODEL["chunk"])
    return rows


def attention_seconds(case: Any, whole: Any, values: Any) -> Any:
    """Return the device's time of each layer's attention: [layers].

    Args:
        whole: whether a layer computes all rows, or the last one of each prompt: [layers].
    """
    _, inner, width, _, window, _ = find_layers(case.model)
    end, prompts = case.prefix + case.tokens, count_rows(case) / case.tokens

    def before(position: int, window: Any) -> Any:
        """Return the number of keys that all rows before a position attend to."""
        ramp = np.minimum(position, window)
        return ramp * (position - ramp / 2)

    within = before(end, window) - before(case.prefix, window)
    every = before(end, math.inf) - before(case.prefix, math.inf)
    last = np.minimum(end, window)
    rate = np.where(width > 256, values.wide, values.narrow)
    seconds = prompts * 4 * inner * np.where(whole, within, last) / rate
    seconds += case.visits * whole * prompts * inner / width * (every - within) * values.skipped
    return seconds / case.gpus + whole * last * values.key


def device_seconds(case: Any, cut: int, device: Any, values: Any) -> tuple[Any, Any]:
    """Return the device's time for the layers before the first KV-shared one, and for the rest.

    From layer ``cut`` on, counted from the first KV-shared one, only the last row of each prompt is
    computed. The donor also computes K and V of all rows, at a cost too small to count.
    """
    weights, _, _, ffn, _, shared = find_layers(case.model)
    first = np.flatnonzero(shared)[0]
    whole = np.arange(len(shared)) < first + cut
    every = count_rows(case)
    rows = np.where(whole, every, every / case.tokens)
    config = find_config(case.model)
    moved = rows * (values.passes * config.hidden_size + 3 * ffn)
    sent = rows * config.hidden_size * 4 * (1 - 1 / case.gpus)
    computed = 2 * weights * rows / (values.matrix * device.peak)
    read = weights * device.itemsize / device.bandwidth
    seconds = np.maximum(computed, read) / case.gpus + values.kernels
    seconds += (moved / device.bandwidth + sent / device.link) * device.itemsize
    seconds += attention_seconds(case, whole, values)
    logits = config.vocab_size * config.hidden_size * device.itemsize / device.bandwidth
    tail = seconds[..., first:].sum(-1, keepdims=True) + logits
    return seconds[..., :first].sum(-1, keepdims=True), tail


def forward_seconds(case: Any, way: Any, device: Any, values: Any) -> Any:
    """Return the time of a forward, from tokens to logits."""
    shared = find_layers(case.model)[-1]
    own = len(shared) - shared.sum()
    host = (own * way.own + way.outside + values.planning) * values.operation
    of_tail = shared.sum() * way.shared * values.operation
    front, tail = device_seconds(case, way.cut, device, values)
    front = front + values.planning * values.operation / 2
    if not device.overlaps:
        return host + of_tail + front + tail
    if way.waits:
        return np.maximum(host, front) + np.maximum(of_tail, tail)
    return np.maximum(host + of_tail, front + tail)


def predict(case: Any, values: Any, device: Any = None) -> list[Any]:
    """Return the seconds of each of ``case.ways``.

    ``case.what`` selects the time: of one ``forward`` of all prompts; of a server's prefills when
    all are sent at once (``TTFT``); or of these and the answers (``duration``).
    """
    device = device or SimpleNamespace(**MODEL["devices"][case.device])
    forwards = case.prompts * case.tokens / count_rows(case)
    served, found = case.what != "forward", []
    weights = find_layers(case.model)[0].sum() * device.itemsize / case.gpus
    outside = served * case.prompts * values.request
    if case.what == "duration":
        outside = outside + case.answer * (weights / device.bandwidth + values.step)
    for name in case.ways:
        way = SimpleNamespace(**MODEL["ways"][name])
        seconds = forward_seconds(case, way, device, values)
        found.append(seconds * forwards + outside)
    return found
