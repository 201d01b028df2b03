"""What the server's arguments say: reasons why no batch of it may be cut. Constant for a server.

An argument that the installed SGLang does not have counts as unset. One that is set and that nobody
has judged is a reason too; ``harmless`` lists those that are none, and why.
"""

from __future__ import annotations

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.deciding import harmless

PIPELINE = "pipeline parallelism (--pp-size) is not supported"
HIDDEN_STATES = "hidden states of all rows are returned"
SPECULATIVE = "speculative decoding"
DP_ATTENTION = "data-parallel attention"
SEQUENCE_PARALLEL = "sequence parallelism"
CONTEXT_PARALLEL = "context parallelism"
EXPERT_PARALLEL = "expert parallelism"
TWO_BATCH_OVERLAP = "two-batch overlap"
LORA = "LoRA"
HOOKS = "forward hooks, which may read any row"
OFFLOADED = "weights that come to the device for their layer's own forward only"
FOREIGN_CACHE = "a cache that may load K and V while layers run"
ONE_KERNEL = "one kernel in the place of the model's layers"
# Not the package's affair, but it would be taken for one: what stock answers there is the measure.
WRONG_REPLAYS = (
    f"{seams.POSITIONS_VARIABLE} beside prefill CUDA graphs makes SGLang's own answers wrong: "
    "unset it"
)

# Frozen-KV MTP captures FULL, and of it reads the last row of each prompt: its draft model has no
# K/V of its own that prompt rows would have to fill, and attends to the target's.
LAST_ROW_DRAFTS = ("FROZEN_KV_MTP",)

# With one of these set, a FULL capture may be a request's wish to see every row.
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
    "enable_two_batch_overlap": TWO_BATCH_OVERLAP,
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
# Those that ``server_reason`` asks for by name.
_OTHER_ARGUMENTS = (
    "speculative_algorithm",
    "disaggregation_mode",
    "offload_group_size",
)


def server_reason() -> str | None:
    """Why no batch of this server may take the fast path, or None. Constant for a server."""
    argument = seams.server_arguments()
    if argument is None:
        return None
    if seams.prefill_graph() is not None and seams.copies_positions():
        return WRONG_REPLAYS
    if argument("speculative_algorithm") not in (None, *LAST_ROW_DRAFTS):
        return SPECULATIVE
    if argument("speculative_algorithm") and any(map(argument, _HIDDEN_STATE_ARGUMENTS)):
        return f"{HIDDEN_STATES}, beside speculative decoding"
    if argument("speculative_algorithm") and argument("disaggregation_mode") not in (None, "null"):
        return f"{SPECULATIVE} beside prefill-decode disaggregation"  # not shown
    # For whoever might ask, SGLang captures every row of every batch.
    mode = argument("return_hidden_states_mode")
    if mode == "full" or (argument("enable_return_hidden_states") and mode != "last"):
        return HIDDEN_STATES
    for name, reason in _REFUSING_ARGUMENTS.items():
        if argument(name):
            return reason
    for name, reason in _REFUSING_SIZES.items():
        if (argument(name) or 1) > 1:
            return reason
    if (argument("offload_group_size") or 0) > 0:  # -1 is none, and one layer a group
        return OFFLOADED
    try:
        unjudged = seams.set_arguments(but_for=harmless.NAMES | judged())
    except seams.SeamError as unlisted:
        return str(unlisted)
    if unjudged:
        return f"{unjudged[0]} is set, an argument that this version has not judged"
    return None


def judged() -> frozenset[str]:
    """The server arguments that are judged here."""
    return frozenset(
        (*_OTHER_ARGUMENTS, *_HIDDEN_STATE_ARGUMENTS, *_REFUSING_ARGUMENTS, *_REFUSING_SIZES)
    )
