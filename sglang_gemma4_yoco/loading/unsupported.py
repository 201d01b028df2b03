"""Reasons that rule out fast prefill on a server: arguments, attention, KV pools, linear layers.

Unknown configurations are refused with a one-line reason, which does not change while the server
runs.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from sglang_gemma4_yoco import compat, settings
from sglang_gemma4_yoco.compat.server import FAST_PREFILL, POSITIONS_VARIABLE, read_argument
from sglang_gemma4_yoco.core.eligibility import HIDDEN_STATES, LAST_ROW_DRAFTS, SPECULATIVE
from sglang_gemma4_yoco.refusal import ServerRefusal

# -- server arguments and environment variables ----------------------------------------------------

# A defect of SGLang, refused because it would be mistaken for one of this package.
WRONG_REPLAYS = ServerRefusal(
    f"{POSITIONS_VARIABLE} with prefill CUDA graphs makes SGLang's own answers wrong: unset it",
    level=logging.WARNING,
)

#: SGLang cuts the prefills itself, if its own conditions are met.
SGLANG_SERVES = ServerRefusal(
    f"SGLang's own fast prefill is on (--{FAST_PREFILL.replace('_', '-')}): remove "
    "that flag to use this package's"
)
#: The metrics label of a release on which no prefill is cut.
UNTESTED_RELEASE = "untested_release"
#: The limits on a release after the last tested one with the setting ``untested``.
RUNS_UNTESTED = "its new arguments are not checked; the tail runs eagerly, as an extend batch"
# Embedding mode crashes SGLang's own server for these models; its error should be the last line.
EMBEDDINGS = ServerRefusal("embeddings", is_logged=False)
DUMPER = ServerRefusal(
    "SGLang's dumper may dump any row: unset DUMPER_ENABLE and DUMPER_SERVER_PORT"
)
CANARY = ServerRefusal(
    "SGLang's KV canary would take the check's synthetic requests for violations: leave "
    "--kv-canary out"
)

#: By reason, arguments and (in capitals) environment variables that refuse a server if set.
UNSUPPORTED_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "LoRA": ("enable_lora",),
    "pipeline parallelism (--pp-size) is not supported": ("pp_size",),
    "data-parallel attention": (
        "enable_dp_attention",
        "enable_dp_lm_head",
        "enable_dense_mlp_attn_tp",
        "moe_dense_tp_size",
        "attn_dp_size",
    ),
    "sequence parallelism": (
        "enable_layernorm_sp",
        "enable_attn_tp_input_scattered",
        "disable_attn_tp_gather",
    ),
    "context parallelism": (
        "enable_prefill_cp",
        "enable_kv_cache_sharding",
        "attn_cp_size",
        "dcp_size",
    ),
    "expert parallelism": (
        "elastic_ep_backend",
        "ep_size",
        "moe_dp_size",
        "dwdp_size",
    ),
    # All ranks cut a batch, or none; on one machine they share one installation.
    "ranks on several machines": ("nnodes",),
    "ranks that Ray places, possibly on several machines": ("use_ray",),
    "deterministic inference": ("enable_deterministic_inference",),
    "all-reduces that round prefill differently from decode": ("enable_quant_communications",),
    "two-batch overlap": ("enable_two_batch_overlap",),
    "single-batch overlap": ("enable_single_batch_overlap",),
    "PD multiplexing": ("enable_pdmux",),
    "forward hooks, which may read any row": (
        "forward_hooks",
        "debug_tensor_dump_output_folder",
        "enable_layerwise_nvtx_marker",  # its hooks on all modules read shapes only
        "msprobe_dump_config",
    ),
    "weights that are on the device only during their layer's forward": (
        "cpu_offload_gb",
        "offload_group_size",  # -1 is none
    ),
    "pools of K and V that share and move their memory": ("enable_unified_memory",),
    "K and V that are stored page by page": ("enable_page_major_kv_layout",),
    "a cache that may load K and V while layers run": (
        "enable_lmcache",
        "enable_flexkv",
        "enable_unified_cache_external_linker",
        "radix_cache_backend",
    ),
    "a diffusion language model's forward modes": ("dllm_algorithm",),
    "one kernel in place of the model's layers": (
        "enable_nvidia_megakernel",
        "enable_amd_monokernel",
    ),
    # TRT-LLM's prefill then skips keys; the tail's attention would not.
    "attention that skips small scores": ("SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR",),
    # The tail may be the first to load a variant of a kernel. The resulting error must end the
    # server, and not count as a failure of the fast path, which falls back to stock.
    "kernels must not be loaded while the server serves": (
        "SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY",
    ),
}
# Numbers that refuse only above 1; others refuse above 0.
_HARMLESS_AT_1 = {
    "pp_size",
    "attn_dp_size",
    "attn_cp_size",
    "dcp_size",
    "ep_size",
    "moe_dp_size",
    "dwdp_size",
    "nnodes",
}
# With one of these, a request may capture every row: refused with speculative decoding.
_HIDDEN_STATE_ARGUMENTS = {
    "enable_return_hidden_states",
    "enable_return_aux_hidden_states",
    "return_hidden_states_mode",
}
# These refuse for some values only.
_JUDGED_BY_VALUE = {
    "speculative_algorithm",
    "disaggregation_mode",
    "kv_canary",
    "DUMPER_ENABLE",
    "DUMPER_SERVER_PORT",
    "SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION",
}


def list_judged_arguments() -> set[str]:
    """Return the server arguments and environment variables that can refuse a server."""
    return (_JUDGED_BY_VALUE | _HIDDEN_STATE_ARGUMENTS).union(*UNSUPPORTED_ARGUMENTS.values())


def find_release_reason() -> ServerRefusal | None:
    """Return why no prefill is cut on the installed release of SGLang, or None.

    With the setting ``untested`` prefills are cut on a release after the last tested one if the
    self-check passes. A refusing argument that was renamed must not pass as unset. SGLang's own
    fast prefill, if on, is the reason on any release.
    """
    if not compat.release.is_newer_than_tested():
        return None
    if read_argument(FAST_PREFILL):
        return None
    installed, untested = compat.release.INSTALLED, settings.name_of("untested")
    gone = [name for name in list_judged_arguments() if not compat.server.has_name(name)]
    if not settings.current.untested:
        tested = f"{compat.release.FIRST_TESTED} to {compat.release.LAST_TESTED}"
        reason = (
            f"SGLang {installed} is newer than the tested releases, {tested}: "
            f"{untested}=1 turns fast prefill on if its self-check passes"
        )
    elif not settings.current.self_check:
        check = settings.name_of("self_check")
        reason = f"SGLang {installed} was not tested, and {untested}=1 needs {check}=1"
    elif gone:
        names = ", ".join(sorted(map(_name_flag, gone)))
        reason = f"SGLang {installed} lacks {names}, which may go by another name now"
    else:
        return None
    return ServerRefusal(reason, level=logging.WARNING, label=UNTESTED_RELEASE)


def find_server_reason() -> ServerRefusal | None:
    """Return why this server's release, flags or environment rule out fast prefill, or None."""
    return find_release_reason() or find_argument_reason()


def find_argument_reason() -> ServerRefusal | None:
    """Return why the arguments or variables of this server refuse every batch, or None."""
    if read_argument(FAST_PREFILL):
        return SGLANG_SERVES
    replays = compat.server.get_cuda_graph_backend("prefill") is not None
    if replays and compat.server.read_variable(POSITIONS_VARIABLE):
        return WRONG_REPLAYS
    # The dumper is on, or can be turned on over HTTP. If neither holds when the model is loaded, it
    # has no hooks and never dumps a tensor.
    if compat.server.dumper.may_enable:
        return DUMPER
    if read_argument("kv_canary") not in (None, "none"):
        return CANARY
    return _check_speculation() or _check_hidden_states() or _check_table()


def _name_flag(name: str) -> str:
    if name.isupper():
        return name
    return f"--{name.replace('_', '-')}"


def _check_speculation() -> ServerRefusal | None:
    algorithm = read_argument("speculative_algorithm")
    if not algorithm:
        return None
    if algorithm not in LAST_ROW_DRAFTS:
        return ServerRefusal(SPECULATIVE.text)
    if any(map(read_argument, _HIDDEN_STATE_ARGUMENTS)):
        return ServerRefusal(f"{HIDDEN_STATES}, with speculative decoding")
    if read_argument("disaggregation_mode") not in (None, "null"):  # not tested
        return ServerRefusal(f"{SPECULATIVE} with prefill-decode disaggregation")
    return None


def _check_hidden_states() -> ServerRefusal | None:
    # SGLang then captures every row of every batch, requested or not.
    mode = read_argument("return_hidden_states_mode")
    if mode == "full" or (read_argument("enable_return_hidden_states") and mode != "last"):
        return ServerRefusal(HIDDEN_STATES.text)
    return None


def _check_table() -> ServerRefusal | None:
    for reason, names in UNSUPPORTED_ARGUMENTS.items():
        for name in names:
            value = read_argument(name) or compat.server.read_variable(name)
            if isinstance(value, int | float):
                value = value > int(name in _HARMLESS_AT_1)
            if value:
                return ServerRefusal(reason)
    return None


# -- attention backends ----------------------------------------------------------------------------

NO_TAIL = ServerRefusal("no attention backend could be built for the tail")


def find_backend_reason(main: Any, table: compat.backends.BackendTable) -> ServerRefusal | None:
    """Return why the server's attention backend rules out fast prefill for a model, or None.

    Args:
        main: the server's attention backend.
        table: the model's (``compat/backends.py``).
    """
    for part in compat.attention.list_parts(main):
        name = type(part).__name__
        unknown = ServerRefusal(f"the attention backend {name} is not known to be correct")
        known = table.get(compat.backends.get_path(type(part)))
        if known is None:
            return unknown
        if not known.is_admitted:
            return known.reason or unknown
    return None


# -- pools of K and V ------------------------------------------------------------------------------

# A variable of SGLang 0.5.23: the pools do not exist yet when the tail is captured and checked.
ALLOCATED_LATER = ServerRefusal(
    "K and V get their memory after CUDA graphs are captured: unset "
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
)


def find_pool_reason(pool: Any, dtype: torch.dtype) -> ServerRefusal | None:
    """Return why the tail cannot read K and V of this server, or None.

    It needs one tensor of K and one of V per layer, slot by slot, unquantised. If the cache's dtype
    is not the queries', Triton's own forward fails at the first shared layer.

    Args:
        pool: the runner's ``token_to_kv_pool``.
        dtype: the dtype of the model's weights and activations.
    """
    parts = [pool]
    if type(pool) is compat.pools.SWAKVPool:
        parts = [pool.full_kv_pool, pool.swa_kv_pool]
    for part in parts:
        if type(part) is not compat.pools.MHATokenToKVPool:
            name = type(part).__name__
            return ServerRefusal(f"K and V are in a {name}, whose layout is not known")
        if compat.pools.is_allocated_later(part):
            return ALLOCATED_LATER
        method = compat.pools.find_quantisation(part)
        if method is not None:
            return ServerRefusal(f"K and V are quantised ({method})")
        most = max(buffer.dim() for buffer in (*part.k_buffer, *part.v_buffer))
        if most != 3:
            return ServerRefusal(f"K and V are not stored slot by slot, but in {most} dimensions")
    if pool.dtype == dtype:
        return None
    return ServerRefusal(f"a KV cache of {pool.dtype} with weights of {dtype}")


# -- layers with weights ---------------------------------------------------------------------------

# SGLang's classes, with the scheme if a class has schemes. All others are refused, including those
# of other packages and platforms. The activation scales of the listed ones are per row, per block,
# or from the checkpoint: a scale from the batch's maximum would change when other rows are missing.
# GGUF is not listed because it rounds few rows differently from many.
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


def find_linear_reason(model: Any, first: int) -> ServerRefusal | None:
    """Return why rows of this model's tail may depend on rows that would be dropped, or None.

    Args:
        model: a text model with a tail and loaded weights.
        first: S, the index of its first KV-shared layer.
    """
    for layer in list(getattr(model, "layers", ()))[first - 1 :]:
        for part in layer.modules():
            if _computes_rows(part) and not has_independent_rows(part):
                return ServerRefusal(f"rows of {get_linear_kind(part)} may depend on each other")
    return None


def _computes_rows(part: Any) -> bool:
    """Return True for linear layers, experts, and other modules with a quantisation method."""
    if type(part) is compat.attention.RadixAttention:
        return False  # its method quantises the cache, which ``find_pool_reason`` checks
    return (
        isinstance(part, compat.layers.LinearBase)
        or getattr(part, "quant_method", None) is not None
    )


def get_linear_kind(layer: Any) -> str:
    """Return the class names of a layer's method and, if it has one, its scheme."""
    method, scheme = type(layer.quant_method).__name__, getattr(layer, "scheme", None)
    if scheme is None:
        return method
    return f"{method}.{type(scheme).__name__}"


def has_independent_rows(layer: Any) -> bool:
    """Return True if each output row of a layer is known to depend on its own input row alone.

    Never True for a mixture of experts: experts may be chosen, or rounded, for a whole batch.
    """
    method, kind = layer.quant_method, get_linear_kind(layer)
    is_sglangs = type(method).__module__.startswith("sglang.srt.")
    if not (isinstance(layer, compat.layers.LinearBase) and is_sglangs):
        return False
    if kind == "UnquantizedLinearMethod":
        return compat.layers.is_plain_tensor(layer.weight)
    if kind == "BitsAndBytesLinearMethod":  # in 8 bits, columns are selected by all rows together
        return not method.quant_config.load_in_8bit
    # On AMD fp8 often has one scale for the whole batch, and mxfp8 other weights for few rows.
    on_amd = torch.version.hip is not None
    return kind in _INDEPENDENT_ROWS and not (on_amd and "Fp8" in kind)
