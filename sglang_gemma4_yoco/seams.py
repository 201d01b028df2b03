"""Everything that depends on the installed SGLang: the seams, checked at load, and their versions.

Supported: SGLang 0.5.14 and later (the range itself stands in ``pyproject.toml`` and is checked
before this module is imported). Across these releases ``Gemma4TextModel.forward`` has had several
bodies, but the layer call, the ForwardBatch fields and the attention backend's entry point kept
their names; what differs is told apart here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_executor import forward_context
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
    is_in_breakable_cuda_graph,
)
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    is_in_tc_piecewise_cuda_graph,
)
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.models import gemma4_causal
from sglang.srt.server_args import ServerArgs
from torch.distributed import distributed_c10d

# From 0.5.22 on Gemma 4's layers hand a residual stream along on the batch. 0.5.21 has such streams
# as well, for other models: hence Gemma 4's own module is asked.
residual_batch: Any = getattr(gemma4_causal, "residual_batch", None)
HAS_RESIDUAL_STREAM = residual_batch is not None
_FIRST_WITH_RESIDUAL_STREAM = Version("0.5.22")
LAST_TESTED = Version("0.5.23")
PUBLISHED_HELPERS = ("_yoco_eligibility", "_yoco_truncate_to_last_tokens")

# Fields of ForwardBatch that the tail rewrites, or that the gate must be able to see.
_REQUIRED_FIELDS = (
    "forward_mode",
    "batch_size",
    "input_ids",
    "req_pool_indices",
    "seq_lens",
    "seq_lens_sum",
    "out_cache_loc",
    "positions",
    "extend_num_tokens",
    "extend_seq_lens",
    "extend_prefix_lens",
    "extend_start_loc",
    "extend_seq_lens_cpu",
    "extend_prefix_lens_cpu",
    "extend_logprob_start_lens_cpu",
    "return_logprob",
    "capture_hidden_mode",
    "spec_algorithm",
    "spec_info",
    "lora_ids",
    "mm_input_embeds",
    "mm_inputs",
    "input_embeds",
    "global_num_tokens_cpu",
    "attn_cp_metadata",
    "tbo_split_seq_index",
    "tbo_children",
)
# The first release that has a name which the gate judges. One that is not listed here has been in
# all of them, and none has gone so far.
_SINCE = {
    "ServerArgs.dcp_size": Version("0.5.15"),
    "ServerArgs.dwdp_size": Version("0.5.17"),
    "ServerArgs.return_hidden_states_mode": Version("0.5.17"),
    "ServerArgs.enable_dense_mlp_attn_tp": Version("0.5.19"),
    "ServerArgs.enable_layernorm_sp": Version("0.5.19"),
    "ServerArgs.attn_dp_size": Version("0.5.22"),
    "ServerArgs.enable_kv_cache_sharding": Version("0.5.22"),
    "ServerArgs.enable_return_aux_hidden_states": Version("0.5.23"),
    "ForwardBatch.attn_dcp_metadata": Version("0.5.15"),
    "ForwardBatch.dcp_kv_mask": Version("0.5.15"),
    "ForwardBatch.attn_tp_sequence_sharded": Version("0.5.20"),
    "ForwardBatch.encoder_swa_replay": Version("0.5.21"),
    "ForwardBatch.engram_history": Version("0.5.21"),
    "ForwardBatch.token_indices_to_pool": Version("0.5.21"),
    "ForwardBatch.decision_layouts": Version("0.5.22"),
    "ForwardBatch.full_prefill_cuda_graph_capture": Version("0.5.22"),
    "ForwardBatch.kv_loc_cols": Version("0.5.22"),
}
_REQUIRED_MODES = ("EXTEND", "DECODE", "MIXED", "IDLE", "SPLIT_PREFILL", "DLLM_EXTEND")


class SeamError(RuntimeError):
    """The installed SGLang is not one that this package can patch."""


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _missing() -> Iterator[str]:
    """Name every seam that the installed SGLang lacks."""
    model = gemma4_causal.Gemma4TextModel
    for name in PUBLISHED_HELPERS:
        if hasattr(model, name):
            yield f"a Gemma4TextModel without a {name} of its own (is it patched already?)"
    if _parameters(model.forward)[:5] != [
        *("self", "input_ids", "positions", "forward_batch", "input_embeds")
    ]:
        yield (
            "Gemma4TextModel.forward(self, input_ids, positions, forward_batch, input_embeds, ...)"
        )
    layer_call = _parameters(gemma4_causal.Gemma4DecoderLayer.forward)
    if layer_call[1:5] != ["positions", "hidden_states", "per_layer_input", "forward_batch"]:
        yield (
            "Gemma4DecoderLayer.forward("
            "self, positions, hidden_states, per_layer_input, forward_batch, ...)"
        )
    fields = {field.name for field in dataclasses.fields(ForwardBatch)}
    absent = [name for name in _REQUIRED_FIELDS if name not in fields]
    if absent:
        yield f"ForwardBatch.{', .'.join(absent)}"
    absent = [name for name in _REQUIRED_MODES if name not in ForwardMode.__members__]
    if absent:
        yield f"ForwardMode.{', .'.join(absent)}"
    for name in ("init_attention_backends", "_get_attention_backend"):
        if not callable(getattr(ModelRunner, name, None)):
            yield f"ModelRunner.{name}"
    if _parameters(AttentionBackend.init_forward_metadata) != ["self", "forward_batch"]:
        yield "AttentionBackend.init_forward_metadata(self, forward_batch)"
    for name in ("forward_context", "get_forward_context", "has_forward_context"):
        if not callable(getattr(forward_context, name, None)):
            yield f"forward_context.{name}"
    if HAS_RESIDUAL_STREAM:
        if "residual_stream" not in fields:
            yield "ForwardBatch.residual_stream"
        if not callable(getattr(residual_batch, "set_written", None)):
            yield "layer_boundary.residual.batch.set_written"
    elif Version(version("sglang")) >= _FIRST_WITH_RESIDUAL_STREAM:
        yield "gemma4_causal.residual_batch"


def check() -> None:
    """Raise one clear line unless the installed SGLang has every seam that the patch uses.

    Raises:
        SeamError: it names what is missing and the remedy.
    """
    missing = list(_missing())
    if missing:
        raise SeamError(
            f"SGLang {version('sglang')} lacks {'; '.join(missing)}. "
            "Install a supported SGLang, or a newer sglang-gemma4-yoco"
        )


def is_newer_than_tested() -> bool:
    """Whether the installed SGLang came out after the last release that was tested."""
    return Version(version("sglang")) > LAST_TESTED


def _has(owner: type, name: str) -> bool:
    # A field whose default is made anew for each object is no attribute of its class.
    return name in getattr(owner, "__dataclass_fields__", ()) or hasattr(owner, name)


def unseen(arguments: Iterable[str], fields: Iterable[str]) -> str | None:
    """Why nobody can tell what a server or a batch of the installed SGLang asks for, or None.

    A name that has gone may have been renamed: what it would refuse must not pass as unset. A
    release older than a name has nothing that goes by it.

    Args:
        arguments: the server arguments that are judged.
        fields: the fields of a batch that are judged.
    """
    installed = Version(version("sglang"))
    judged = [(ServerArgs, name) for name in arguments] + [(ForwardBatch, name) for name in fields]
    absent = [f"{owner.__name__}.{name}" for owner, name in judged if not _has(owner, name)]
    lacking = [name for name in absent if name not in _SINCE or installed >= _SINCE[name]]
    if not lacking:
        return None
    return f"SGLang {installed} lacks {', '.join(lacking)}, which may go by another name now"


def server_arguments() -> Callable[[str], Any] | None:
    """Look-up of the running server's arguments by name, as resolved; None outside of a server.

    An argument that this SGLang does not have is None; ``unseen`` tells whether it should have it.
    """
    try:
        from sglang.srt.runtime_context import get_server_args  # 0.5.15 and later
    except ImportError:
        from sglang.srt.server_args import get_global_server_args as get_server_args
    try:
        args = get_server_args()
    except (AttributeError, ValueError, RuntimeError):  # nothing published yet
        return None
    if args is None:
        return None
    try:
        # 0.5.20 and later: the record keeps what was typed, resolution is kept beside it.
        from sglang.srt.arg_groups.overrides import resolution_result
    except ImportError:
        return lambda name: getattr(args, name, None)
    return lambda name: resolution_result(args, name) if hasattr(args, name) else None


def tensor_parallel_group() -> Any | None:
    """SGLang's coordinator of the ranks that share this rank's layers; None for a rank alone."""
    argument = server_arguments()
    if argument is None or (argument("tp_size") or 1) == 1:
        return None
    return parallel_state.get_tp_group()


def rendezvous_store() -> Any:
    """The key-value store through which this server's ranks found each other."""
    return distributed_c10d._get_default_store()


def prefill_graph() -> str | None:
    """The CUDA graph backend that this server replays prefill forwards with, or None."""
    argument = server_arguments()
    config = None if argument is None else argument("cuda_graph_config")
    name: str = getattr(getattr(config, "prefill", None), "backend", "disabled")
    return None if name == "disabled" else name


def is_capturing() -> bool:
    """Whether this forward is being recorded into a CUDA graph, or is replayed around one.

    A recorded forward runs its Python once, for a padded batch; what the package would decide
    for that batch would be replayed for all others.
    """
    if (
        capture_mode.get_is_capture_mode()
        or is_in_breakable_cuda_graph()  # asked by the former from 0.5.15 on
        or is_in_tc_piecewise_cuda_graph()
    ):
        return True
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def current_attn_backend() -> Any | None:
    """The attention backend that this forward uses, or None outside of a forward."""
    # A port that lives in the model's own module looks its backend up there.
    accessor = getattr(gemma4_causal, "get_attn_backend", None)
    if accessor is not None:
        return accessor()
    if not forward_context.has_forward_context():
        return None
    return forward_context.get_forward_context().attn_backend


def attn_backend_switched(backend: Any) -> AbstractContextManager[None]:
    """Make ``backend`` the current one for the span of the returned context manager."""
    current = forward_context.get_forward_context()
    switched: AbstractContextManager[None] = forward_context.forward_context(
        dataclasses.replace(current, attn_backend=backend)
    )
    return switched


def build_attn_backend(runner: Any) -> Any:
    """A second attention backend like the runner's own, over the same memory pools."""
    backend = runner._get_attention_backend()
    main = runner.attn_backend
    for name in (
        "prefill_attention_backend_str",
        "decode_attention_backend_str",
        "kv_index_translator",  # 0.5.22 and later; None means "not bound yet"
    ):
        if getattr(backend, name, None) is None and hasattr(main, name):
            setattr(backend, name, getattr(main, name))
    return backend


def _counts_the_window_short(backend: Any) -> bool:
    """Whether a decode step of ``backend`` sees one key fewer in its window than an extend row.

    Triton's planner takes min(length, W - 1) keys for a window of W. In extend these are the cached
    keys before the row, which itself is the W-th; in decode the row's own key is among them. With
    W = 3, the row at position 5 sees keys 3, 4, 5 in extend and 4, 5 in decode.
    """
    window = getattr(backend, "sliding_window_size", None)
    names = {base.__name__ for base in type(backend).__mro__}
    return "TritonAttnBackend" in names and window is not None and window > 0


def decodes_like_extend(backend: Any) -> bool:
    """Whether ``plan`` makes a decode step of ``backend`` see what an extend row sees.

    In a release newer than the last one that was tested the planner may count otherwise.
    """
    if not _counts_the_window_short(backend):
        return True
    return not is_newer_than_tested()


def plan(backend: Any, forward_batch: Any) -> None:
    """Build ``backend``'s attention metadata for the tail's batch, over the whole window."""
    decode = forward_batch.forward_mode is ForwardMode.DECODE
    if not (decode and _counts_the_window_short(backend)):
        backend.init_forward_metadata(forward_batch)
        return
    window = backend.sliding_window_size
    backend.sliding_window_size = window + 1
    try:
        backend.init_forward_metadata(forward_batch)
    finally:
        backend.sliding_window_size = window


def residual_is_written(forward_batch: Any, hidden_states: torch.Tensor) -> bool:
    """Whether ``hidden_states`` is the whole residual: no update is owed to it."""
    stream = getattr(forward_batch, "residual_stream", None)
    if stream is None:
        return True  # up to 0.5.21, and stand-ins: layers pass plain tensors
    if stream.pending is not None:
        return False
    return stream.residual is None or stream.residual is hidden_states


def residual(forward_batch: Any, layer_input: torch.Tensor) -> torch.Tensor:
    """The residual that the layer now running has read: [T, hidden].

    Args:
        layer_input: [T, hidden], the hidden states that the layer was called with.

    Raises:
        SeamError: an update is still owed to it, which no supported SGLang does here.
    """
    if not HAS_RESIDUAL_STREAM:
        return layer_input
    stream = forward_batch.residual_stream
    if stream is None or stream.pending is not None or stream.residual is None:
        raise SeamError("a Gemma 4 layer computes its attention before its residual is written")
    written: torch.Tensor = stream.residual
    return written


def residual_reader(layer: Any) -> Any | None:
    """The part of ``layer`` that is handed the layer's own input to add its attention to.

    Up to 0.5.21 a decoder layer keeps its input for this norm; since then the batch carries it, and
    there is no such part.
    """
    return None if HAS_RESIDUAL_STREAM else getattr(layer, "pre_feedforward_layernorm", None)


def write_residual(forward_batch: Any, hidden_states: torch.Tensor) -> None:
    """Give the batch a residual stream that holds ``hidden_states``, where it has streams."""
    if getattr(forward_batch, "residual_stream", None) is not None:
        residual_batch.set_written(hidden_states, forward_batch)


def layer_rows(output: Any) -> torch.Tensor:
    """The hidden states in what a decoder layer returns."""
    rows: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return rows


def layer_output(hidden_states: torch.Tensor) -> Any:
    """``hidden_states`` as a decoder layer returns them: up to 0.5.21 in a pair with None."""
    return hidden_states if HAS_RESIDUAL_STREAM else (hidden_states, None)


def is_plain_linear(projection: Any) -> bool:
    """Whether a linear layer is ``x @ weight.T + bias``, so that its outputs can be sliced."""
    weight = getattr(projection, "weight", None)
    return (
        type(getattr(projection, "quant_method", None)) is UnquantizedLinearMethod
        and isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and weight.dtype.is_floating_point
        and weight.dtype.itemsize >= 2
        and not getattr(projection, "use_intel_amx_backend", False)  # packed for the CPU
        and hasattr(projection, "bias")
    )


def kv_cache_dtype(backend: Any) -> torch.dtype | None:
    """The type in which the pools behind ``backend`` store K and V, or None if it is not known."""
    pool = getattr(backend, "token_to_kv_pool", None)
    dtype: torch.dtype | None = getattr(pool, "dtype", None)
    return dtype


__all__ = [
    "HAS_RESIDUAL_STREAM",
    "LAST_TESTED",
    "CaptureHiddenMode",
    "ForwardMode",
    "ModelRunner",
    "SeamError",
    "attn_backend_switched",
    "build_attn_backend",
    "check",
    "current_attn_backend",
    "decodes_like_extend",
    "gemma4_causal",
    "is_capturing",
    "is_newer_than_tested",
    "is_plain_linear",
    "kv_cache_dtype",
    "layer_output",
    "layer_rows",
    "plan",
    "prefill_graph",
    "rendezvous_store",
    "residual",
    "residual_is_written",
    "residual_reader",
    "server_arguments",
    "tensor_parallel_group",
    "unseen",
    "write_residual",
]
