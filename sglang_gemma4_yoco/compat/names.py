"""The names of SGLang that are used, and the check that they are there.

Supported is SGLang 0.5.17 and later; ``plugin`` checks that before it imports this folder.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from packaging.version import Version
from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
from sglang.srt.managers.scheduler import Scheduler as Scheduler
from sglang.srt.model_executor.model_runner import ModelRunner as ModelRunner
from sglang.srt.observability import metrics_collector

from sglang_gemma4_yoco.compat import attention, batch, decode_graphs, layers, release, server

SchedulerMetricsCollector = metrics_collector.SchedulerMetricsCollector
#: Two helpers that the package adds to ``Gemma4TextModel``, where SGLang has none of its own.
PUBLISHED_HELPERS = ("_yoco_eligibility", "_yoco_truncate_to_last_tokens")


# Names that are used, by their owner. Of a batch: what the tail rewrites, or the gate must see.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "ForwardBatch": (
        "batch_size",
        "capture_hidden_mode",
        "extend_logprob_start_lens_cpu",
        "extend_num_tokens",
        "extend_prefix_lens",
        "extend_prefix_lens_cpu",
        "extend_seq_lens",
        "extend_seq_lens_cpu",
        "extend_start_loc",
        "forward_mode",
        "full_prefill_cuda_graph_capture",
        "input_embeds",
        "input_ids",
        "kv_loc_cols",
        "lora_ids",
        "mm_input_embeds",
        "mm_inputs",
        "multi_item_delimiter_indices",
        "out_cache_loc",
        "positions",
        "replace_embeds",
        "req_pool_indices",
        "residual_stream",
        "return_hidden_states_before_norm",
        "return_logprob",
        "seq_lens",
        "seq_lens_sum",
        "spec_algorithm",
        "spec_info",
        "token_indices_to_pool",
    ),
    "ForwardMode": (
        "DECODE",
        "EXTEND",
        "MIXED",
    ),
    "CanaryManager": ("model_forward_bracket_scope",),
    "DumperConfig": ("from_env",),
    "EnvField": (
        "get",
        "is_set",
    ),
    "ModelRunner": (
        "init_attention_backends",
        "init_cuda_graphs",
        "init_decode_cuda_graph",
        "init_prefill_cuda_graph",
    ),
    "capture_mode": (
        "get_is_capture_mode",
        "model_capture_mode",
    ),
    "dumper": ("may_enable",),
    "forward_context": (
        "forward_context",
        "get_forward_context",
        "has_forward_context",
    ),
    "parallel_state": ("graph_capture",),
    "residual_batch": (
        "set_written",
        "start",
    ),
}
_OWNERS: dict[str, Any] = {
    "ForwardBatch": batch.ForwardBatch,
    "ForwardMode": batch.ForwardMode,
    "CanaryManager": CanaryManager,
    "DumperConfig": server.DumperConfig,
    "EnvField": server.EnvField,
    "ModelRunner": ModelRunner,
    "capture_mode": attention.capture_mode,
    "dumper": server.dumper,
    "forward_context": attention.forward_context,
    "parallel_state": decode_graphs.parallel_state,
    "residual_batch": layers.residual_batch,
}
# The first release that has one of these, if it is not in all that are supported.
_SINCE = {
    "ForwardBatch.full_prefill_cuda_graph_capture": Version("0.5.22"),
    "ForwardBatch.kv_loc_cols": Version("0.5.22"),
    "ForwardBatch.residual_stream": Version("0.5.22"),
    "ForwardBatch.token_indices_to_pool": Version("0.5.21"),
    "residual_batch.set_written": Version("0.5.22"),
    "residual_batch.start": Version("0.5.22"),
}


def _missing() -> Iterator[str]:
    """Name everything that this package needs and the installed SGLang lacks."""
    model = layers.gemma4_causal.Gemma4TextModel
    for name in PUBLISHED_HELPERS:
        if hasattr(model, name) and not server.has_fast_prefill():
            yield f"a Gemma4TextModel without a {name} of its own (is it patched already?)"
    layer = layers.gemma4_causal.Gemma4DecoderLayer
    for owner, name, wanted in (
        (model, "forward", "self, input_ids, positions, forward_batch, input_embeds, ..."),
        (layer, "forward", "self, positions, hidden_states, per_layer_input, forward_batch, ..."),
        (attention.AttentionBackend, "init_forward_metadata", "self, forward_batch"),
    ):
        parameters = list(inspect.signature(getattr(owner, name)).parameters)
        if wanted.endswith("..."):
            parameters[wanted.count(",") :] = ["..."]
        if ", ".join(parameters) != wanted:
            yield f"{owner.__name__}.{name}({wanted})"
    if "end_layer" not in inspect.unwrap(model.forward).__code__.co_names:
        yield "Gemma4TextModel.forward's loop up to self.end_layer"
    installed = Version(version("sglang"))
    for part, names in _NAMES.items():
        owner = _OWNERS[part]
        present = {*dir(owner), *getattr(owner, "__dataclass_fields__", ())}
        for name in names:
            missing = f"{part}.{name}"
            if name not in present and installed >= _SINCE.get(missing, installed):
                yield missing


def check_names() -> None:
    """Raise IncompatibleError, with what is missing and the remedy, unless all is there."""
    missing = list(_missing())
    if missing:
        raise release.IncompatibleError(
            f"SGLang {version('sglang')} lacks {'; '.join(missing)}. "
            "Install a supported SGLang, or a newer sglang-gemma4-yoco"
        )
