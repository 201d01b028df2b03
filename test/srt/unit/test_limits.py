"""What refuses a server: the rules, on SGLang's arguments and classes, without a device.

That what is admitted gives stock's answers is shown by forwards and servers.
"""

from __future__ import annotations

import ast
import inspect
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from packaging.version import Version
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.torch_flex_backend import TorchFlexAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization import get_quantization_config, marlin_utils
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig

from reviewed_arguments import installed
from sglang_gemma4_reference import releases
from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.loading import limits
from stand_ins import Doubled, Packed, skip_on_older

pytestmark = pytest.mark.usefixtures("outside_of_a_server")
NAMES_CHANGE = pytest.mark.skipif(
    Version(version("sglang")) != seams.LAST_TESTED, reason="names come and go between releases"
)

# ---------------------------------------------------------------- arguments

HIDDEN_STATES_OF_DRAFTS = f"{limits.HIDDEN_STATES}, beside speculative decoding"
DRAFTS_BESIDE_ROLES = f"{limits.SPECULATIVE} beside prefill-decode disaggregation"
SERVERS: list[tuple[dict[str, Any], str | None]] = [
    ({"enable_deterministic_inference": True}, "deterministic inference"),
    ({"enable_two_batch_overlap": True}, "two-batch overlap"),
    ({"enable_lora": True}, limits.LORA),
    ({"speculative_algorithm": "EAGLE"}, limits.SPECULATIVE),
    ({"speculative_algorithm": "EAGLE3"}, limits.SPECULATIVE),
    ({"speculative_algorithm": "DFLASH"}, limits.SPECULATIVE),
    ({"speculative_algorithm": "NGRAM"}, None),
    ({"speculative_algorithm": "STANDALONE"}, None),
    ({"tp_size": 2}, None),
    ({"pp_size": 2}, limits.PIPELINE),
    ({"dp_size": 2}, None),
    ({"attn_dp_size": 2}, limits.DP_ATTENTION),
    ({"enable_dp_attention": True}, limits.DP_ATTENTION),
    ({"enable_dp_lm_head": True}, limits.DP_ATTENTION),
    ({"enable_dense_mlp_attn_tp": True}, limits.DP_ATTENTION),
    ({"moe_dense_tp_size": 1}, limits.DP_ATTENTION),
    ({"attn_cp_size": 2}, limits.CONTEXT_PARALLEL),
    ({"dcp_size": 2}, limits.CONTEXT_PARALLEL),
    ({"enable_prefill_cp": True}, limits.CONTEXT_PARALLEL),
    ({"enable_kv_cache_sharding": True}, limits.CONTEXT_PARALLEL),
    ({"enable_layernorm_sp": True}, limits.SEQUENCE_PARALLEL),
    ({"enable_attn_tp_input_scattered": True}, limits.SEQUENCE_PARALLEL),
    ({"disable_attn_tp_gather": True}, limits.SEQUENCE_PARALLEL),
    ({"ep_size": 2}, limits.EXPERT_PARALLEL),
    ({"moe_dp_size": 2}, limits.EXPERT_PARALLEL),
    ({"dwdp_size": 2}, limits.EXPERT_PARALLEL),
    ({"elastic_ep_backend": "mooncake"}, limits.EXPERT_PARALLEL),
    ({"enable_single_batch_overlap": True}, "single-batch overlap"),
    ({"enable_pdmux": True}, "PD multiplexing"),
    ({"forward_hooks": [{"name": "a"}]}, limits.HOOKS),
    ({"debug_tensor_dump_output_folder": "/dumps"}, limits.HOOKS),
    ({"msprobe_dump_config": "dump.json"}, limits.HOOKS),
    ({"cpu_offload_gb": 1}, limits.OFFLOADED),
    ({"offload_group_size": 1}, limits.OFFLOADED),
    ({"offload_group_size": -1}, None),
    ({"enable_unified_memory": True}, "pools of K and V that share and move their memory"),
    ({"enable_page_major_kv_layout": True}, "K and V that lie page by page"),
    ({"enable_lmcache": True}, limits.FOREIGN_CACHE),
    ({"enable_flexkv": True}, limits.FOREIGN_CACHE),
    ({"enable_unified_cache_external_linker": True}, limits.FOREIGN_CACHE),
    ({"radix_cache_backend": "flexkv"}, limits.FOREIGN_CACHE),
    ({"dllm_algorithm": "LowConfidence"}, "a diffusion language model's forward modes"),
    ({"enable_nvidia_megakernel": True}, limits.ONE_KERNEL),
    ({"enable_amd_monokernel": True}, limits.ONE_KERNEL),
    ({"use_ray": True}, "ranks that Ray places, on several machines it may be"),
    ({"nnodes": 2}, "ranks on several machines"),
    (
        {"enable_quant_communications": True},
        "all-reduces that round prefill otherwise than decode",
    ),
    ({"disaggregation_mode": "decode"}, None),
    ({"disaggregation_mode": "prefill"}, None),
    ({"disaggregation_mode": "prefill", "enable_pd_role_switch": True}, None),
    (
        {"speculative_algorithm": "FROZEN_KV_MTP", "disaggregation_mode": "prefill"},
        DRAFTS_BESIDE_ROLES,
    ),
    (
        {"speculative_algorithm": "FROZEN_KV_MTP", "disaggregation_mode": "decode"},
        DRAFTS_BESIDE_ROLES,
    ),
    ({"speculative_algorithm": "FROZEN_KV_MTP", "disaggregation_mode": "null"}, None),
    ({"speculative_algorithm": "FROZEN_KV_MTP", "tp_size": 2}, None),
    *(
        ({"speculative_algorithm": "FROZEN_KV_MTP", name: value}, HIDDEN_STATES_OF_DRAFTS)
        for name, value in (
            ("enable_return_hidden_states", True),
            ("return_hidden_states_mode", "last"),
            ("enable_return_aux_hidden_states", True),
        )
    ),
    ({"speculative_algorithm": "FROZEN_KV_MTP"}, None),
    ({"enable_return_hidden_states": True}, limits.HIDDEN_STATES),
    ({"return_hidden_states_mode": "full"}, limits.HIDDEN_STATES),
    ({"enable_return_hidden_states": True, "return_hidden_states_mode": "last"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("arguments", "reason"), SERVERS)
def test_servers(arguments: dict[str, Any], reason: str | None) -> None:
    skip_on_older("ServerArgs", releases.unknown_arguments(arguments))
    with releases.published(**arguments):
        assert limits.server_reason() == reason


def test_every_argument_that_refuses_has_a_row() -> None:
    refused = {next(iter(row)): reason for row, reason in SERVERS if len(row) == 1}
    tables = limits._REFUSING_ARGUMENTS | limits._REFUSING_SIZES
    assert {name: refused.get(name) for name in tables} == tables
    with_drafts = {
        name for row, reason in SERVERS for name in row if reason == HIDDEN_STATES_OF_DRAFTS
    }
    assert with_drafts - {"speculative_algorithm"} == set(limits._HIDDEN_STATE_ARGUMENTS)


def test_what_refuses_is_unset_by_default() -> None:
    with releases.published():
        argument = seams.server_arguments()
        assert argument is not None
        assert [name for name in limits._REFUSING_ARGUMENTS if argument(name)] == []


@pytest.mark.parametrize("value", ["1", "0"])
@pytest.mark.parametrize("backend", [Backend.BREAKABLE, Backend.FULL, Backend.DISABLED, None])
def test_copied_positions_are_refused_beside_prefill_graphs(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, value: str
) -> None:
    """Before anything else is looked at: stock's own answers are at stake."""
    monkeypatch.setenv(seams.POSITIONS_VARIABLE, value)
    config = None if backend is None else CudaGraphConfig(prefill=PhaseConfig(backend=backend))
    wrong = value == "1" and backend not in (None, Backend.DISABLED)
    with releases.published(cuda_graph_config=config):
        assert limits.server_reason() == (limits.WRONG_REPLAYS if wrong else None)
    with releases.published(cuda_graph_config=config, enable_deterministic_inference=True):
        other = "deterministic inference"
        assert limits.server_reason() == (limits.WRONG_REPLAYS if wrong else other)
    assert seams.POSITIONS_VARIABLE in limits.WRONG_REPLAYS
    assert "unset it" in limits.WRONG_REPLAYS


# ---------------------------------------------------------------- all arguments there are


def test_every_argument_of_this_release_is_judged_in_one_place() -> None:
    """What SGLang has changed since shows here first: scripts/dev/reviewed_arguments.py."""
    judged, reviewed = limits.judged_arguments(), limits.reviewed_arguments()
    assert installed() - judged - reviewed == set()
    assert judged & reviewed == set()
    if Version(version("sglang")) == seams.LAST_TESTED:
        assert judged - installed() == set()


def test_every_argument_that_is_asked_for_is_judged() -> None:
    """By name, in a function: else a newer SGLang's name for it would not be missed."""
    asked = {
        str(node.args[0].value)
        for node in ast.walk(ast.parse(inspect.getsource(limits)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "argument"
        and isinstance(node.args[0], ast.Constant)
    }
    assert asked - set(limits._HIDDEN_STATE_ARGUMENTS) == set(limits._OTHER_ARGUMENTS)


JUDGED = sorted(limits.judged_arguments())
LIST = {**dict.fromkeys(limits.reviewed_arguments(), True), **dict.fromkeys(JUDGED, False)}
NEW = "--enable-surprises is set, an argument that this version has not judged"
GONE = "this SGLang lacks --pp-size, which may go by another name now"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (LIST, None),
        (LIST | {"enable_surprises": False}, None),
        (LIST | {"enable_surprises": True, "surprise_size": True}, NEW),
        (LIST | {"enable_lora": True}, None),  # what is set is looked at in a server
        *(
            (
                {name: given for name, given in LIST.items() if name != gone},
                GONE.replace("pp-size", gone.replace("_", "-")),
            )
            for gone in JUDGED
        ),
    ],
)
def test_a_newer_release(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, bool], reason: str | None
) -> None:
    """Unknown means no. In a tested one there is nothing unknown, and nothing is looked for."""
    monkeypatch.setattr(seams, "arguments_set", lambda: arguments)
    assert limits.server_reason() is None
    monkeypatch.setattr(seams, "is_newer_than_tested", lambda: True)
    assert limits.server_reason() == reason


class Later(msgspec.Struct):
    model_path: str
    sizes: list[int] = msgspec.field(default_factory=list)
    mode: str | None = None


@pytest.mark.parametrize(
    ("given", "is_set"),
    [
        ({}, set()),
        ({"model_path": "path"}, {"model_path"}),
        ({"sizes": [], "mode": None}, set()),
        ({"sizes": [1]}, {"sizes"}),
        ({"mode": "auto"}, {"mode"}),
    ],
)
def test_what_is_set(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], is_set: set[str]
) -> None:
    monkeypatch.setattr(seams, "ServerArgs", Later)
    monkeypatch.setattr(seams, "get_server_args", lambda: SimpleNamespace(**given))
    names = ("model_path", "sizes", "mode")
    assert seams.arguments_set() == {name: name in is_set for name in names}


def test_arguments_that_cannot_be_listed_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "is_newer_than_tested", lambda: True)
    monkeypatch.setattr(seams, "ServerArgs", SimpleNamespace)
    reason = "the server's arguments are no record whose fields can be listed"
    assert limits.server_reason() == reason


# ---------------------------------------------------------------- attention backends


class Derived(TritonAttnBackend):
    """Of a class that is derived from a known one nobody knows what it does otherwise."""


class Foreign(AttentionBackend):
    """Another package's."""


Namesake = type("TritonAttnBackend", (AttentionBackend,), {"__module__": "another.package"})


def of(kind: type, **attributes: Any) -> Any:
    """An object of the class that was never initialised."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


def named(name: str) -> Any:
    """One of a class by this name of SGLang's, whose module this machine may be unable to import.

    Their names in the installed release are compared by ``test_the_listed_classes_exist``.
    """
    kind = type(name, (AttentionBackend,), {"__module__": "sglang.srt.layers.attention.some"})
    return of(kind)


def hybrid(prefill: Any, decode: Any) -> Any:
    return of(HybridAttnBackend, prefill_backend=prefill, decode_backend=decode)


def unproven(name: str) -> str:
    return f"the attention backend {name} is not proven"


TRTLLM = named("TRTLLMHAAttnBackend")
MAINS = [
    (of(TritonAttnBackend), None),
    (TRTLLM, None),
    (named("XPUAttentionBackend"), None),
    (named("FlashAttentionBackend"), None),
    (named("AiterAttnBackend"), unproven("AiterAttnBackend")),
    (named("AscendAttnBackend"), unproven("AscendAttnBackend")),
    (named("IntelAMXAttnBackend"), unproven("IntelAMXAttnBackend")),
    (named("TboAttnBackend"), unproven("TboAttnBackend")),
    (of(TorchFlexAttnBackend), unproven("TorchFlexAttnBackend")),
    (of(TorchNativeAttnBackend), unproven("TorchNativeAttnBackend")),
    (of(Derived), unproven("Derived")),
    (of(Namesake), unproven("TritonAttnBackend")),
    (of(Foreign), unproven("Foreign")),
    (hybrid(TRTLLM, of(TritonAttnBackend)), None),
    (hybrid(of(TritonAttnBackend), TRTLLM), None),
    (hybrid(named("AiterAttnBackend"), TRTLLM), unproven("AiterAttnBackend")),
    (hybrid(TRTLLM, named("AiterAttnBackend")), unproven("AiterAttnBackend")),
    (type("HybridAttnBackend", (AttentionBackend,), {})(), unproven("HybridAttnBackend")),
]


@pytest.mark.parametrize(("main", "reason"), MAINS)
def test_mains(main: Any, reason: str | None) -> None:
    assert limits.backend_reason(main) == reason


def test_another_packages_backend_is_entered_by_its_whole_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    abilities = frozenset({limits.Ability.MAIN, limits.Ability.TAIL})
    monkeypatch.setitem(limits.PROVEN_BACKENDS, f"{__name__}.Foreign", abilities)
    assert limits.backend_reason(of(Foreign)) is None
    assert limits.tail_backend_reason(of(Foreign)) is None
    heir = type("Heir", (Foreign,), {})
    assert limits.backend_reason(of(heir)) == unproven("Heir")


def test_the_listed_classes_exist() -> None:
    """Under these names, in modules of SGLang's that need another device to be imported."""
    modules = seams.gemma4_causal.__file__.replace("models/gemma4_causal.py", "layers/attention/")
    files = {
        "TritonAttnBackend": "triton",
        "TRTLLMHAAttnBackend": "trtllm_mha",
        "FlashAttentionBackend": "flashattention",
        "XPUAttentionBackend": "xpu",
    }
    for name, file in files.items():
        assert f"\nclass {name}(" in Path(f"{modules}{file}_backend.py").read_text()
    assert files.keys() == {name for name in limits.PROVEN_BACKENDS if "." not in name}


@pytest.mark.parametrize(
    ("backend", "alone"),
    [
        (of(TritonAttnBackend), True),
        (of(Derived), False),
        (TRTLLM, False),
        (hybrid(of(TritonAttnBackend), of(TritonAttnBackend)), False),
    ],
)
def test_what_may_be_planned_anew_at_the_cut(backend: Any, alone: bool) -> None:
    """Never one that merely may be main: its decode steps are shown by nobody."""
    reason = f"the tail cannot run on the attention backend {type(backend).__name__}"
    assert limits.tail_backend_reason(backend) == (None if alone else reason)


# ---------------------------------------------------------------- pools


def pool(kind: type = MHATokenToKVPool, *, dims: int = 3, **attributes: Any) -> Any:
    buffers = [torch.zeros((2,) * dims) for _ in range(2)]
    fields = {"k_buffer": buffers, "v_buffer": buffers, "dtype": torch.float32}
    return of(kind, **(fields | attributes))


def both(full: Any, window: Any) -> Any:
    return of(SWAKVPool, full_kv_pool=full, swa_kv_pool=window, dtype=torch.float32)


class PoolOfAnotherKind(MHATokenToKVPool):
    pass


def quantised(method: str) -> Any:
    return pool(quant_method=SimpleNamespace(name=method))


UNKNOWN = "K and V lie in a PoolOfAnotherKind, whose layout is not known"
POOLS = [
    (pool(), None),
    (both(pool(), pool()), None),
    (quantised("unquantized"), None),
    (quantised("nvfp4"), "K and V are quantised (nvfp4)"),
    (pool(PoolOfAnotherKind), UNKNOWN),
    (both(pool(PoolOfAnotherKind), pool()), UNKNOWN),
    (both(pool(), pool(PoolOfAnotherKind)), UNKNOWN),
    (both(pool(), quantised("mxfp8")), "K and V are quantised (mxfp8)"),
    (pool(dims=4), "K and V do not lie slot by slot, but in 4 dimensions"),
    (both(pool(), pool(dims=5)), "K and V do not lie slot by slot, but in 5 dimensions"),
    *(
        (pool(dtype=dtype), f"a KV cache of {dtype} beside weights of torch.float32")
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    ),
]


@pytest.mark.parametrize(("of_server", "reason"), POOLS)
def test_pools(of_server: Any, reason: str | None) -> None:
    assert limits.pool_reason(of_server, torch.float32) == reason


# ---------------------------------------------------------------- linear layers


def linear(config: Any = None) -> Any:
    """A linear layer of SGLang's own."""
    return ReplicatedLinear(128, 128, quant_config=config)


def of_class(name: str, module: str = "sglang.srt.layers.a", **values: Any) -> Any:
    """A layer of a kind that a CPU does not build: an object of a class of this name."""
    method = type(name, (), {"__module__": module} | values)()
    scheme = values.get("scheme")
    made = {} if scheme is None else {"scheme": type(scheme, (), {})()}
    return SimpleNamespace(quant_method=method, **made)


@pytest.mark.parametrize(
    "config",
    [None, Fp8Config(is_checkpoint_fp8_serialized=True), W8A8Int8Config()],
    ids=["plain", "fp8", "int8"],
)
def test_layers_that_sglang_builds_here(config: Any) -> None:
    assert limits.has_independent_rows(linear(config))


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"all": group},
        "ignore": [],
    }


_EIGHT_INTS = {"num_bits": 8, "type": "int", "symmetric": True}
_EIGHT_FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
_FOUR_INTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
_BY_CHANNEL, _BY_TOKEN = {"strategy": "channel"}, {"strategy": "token", "dynamic": True}
_BLOCKS = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
# What a checkpoint's config.json says: SGLang's name of the method, the entry, the class or scheme
# that SGLang makes of it.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "AWQ": ("awq", _AWQ, "AWQLinearScheme"),
    "AWQ, Marlin": ("awq_marlin", _AWQ, "AWQMarlinLinearScheme"),
    "GPTQ, Marlin": ("gptq_marlin", _GPTQ, "GPTQMarlinLinearScheme"),
    "auto-round": (
        *("auto-round", {**_GPTQ, "packing_format": "auto_round:auto_gptq", "data_type": "int"}),
        "GPTQMarlinLinearScheme",
    ),
    "compressed-tensors, 4 bits": (
        "compressed-tensors",
        _compressed(_FOUR_INTS | {"group_size": 32}, None, "pack-quantized"),
        "CompressedTensorsWNA16",
    ),
    "compressed-tensors, int8": (
        "compressed-tensors",
        _compressed(_EIGHT_INTS | _BY_CHANNEL, _EIGHT_INTS | _BY_TOKEN, "int-quantized"),
        "CompressedTensorsW8A8Int8",
    ),
    "compressed-tensors, fp8": (
        "compressed-tensors",
        _compressed(_EIGHT_FLOATS | _BY_CHANNEL, _EIGHT_FLOATS | _BY_TOKEN, "float-quantized"),
        "CompressedTensorsW8A8Fp8",
    ),
    "ModelOpt, fp8": ("modelopt_fp8", {"quant_algo": "FP8"}, "ModelOptFp8LinearMethod"),
    "ModelOpt, nvfp4": (
        *("modelopt_fp4", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}),
        "ModelOptFp4LinearMethod",
    ),
    "fp8 of channels": (
        *("w8a8_fp8", {"quant_method": "w8a8_fp8", "is_dynamic": True}),
        "W8A8Fp8LinearMethod",
    ),
    "int8 of blocks": (
        *("blockwise_int8", {"quant_method": "blockwise_int8", **_BLOCKS}),
        "BlockInt8LinearMethod",
    ),
    "fp8 of blocks": ("fp8", {"quant_method": "fp8", **_BLOCKS}, "Fp8LinearMethod"),
    "mxfp8": ("mxfp8", {"quant_method": "mxfp8", **_BLOCKS}, "Fp8LinearMethod"),
    "GGUF": ("gguf", {}, "GGUFLinearMethod"),
}


@NAMES_CHANGE
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_layers_of_popular_checkpoints(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """SGLang's own classes of them, built as for a Hopper GPU; their kernels need one."""
    for module in (torch.cuda, marlin_utils):
        monkeypatch.setattr(module, "get_device_capability", lambda *_: (9, 0))
    method, entry, kind = CHECKPOINTS[name]
    config = get_quantization_config(method).from_config(entry)
    config.packed_modules_mapping = {}
    layer = ReplicatedLinear(
        *(128, 128),
        quant_config=config,
        params_dtype=torch.bfloat16,
        prefix="model.layers.1.self_attn.qkv_proj",
    )
    assert limits.linear_kind(layer).endswith(kind)
    assert limits.has_independent_rows(layer) == (name != "GGUF")
    assert not seams.is_plain_linear(layer)  # so that layer K-1 computes all of its projection


@pytest.mark.parametrize("name", sorted(limits._INDEPENDENT_ROWS))
def test_a_kind_is_known_by_its_own_names_in_sglang(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A scheme beside its method. On AMD fp8 may have one scale for all rows."""
    method, _, scheme = name.partition(".")
    values = {"scheme": scheme} if scheme else {}
    assert limits.has_independent_rows(of_class(method, **values))
    for other in (
        of_class(method, "sglang.multimodal_gen.a", **values),
        of_class(f"{method}V2", **values),
        of_class(method, scheme="Another"),
    ):
        assert not limits.has_independent_rows(other)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert limits.has_independent_rows(of_class(method, **values)) == ("Fp8" not in name)
    assert limits.has_independent_rows(linear())


def test_a_class_that_is_derived_from_a_known_one_is_not_known() -> None:
    layer = linear()
    layer.quant_method = Doubled()
    assert not limits.has_independent_rows(layer)


def test_weights_of_a_class_of_their_own_are_not_known() -> None:
    layer = linear()
    assert type(layer.quant_method) is UnquantizedLinearMethod
    layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(Packed), requires_grad=False)
    assert not limits.has_independent_rows(layer)


@pytest.mark.parametrize("eight_bits", [True, False])
def test_eight_bits_of_bitsandbytes_pick_columns_by_all_rows(eight_bits: bool) -> None:
    config = SimpleNamespace(load_in_8bit=eight_bits)
    layer = of_class("BitsAndBytesLinearMethod", quant_config=config)
    assert limits.has_independent_rows(layer) != eight_bits


def known() -> Any:
    return torch.nn.Sequential(linear(), torch.nn.Linear(2, 2))


@pytest.mark.parametrize("place", range(4))
def test_a_tail_of_layers_that_are_not_known_is_refused(place: int) -> None:
    """From the last donor on, of whose rows all but the kept ones are dropped."""
    layers = [known() for _ in range(4)]
    layers[place][0].quant_method = Doubled()
    reason = limits.linear_reason(SimpleNamespace(layers=layers), first=2)
    assert reason == (None if place == 0 else "rows of Doubled may depend on each other")


def classes_of_this_release() -> set[str]:
    """The names of all classes in SGLang's sources; many of them cannot be imported on a CPU."""
    spec = find_spec("sglang.srt")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    sources = [
        *folder.glob("layers/quantization/**/*.py"),
        *folder.glob("hardware_backend/**/*.py"),
    ]
    return {
        node.name
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ClassDef)
    }


@NAMES_CHANGE
def test_every_name_is_one_of_sglangs() -> None:
    names = {part for kind in limits._INDEPENDENT_ROWS for part in kind.split(".")}
    assert names - classes_of_this_release() == set()
