"""What of SGLang is read by name, and the check that it is there.

``plugin`` checks the supported range before it imports this folder.
"""

import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

from sglang.srt.model_executor.model_runner import ModelRunner as ModelRunner

from sglang_gemma4_yoco.compat import attention, batch, decode_graphs, layers, release

# Fields of a batch that the tail rewrites, or that decide whether it may be cut. One by another
# name would pass for one that is not set. Whatever else is missing raises an error where it is
# used, at the latest in the check at start.
_FIELDS = (
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
)
# Functions of a capture. Without them the tail would run eagerly, and short prompts as stock.
_CAPTURING = (
    (attention.capture_mode, "get_is_capture_mode"),
    (attention.capture_mode, "model_capture_mode"),
    (decode_graphs.parallel_state, "graph_capture"),
)


def _missing() -> Iterator[str]:
    """Name everything that this package needs and the installed SGLang lacks."""
    model = layers.gemma4_causal.Gemma4TextModel
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
    for module, name in _CAPTURING:
        if not hasattr(module, name):
            yield f"{module.__name__}.{name}"
    for name in _FIELDS:
        if name not in batch.ForwardBatch.__dataclass_fields__:
            yield f"ForwardBatch.{name}"


def check_names() -> None:
    """Raise IncompatibleError, with what is missing and the remedy, unless all is there."""
    missing = "; ".join(_missing())
    if missing:
        raise release.IncompatibleError(
            f"SGLang {release.INSTALLED} lacks {missing}. "
            "Install a supported SGLang, or a newer sglang-gemma4-yoco"
        )


def find_class(path: str) -> Any | None:
    """Return SGLang's class of this name; None in a release that lacks it."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None
