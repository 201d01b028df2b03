"""Refusals by the release of SGLang, by server arguments and by environment variables."""

import logging
from collections.abc import Mapping

from sglang_gemma4_yoco import log, settings
from sglang_gemma4_yoco.compat import release, server
from sglang_gemma4_yoco.compat.server import FAST_PREFILL, POSITIONS_VARIABLE, read_argument
from sglang_gemma4_yoco.core.eligibility import (
    CAPTURED_LAYERS,
    HIDDEN_STATES,
    LAST_ROW_DRAFTS,
    SPECULATIVE,
)
from sglang_gemma4_yoco.refusal import ServerRefusal

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
DRAFTS = ServerRefusal(SPECULATIVE.text)
DUMPER = ServerRefusal(
    "SGLang's dumper may dump any row: unset DUMPER_ENABLE and DUMPER_SERVER_PORT"
)
CANARY = ServerRefusal(
    "SGLang's KV canary would take the check's synthetic requests for violations: leave "
    "--kv-canary out"
)

#: By reason, arguments and (in capitals) environment variables that refuse a server if set.
REFUSING_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "LoRA": ("enable_lora",),
    "pipeline parallelism is not supported": ("pp_size",),
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
    # With it K and V may not exist yet when the tail is captured and checked.
    "K and V that may get their memory after CUDA graphs are captured": (
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
    ),
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
    "SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION",
}


def list_judged_arguments() -> set[str]:
    """Return the server arguments and environment variables that can refuse a server."""
    return (_JUDGED_BY_VALUE | _HIDDEN_STATE_ARGUMENTS).union(*REFUSING_ARGUMENTS.values())


def find_release_reason() -> ServerRefusal | None:
    """Return why no prefill is cut on the installed release of SGLang, or None.

    With the setting ``untested`` prefills are cut on a release after the last tested one if the
    self-check passes. A refusing argument that was renamed must not pass as unset. SGLang's own
    fast prefill, if on, is the reason on any release.
    """
    if not release.is_newer_than_tested() or read_argument(FAST_PREFILL):
        return None
    installed = release.INSTALLED
    untested = settings.name_of("untested")
    gone = [name for name in list_judged_arguments() if not server.has_name(name)]
    if not settings.current.untested:
        reason = (
            f"SGLang {installed} is newer than the tested releases, "
            f"{release.FIRST_TESTED} to {release.LAST_TESTED}: "
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


def note_untested_release() -> None:
    """Warn if prefills are cut on a release after the last tested one."""
    if release.is_newer_than_tested():
        log.log_warning(
            f"YOCO fast prefill: SGLang {release.INSTALLED} was not tested, and "
            f"{settings.name_of('untested')}=1: {RUNS_UNTESTED}"
        )


def find_server_reason() -> ServerRefusal | None:
    """Return why this server's release, flags or environment rule out fast prefill, or None."""
    return find_release_reason() or find_argument_reason()


def find_argument_reason() -> ServerRefusal | None:
    """Return why the arguments or variables of this server refuse every batch, or None."""
    if read_argument(FAST_PREFILL):
        return SGLANG_SERVES
    replays = server.get_cuda_graph_backend("prefill")
    if replays and server.read_variable(POSITIONS_VARIABLE):
        return WRONG_REPLAYS
    # The dumper is on, or can be turned on over HTTP. If neither holds when the model is loaded, it
    # has no hooks and never dumps a tensor.
    if server.dumper.may_enable:
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
        return DRAFTS
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
    if read_argument("enable_return_aux_hidden_states"):
        return ServerRefusal(CAPTURED_LAYERS.text)
    return None


def _check_table() -> ServerRefusal | None:
    for reason, names in REFUSING_ARGUMENTS.items():
        for name in names:
            value = read_argument(name) or server.read_variable(name)
            if isinstance(value, int | float):
                value = value > int(name in _HARMLESS_AT_1)
            if value:
                return ServerRefusal(f"{reason} ({_name_flag(name)})")
    return None
