"""Why no prefill of a server may be cut: its arguments, attention, pools of K and V, linear layers.

What is not known to be right is refused, with a reason of one line. The reasons do not change while
a server runs.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.core.gate import HIDDEN_STATES, LAST_ROW_DRAFTS, LORA, SPECULATIVE

# -- server arguments ------------------------------------------------------------------------------

PIPELINE = "pipeline parallelism (--pp-size) is not supported"
DP_ATTENTION = "data-parallel attention"
SEQUENCE_PARALLEL = "sequence parallelism"
CONTEXT_PARALLEL = "context parallelism"
EXPERT_PARALLEL = "expert parallelism"
HOOKS = "forward hooks, which may read any row"
OFFLOADED = "weights that come to the device for their layer's own forward only"
FOREIGN_CACHE = "a cache that may load K and V while layers run"
ONE_KERNEL = "one kernel in the place of the model's layers"
# SGLang's own defect. It is refused because it would be taken for one of this package.
WRONG_REPLAYS = (
    f"{seams.POSITIONS_VARIABLE} beside prefill CUDA graphs makes SGLang's own answers wrong: "
    "unset it"
)

# With one of these set, a request may have every row captured.
_HIDDEN_STATE_ARGUMENTS = (
    "enable_return_hidden_states",
    "enable_return_aux_hidden_states",
    "return_hidden_states_mode",
)

# A server argument that is set -> the reason.
_REFUSING_ARGUMENTS = {
    "enable_deterministic_inference": "deterministic inference",
    "enable_dp_attention": DP_ATTENTION,
    "enable_dp_lm_head": DP_ATTENTION,
    "enable_dense_mlp_attn_tp": DP_ATTENTION,
    "moe_dense_tp_size": DP_ATTENTION,
    "enable_layernorm_sp": SEQUENCE_PARALLEL,
    "enable_attn_tp_input_scattered": SEQUENCE_PARALLEL,
    "disable_attn_tp_gather": SEQUENCE_PARALLEL,
    "enable_prefill_cp": CONTEXT_PARALLEL,
    "enable_kv_cache_sharding": CONTEXT_PARALLEL,
    "enable_quant_communications": "all-reduces that round prefill otherwise than decode",
    "elastic_ep_backend": EXPERT_PARALLEL,
    "enable_two_batch_overlap": "two-batch overlap",
    "enable_single_batch_overlap": "single-batch overlap",
    "enable_pdmux": "PD multiplexing",
    "forward_hooks": HOOKS,
    "debug_tensor_dump_output_folder": HOOKS,
    "msprobe_dump_config": HOOKS,
    "enable_lora": LORA,
    "cpu_offload_gb": OFFLOADED,
    "enable_unified_memory": "pools of K and V that share and move their memory",
    "enable_page_major_kv_layout": "K and V that lie page by page",
    "enable_lmcache": FOREIGN_CACHE,
    "enable_flexkv": FOREIGN_CACHE,
    "enable_unified_cache_external_linker": FOREIGN_CACHE,
    "radix_cache_backend": FOREIGN_CACHE,
    "dllm_algorithm": "a diffusion language model's forward modes",
    "enable_nvidia_megakernel": ONE_KERNEL,
    "enable_amd_monokernel": ONE_KERNEL,
    "use_ray": "ranks that Ray places, on several machines it may be",
}
# A server argument above one -> the reason.
_REFUSING_SIZES = {
    "pp_size": PIPELINE,
    "attn_dp_size": DP_ATTENTION,
    "attn_cp_size": CONTEXT_PARALLEL,
    "dcp_size": CONTEXT_PARALLEL,
    "ep_size": EXPERT_PARALLEL,
    "moe_dp_size": EXPERT_PARALLEL,
    "dwdp_size": EXPERT_PARALLEL,
    # A batch is cut by all ranks or by none; on one machine they share one installation.
    "nnodes": "ranks on several machines",
}
# Arguments that functions below read by name.
_OTHER_ARGUMENTS = ("speculative_algorithm", "disaggregation_mode", "offload_group_size")

# The arguments that need no refusal, one a line: scripts/dev/reviewed_arguments.py
REVIEWED = Path(__file__).with_name("reviewed_arguments.txt")


def judged_arguments() -> set[str]:
    """The server arguments that can refuse a server."""
    return {*_OTHER_ARGUMENTS, *_HIDDEN_STATE_ARGUMENTS, *_REFUSING_ARGUMENTS, *_REFUSING_SIZES}


def reviewed_arguments() -> set[str]:
    """The server arguments that were read in SGLang's code and need no refusal."""
    return {line for line in REVIEWED.read_text().splitlines() if not line.startswith("#")}


def server_reason() -> str | None:
    """Why the arguments of this server refuse every batch of it, or None."""
    argument = seams.server_arguments()
    if argument is None:
        return None
    if seams.prefill_graph() is not None and seams.copies_positions():
        return WRONG_REPLAYS
    return (
        (_unknown_reason() if seams.is_newer_than_tested() else None)
        or _speculation_reason(argument)
        or _hidden_state_reason(argument)
        or _table_reason(argument)
    )


def _unknown_reason() -> str | None:
    """Why the arguments of a newer SGLang cannot be judged, or None."""
    try:
        is_set = seams.arguments_set()
    except seams.SeamError as unlisted:
        return str(unlisted)
    judged = judged_arguments()
    gone = sorted(map(_flag, judged - is_set.keys()))
    if gone:  # what it would refuse must not pass as unset
        return f"this SGLang lacks {', '.join(gone)}, which may go by another name now"
    known = judged | reviewed_arguments()
    new = sorted(_flag(name) for name in is_set if is_set[name] and name not in known)
    return f"{new[0]} is set, an argument that this version has not judged" if new else None


def _flag(argument: str) -> str:
    return f"--{argument.replace('_', '-')}"


def _speculation_reason(argument: Callable[[str], Any]) -> str | None:
    algorithm = argument("speculative_algorithm")
    if not algorithm:
        return None
    if algorithm not in LAST_ROW_DRAFTS:
        return SPECULATIVE
    if any(map(argument, _HIDDEN_STATE_ARGUMENTS)):
        return f"{HIDDEN_STATES}, beside speculative decoding"
    if argument("disaggregation_mode") not in (None, "null"):
        return f"{SPECULATIVE} beside prefill-decode disaggregation"  # not shown
    return None


def _hidden_state_reason(argument: Callable[[str], Any]) -> str | None:
    # SGLang then captures every row of every batch, whether a request wants them or not.
    mode = argument("return_hidden_states_mode")
    all_rows = mode == "full" or (argument("enable_return_hidden_states") and mode != "last")
    return HIDDEN_STATES if all_rows else None


def _table_reason(argument: Callable[[str], Any]) -> str | None:
    for name, reason in _REFUSING_ARGUMENTS.items():
        if argument(name):
            return reason
    for name, reason in _REFUSING_SIZES.items():
        if (argument(name) or 1) > 1:
            return reason
    return OFFLOADED if (argument("offload_group_size") or 0) > 0 else None  # -1 is none


# -- attention backends ----------------------------------------------------------------------------


class Ability(Enum):
    """What an attention backend can do.

    - MAIN, serve prefills: an extend step writes K and V of all rows to the pools, and in a window
      layer each row sees as many keys as Gemma 4 says, its own among them. AITER's sees one fewer
      in some of its kernels, Ascend's has pools of its own, Intel's AMX writes K and V in decode.
    - TAIL, run the tail: its decode step over a donor's K and V sees what the prefill's row sees.
    - CAPTURED, run it captured: its decode steps read only buffers that planning fills.
    """

    MAIN = auto()
    TAIL = auto()
    CAPTURED = auto()


# By class, without those derived from it: SGLang's by name, others by module and name. Triton's is
# shown by test. The others were read, 0.5.23 line by line and earlier releases by pattern. SGLang
# gives Gemma 4 no FlashAttention but version 4.
PROVEN_BACKENDS = {
    "TritonAttnBackend": frozenset({Ability.MAIN, Ability.TAIL, Ability.CAPTURED}),
    "TRTLLMHAAttnBackend": frozenset({Ability.MAIN}),
    "FlashAttentionBackend": frozenset({Ability.MAIN}),
    "XPUAttentionBackend": frozenset({Ability.MAIN}),
}
NO_TAIL = "no attention backend could be built for the tail"
_SGLANG = "sglang.srt."  # its image models' classes have the same names


def abilities(kind: type) -> frozenset[Ability]:
    """What attention backends of exactly this class can do."""
    return PROVEN_BACKENDS.get(backend_key(kind), frozenset())


def backend_key(kind: type) -> str:
    """The name of a class in ``PROVEN_BACKENDS``."""
    own = kind.__module__.startswith(_SGLANG)
    return kind.__name__ if own else f"{kind.__module__}.{kind.__qualname__}"


def backend_reason(main: Any) -> str | None:
    """Why no batch may be cut on a server with this attention backend, or None."""
    if type(main) is HybridAttnBackend:  # one for prefills, one for decode steps
        return backend_reason(main.prefill_backend) or backend_reason(main.decode_backend)
    if Ability.MAIN in abilities(type(main)):
        return None
    return f"the attention backend {type(main).__name__} is not proven"


def tail_backend_reason(backend: Any) -> str | None:
    """Why no tail can run on this attention backend, or None."""
    if Ability.TAIL in abilities(type(backend)):
        return None
    return f"the tail cannot run on the attention backend {type(backend).__name__}"


# -- pools of K and V ------------------------------------------------------------------------------


def pool_reason(pool: Any, dtype: torch.dtype) -> str | None:
    """Why the tail cannot read K and V of this server, or None.

    It needs one tensor of K and one of V for each layer, slot by slot, as they were computed. With
    a cache of another type than the queries', Triton's own forward fails at the first shared layer.

    Args:
        pool: the runner's ``token_to_kv_pool``.
        dtype: of the model's weights and activations.
    """
    windowed = type(pool) is SWAKVPool
    for part in (pool.full_kv_pool, pool.swa_kv_pool) if windowed else (pool,):
        if type(part) is not MHATokenToKVPool:
            return f"K and V lie in a {type(part).__name__}, whose layout is not known"
        method = getattr(getattr(part, "quant_method", None), "name", "unquantized")
        if method != "unquantized":
            return f"K and V are quantised ({method})"
        dimensions = {buffer.dim() for buffer in (*part.k_buffer, *part.v_buffer)}
        if not dimensions <= {3}:
            return f"K and V do not lie slot by slot, but in {max(dimensions)} dimensions"
    return None if pool.dtype == dtype else f"a KV cache of {pool.dtype} beside weights of {dtype}"


# -- linear layers ---------------------------------------------------------------------------------

# Kinds of linear layers whose rows are independent: the scale that rounds a row is the row's own,
# its blocks', or the checkpoint's. A scale from the largest number of the batch would change when
# other rows are missing. A kind is SGLang's class and, where that class has schemes, the scheme's.
# They were read in SGLang 0.5.17 to 0.5.23. Refused are all others, among them GGUF, which rounds
# few rows otherwise than many, and the classes of other packages and platforms.
_INDEPENDENT_ROWS = {
    "AWQLinearMethod.AWQIntelAMXLinearScheme",
    "AWQLinearMethod.AWQLinearScheme",
    "AWQLinearMethod.AWQMarlinLinearScheme",
    "AWQLinearMethod.AWQXPULinearScheme",
    "BlockInt8LinearMethod",
    "CompressedTensorsLinearMethod.CompressedTensorsW4A16Fp4",
    "CompressedTensorsLinearMethod.CompressedTensorsW4A4Fp4",
    "CompressedTensorsLinearMethod.CompressedTensorsW8A16Fp8",
    "CompressedTensorsLinearMethod.CompressedTensorsW8A8Fp8",
    "CompressedTensorsLinearMethod.CompressedTensorsW8A8Int8",
    "CompressedTensorsLinearMethod.CompressedTensorsWNA16",
    "CompressedTensorsLinearMethod.XPUCompressedTensorsWNA16",
    "Fp8LinearMethod",
    "GPTQLinearMethod.GPTQIntelAMXLinearScheme",
    "GPTQLinearMethod.GPTQLinearScheme",
    "GPTQLinearMethod.GPTQXPULinearScheme",
    "GPTQMarlinLinearMethod.GPTQMarlinLinearScheme",
    "ModelOptFp4LinearMethod",
    "ModelOptFp8LinearMethod",
    "ModelOptNvFp4A16LinearMethod",
    "PetitNvFp4LinearMethod",
    "QuarkLinearMethod.QuarkW4A4MXFP4",
    "QuarkLinearMethod.QuarkW8A8Fp8",
    "W8A8Fp8LinearMethod",
    "W8A8Int8LinearMethod",
}


def linear_reason(model: Any, first: int) -> str | None:
    """Why the rows of this model's tail may depend on rows that would be dropped, or None.

    Args:
        model: a ``Gemma4TextModel`` with a tail; its weights are loaded.
        first: S, the index of its first KV-shared layer.
    """
    for layer in list(getattr(model, "layers", ()))[first - 1 :]:
        for part in layer.modules():
            if isinstance(part, seams.LinearBase) and not has_independent_rows(part):
                return f"rows of {linear_kind(part)} may depend on each other"
    return None


def linear_kind(layer: Any) -> str:
    """The class of a linear layer's method, and of its scheme where it has one."""
    method, scheme = type(layer.quant_method).__name__, getattr(layer, "scheme", None)
    return method if scheme is None else f"{method}.{type(scheme).__name__}"


def has_independent_rows(layer: Any) -> bool:
    """Whether each row that a linear layer returns is known to depend on its own input alone."""
    method, kind = layer.quant_method, linear_kind(layer)
    if not type(method).__module__.startswith(_SGLANG):
        return False
    if kind == "UnquantizedLinearMethod":
        return seams.is_plain_tensor(layer.weight)
    if kind == "BitsAndBytesLinearMethod":  # its 8 bits pick columns by all rows
        return not method.quant_config.load_in_8bit
    # On AMD fp8 often has one scale for the whole batch, and mxfp8 other weights for few rows.
    on_amd = torch.version.hip is not None
    return kind in _INDEPENDENT_ROWS and not (on_amd and "Fp8" in kind)
