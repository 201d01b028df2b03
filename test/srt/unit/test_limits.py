"""Reasons to refuse a server: its arguments, attention, pools of K and V, and linear layers.

Each reason is tested here, and what SGLang has changed since shows here first. That a refused
server runs as stock is shown once on a runner (``forward/test_refused``) and once on a server
(``server/test_untested_server``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt
import torch
from packaging.version import Version
from sglang.srt.debug_utils.dumper import dumper
from sglang.srt.environ import envs
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization import get_quantization_config, marlin_utils
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from harness.stand_ins import server_args, skip_on_older
from scripts.dev import reviewed_arguments
from sglang_gemma4_reference import releases
from sglang_gemma4_yoco import compat, settings
from sglang_gemma4_yoco.admission import arguments, runner_parts, weights
from sglang_gemma4_yoco.commands import preflight
from sglang_gemma4_yoco.commands.console import Report
from sglang_gemma4_yoco.compat.backends import AITER, AMX, ASCEND, TRITON, XPU
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.refusal import ServerRefusal

pytestmark = pytest.mark.usefixtures("outside_of_a_server")
NAMES_CHANGE = pytest.mark.skipif(
    Version(version("sglang")) != compat.release.LAST_TESTED,
    reason="needs the names of the last tested release",
)

# ---------------------------------------------------------------- arguments that refuse

DRAFTS = {"speculative_algorithm": "FROZEN_KV_MTP"}
HIDDEN_STATES_OF_DRAFTS = f"{eligibility.HIDDEN_STATES}, with speculative decoding"
DRAFTS_BESIDE_ROLES = f"{eligibility.SPECULATIVE} with prefill-decode disaggregation"
LAST = {"return_hidden_states_mode": "last"}
# What refuses a server if it has this value; for all others of the package's table it is True.
VALUES = {
    "pp_size": 2,
    "moe_dense_tp_size": 1,
    "attn_dp_size": 2,
    "attn_cp_size": 2,
    "dcp_size": 2,
    "elastic_ep_backend": "mooncake",
    "ep_size": 2,
    "moe_dp_size": 2,
    "dwdp_size": 2,
    "nnodes": 2,
    "forward_hooks": [{"name": "a"}],
    "debug_tensor_dump_output_folder": "/dumps",
    "msprobe_dump_config": "dump.json",
    "cpu_offload_gb": 1,
    "offload_group_size": 1,
    "radix_cache_backend": "flexkv",
    "dllm_algorithm": "LowConfidence",
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR": 0.5,
}
BESIDE_OTHERS: list[tuple[dict[str, Any], object]] = [
    ({"enable_return_hidden_states": True}, eligibility.HIDDEN_STATES),
    ({"return_hidden_states_mode": "full"}, eligibility.HIDDEN_STATES),
    (LAST | {"enable_return_aux_hidden_states": True}, eligibility.CAPTURED_LAYERS),
    ({"speculative_algorithm": "EAGLE"}, eligibility.SPECULATIVE),
    ({"speculative_algorithm": "DFLASH"}, eligibility.SPECULATIVE),
    (DRAFTS | {"disaggregation_mode": "decode"}, DRAFTS_BESIDE_ROLES),
    (DRAFTS | {"disaggregation_mode": "prefill"}, DRAFTS_BESIDE_ROLES),
    (DRAFTS | {"enable_return_hidden_states": True}, HIDDEN_STATES_OF_DRAFTS),
    (DRAFTS | {"enable_return_aux_hidden_states": True}, HIDDEN_STATES_OF_DRAFTS),
    (DRAFTS | LAST, HIDDEN_STATES_OF_DRAFTS),
    ({"kv_canary": "log"}, arguments.CANARY),
    ({"kv_canary": "raise"}, arguments.CANARY),
    # The variable is named, as flags are (see ``TYPED``).
    (
        {"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": True},
        "K and V that may get their memory after CUDA graphs are captured "
        "(SGLANG_ENABLE_POST_CAPTURE_KV_SIZING)",
    ),
    # These refuse nothing.
    ({}, None),
    (LAST | {"enable_return_hidden_states": True}, None),
    ({"offload_group_size": -1}, None),
    ({"disaggregation_mode": "prefill", "enable_pd_role_switch": True}, None),
    ({"speculative_algorithm": "NGRAM"}, None),
    ({"speculative_algorithm": "STANDALONE"}, None),
    (DRAFTS | {"disaggregation_mode": "null"}, None),
    ({"kv_canary": "none"}, None),
]


def refusals() -> Iterator[tuple[dict[str, Any], object]]:
    """Yield arguments of a server, and the reason for which it is refused."""
    for reason, names in arguments.REFUSING_ARGUMENTS.items():
        for name in names:
            yield {name: VALUES.get(name, True)}, f"{reason} ({arguments._name_flag(name)})"
    yield from BESIDE_OTHERS


@contextmanager
def served_with(arguments: dict[str, Any]) -> Iterator[None]:
    """Give the server these arguments and, in capitals, environment variables, in the block."""
    others = dict(arguments)
    with ExitStack() as stack:
        for name in arguments:
            if name.isupper():
                stack.enter_context(getattr(envs, name).override(others.pop(name)))
        stack.enter_context(releases.published(**others))
        yield


def assert_judged(reason: object) -> None:
    """Assert the reason for which this server is refused, or None; ``doctor`` gives it too."""
    report = Report(entries={"quantisation": None})
    assert str(arguments.find_server_reason()) == str(reason)
    preflight._judge(report, gemma4, {}.get)
    assert report.refusals == [str(reason)] * (reason is not None)


@pytest.mark.parametrize(("given", "reason"), refusals())
def test_an_argument_of_the_server(given: dict[str, Any], reason: object) -> None:
    skip_on_older("SGLang", (name for name in given if not compat.server.has_name(name)))
    with served_with(given):
        assert_judged(reason)


RANKS = {"tp_size": 2}
# As an operator types them; SGLang resolves and publishes them.
TYPED = [
    (RANKS, None),
    (
        RANKS | {"dp_size": 2, "enable_dp_attention": True},
        "data-parallel attention (--attn-dp-size)",
    ),
    (
        RANKS | {"nnodes": 2, "dist_init_addr": "127.0.0.1:5000"},
        "ranks on several machines (--nnodes)",
    ),
    ({"lora_paths": ["name=path"]}, "LoRA (--enable-lora)"),
    (
        {"enable_deterministic_inference": True},
        "deterministic inference (--enable-deterministic-inference)",
    ),
    ({"offload_group_size": 0}, None),
]


@pytest.mark.parametrize(("typed", "reason"), TYPED)
def test_what_is_typed_is_judged_as_sglang_resolves_it(
    monkeypatch: pytest.MonkeyPatch,
    tiny_checkpoint: Path,
    typed: dict[str, Any],
    reason: object,
) -> None:
    # The platform deals out cores to several ranks, which other tests must not find.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")
    args = server_args(model_path=str(tiny_checkpoint), device="cpu", **typed)
    with releases.serving(args):
        assert str(arguments.find_server_reason()) == str(reason)


# ---------------------------------------------------------------- all arguments


def test_every_argument_and_variable_is_judged_in_one_place() -> None:
    """If SGLang has added one, this fails first: run scripts/dev/reviewed_arguments.py."""
    judged, known = arguments.list_judged_arguments(), reviewed_arguments.reviewed()
    unread = reviewed_arguments.installed() - judged - known
    assert unread == set(), f"read what SGLang does with {sorted(unread)}, and list them"
    stale = judged & known
    assert stale == set(), f"run scripts/dev/reviewed_arguments.py: {sorted(stale)}"
    if Version(version("sglang")) == compat.release.LAST_TESTED:
        assert [name for name in judged if not compat.server.has_name(name)] == []


def test_every_argument_that_is_read_is_judged() -> None:
    """``arguments`` calls ``read_argument("its name")``; each such name is in its tables.

    Otherwise a new name for it in a newer SGLang would go unnoticed.
    """
    read = set(re.findall(r'\bread_argument\("(\w+)"\)', inspect.getsource(arguments)))
    judged = {name for name in arguments._JUDGED_BY_VALUE if not name.isupper()}
    assert read - arguments._HIDDEN_STATE_ARGUMENTS == judged


JUDGED = sorted(arguments.list_judged_arguments())


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Yield a function that removes a name from an enabled release after the last tested one."""
    absent: list[str] = []
    monkeypatch.setattr(compat.release, "LAST_TESTED", Version("0.5.0"))
    monkeypatch.setattr(compat.server, "has_name", lambda name: name not in absent)
    with releases.published(), settings.changed(untested=True, self_check=True):
        assert arguments.find_server_reason() is None
        yield absent.append


@pytest.mark.parametrize("name", JUDGED)
def test_what_a_newer_release_lacks(newer: Callable[[str], None], name: str) -> None:
    newer(name)
    gone = f"lacks {arguments._name_flag(name)}, which may go by another name now"
    assert str(arguments.find_server_reason()).endswith(gone)


def test_what_a_newer_release_is_given_is_judged(newer: Callable[[str], None]) -> None:
    """The tables judge it; arguments new in that release are not judged."""
    newer("enable_surprises")
    with served_with({"enable_lora": True}):
        assert arguments.find_server_reason() == ServerRefusal("LoRA (--enable-lora)")


def test_existing_and_missing_names() -> None:
    for name in ("enable_lora", "SGLANG_LOG_MS"):
        assert compat.server.has_name(name)
        assert not compat.server.has_name(f"{name}_{'BY' if name.isupper() else 'by'}")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"enable": True}, arguments.DUMPER),
        ({"server_port": "reuse"}, arguments.DUMPER),
        ({"server_port": "40000"}, arguments.DUMPER),
        ({"server_port": "-1", "filter": "layer_id=1"}, None),
    ],
)
def test_the_dumper(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], reason: ServerRefusal | None
) -> None:
    """It may be on from the start, or be turned on while the server serves."""
    monkeypatch.setattr(dumper, "_config", dumper._config)
    dumper.configure(**config)
    with releases.published():
        assert_judged(reason)


# ---------------------------------------------------------------- attention backends


def backend_of(path: str) -> Any:
    """Return an attention backend whose class has this module and name."""
    module, _, name = path.rpartition(".")
    return type(name, (), {"__module__": module})()


def hybrid(prefill: str, decode: str) -> Any:
    """Return a hybrid of one backend for prefills and one for decode steps."""
    backend = object.__new__(HybridAttnBackend)
    backend.prefill_backend = backend_of(prefill)
    backend.decode_backend = backend_of(decode)
    return backend


@pytest.mark.parametrize(
    ("backend", "unproven"),
    [
        (backend_of(TRITON), None),
        (backend_of(AITER), "AiterAttnBackend"),
        (backend_of(ASCEND), "AscendAttnBackend"),
        (backend_of(AMX), "IntelAMXAttnBackend"),
        # By the name of one of SGLang's.
        (backend_of("another.TritonAttnBackend"), "TritonAttnBackend"),
        (type("Derived", (type(backend_of(TRITON)),), {})(), "Derived"),
        (hybrid(XPU, TRITON), None),
        (hybrid(AITER, TRITON), "AiterAttnBackend"),
        (hybrid(TRITON, AITER), "AiterAttnBackend"),
    ],
)
def test_an_attention_backend(backend: Any, unproven: str | None) -> None:
    """A hybrid is as good as its parts."""
    reason = None
    if unproven is not None:
        reason = ServerRefusal(f"the attention backend {unproven} is not known to be correct")
    assert runner_parts.find_backend_reason(backend, gemma4.ATTENTION_BACKENDS) == reason


# ---------------------------------------------------------------- pools of K and V


def pool_of(kind: Any = MHATokenToKVPool, **values: Any) -> Any:
    """Return a pool of two layers whose K and V are stored slot by slot."""
    pool = object.__new__(kind)
    slots = [torch.zeros(8, 1, 4), torch.zeros(8, 1, 4)]
    vars(pool).update({"k_buffer": slots, "v_buffer": slots, **values})
    return pool


class PoolOfAnotherKind(MHATokenToKVPool):
    pass


BY_PAGES = [torch.zeros(1, 2, 3, 4)]
NOT_BY_SLOTS = "K and V are not stored slot by slot, but in 4 dimensions"
POOLS = [
    (pool_of(), None),
    (pool_of(k_buffer=BY_PAGES), NOT_BY_SLOTS),
    (pool_of(v_buffer=BY_PAGES), NOT_BY_SLOTS),
    (pool_of(quant_method=SimpleNamespace(name="nvfp4")), "K and V are quantised (nvfp4)"),
    (
        pool_of(PoolOfAnotherKind),
        "K and V are in a PoolOfAnotherKind, whose layout is not known",
    ),
]


@pytest.mark.parametrize(("part", "reason"), POOLS)
def test_a_pool(part: Any, reason: object) -> None:
    """A pool for all layers, or either of two: one that is not plain is enough."""
    two = [object.__new__(SWAKVPool), object.__new__(SWAKVPool)]
    vars(two[0]).update(full_kv_pool=part, swa_kv_pool=pool_of())
    vars(two[1]).update(full_kv_pool=pool_of(), swa_kv_pool=part)
    pools = [part, *two]
    for pool in pools:
        vars(pool)["dtype"] = torch.bfloat16
        assert str(runner_parts.find_pool_reason(pool, torch.bfloat16)) == str(reason)
        if reason is None:  # numbers of the same width
            other = "a KV cache of torch.bfloat16 with weights of torch.float16"
            assert str(runner_parts.find_pool_reason(pool, torch.float16)) == other


# ---------------------------------------------------------------- linear layers


def method(name: str, module: str = "sglang.srt.a", **values: Any) -> UnquantizedLinearMethod:
    """Return a linear layer's method, in a class of this name and module."""
    made = type(name, (UnquantizedLinearMethod,), {"__module__": module})()
    vars(made).update(values)
    return made


@dataclass(frozen=True)
class Kind:
    """A linear layer of a model whose third layer of four is the donor.

    Attributes:
        apart: whether its rows are known to be independent.
        computes: its ``quant_method``.
        values: its other attributes.
        place: its index among the four.
        amd: whether the test is of an AMD GPU.
    """

    apart: bool
    computes: UnquantizedLinearMethod
    values: dict[str, Any] = field(default_factory=dict)
    place: int = 3
    amd: bool = False


def scheme(name: str) -> dict[str, Any]:
    """Return the attributes of a layer whose method has schemes."""
    return {"scheme": type(name, (), {})()}


EIGHT_BITS, FOUR_BITS = SimpleNamespace(load_in_8bit=True), SimpleNamespace(load_in_8bit=False)
FP8, UNKNOWN = method("Fp8LinearMethod"), method("NewLinearMethod")
BITS, AWQ, QUARK = "BitsAndBytesLinearMethod", "AWQLinearMethod", "QuarkLinearMethod"
KINDS = {
    "fp8": Kind(True, FP8),
    "fp8 on AMD, where one scale for the batch is usual": Kind(False, FP8, amd=True),
    "Quark's fp8 on AMD": Kind(False, method(QUARK), scheme("QuarkW8A8Fp8"), amd=True),
    "Quark's mxfp4 on AMD": Kind(True, method(QUARK), scheme("QuarkW4A4MXFP4"), amd=True),
    "plain on AMD": Kind(True, UnquantizedLinearMethod(), amd=True),
    "4 bits of bitsandbytes": Kind(True, method(BITS, quant_config=FOUR_BITS)),
    "8 bits of bitsandbytes": Kind(False, method(BITS, quant_config=EIGHT_BITS)),
    "AWQ by another method's scheme": Kind(False, method(AWQ), scheme("GPTQLinearScheme")),
    "another package's": Kind(False, method("Fp8LinearMethod", "another")),
    "an image model's": Kind(False, method("Fp8LinearMethod", "sglang.multimodal_gen.a")),
    "one that is not known": Kind(False, UNKNOWN),
    "one that is not known, in the donor": Kind(False, UNKNOWN, place=2),
    "one that is not known, before the donor": Kind(True, UNKNOWN, place=1),
    "a class of tensors": Kind(False, UnquantizedLinearMethod(), {"weight": object()}),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_linear_layer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind = KINDS[name]
    layers = [ReplicatedLinear(8, 8), ReplicatedLinear(8, 8)]
    layers += [ReplicatedLinear(8, 8), ReplicatedLinear(8, 8)]
    vars(layers[kind.place]).update(quant_method=kind.computes, **kind.values)
    monkeypatch.setattr(torch.version, "hip", "7.0" if kind.amd else None)
    reason = weights.find_linear_reason(SimpleNamespace(layers=layers), first=3)
    assert (reason is None) == kind.apart


def test_the_method_of_a_cache_refuses_nothing() -> None:
    """Attentions of fp8 checkpoints have such a method; the pools are judged separately."""
    attention = RadixAttention(2, 8, 1.0, 1, 0)
    attention.quant_method = BaseKVCacheMethod(None)
    assert weights.find_linear_reason(SimpleNamespace(layers=[attention] * 2), first=1) is None


# ---------------------------------------------------------------- SGLang's classes


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
CHECKPOINTS = {
    "AWQ": ("awq", _AWQ, "AWQLinearScheme"),
    "GPTQ, Marlin": ("gptq_marlin", _GPTQ, "GPTQMarlinLinearScheme"),
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
    "ModelOpt, nvfp4": (
        *("modelopt_fp4", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}),
        "ModelOptFp4LinearMethod",
    ),
    "int8 of blocks": (
        *("blockwise_int8", {"quant_method": "blockwise_int8", **_BLOCKS}),
        "BlockInt8LinearMethod",
    ),
    "fp8 of blocks": ("fp8", {"quant_method": "fp8", **_BLOCKS}, "Fp8LinearMethod"),
    "GGUF": ("gguf", {}, "GGUFLinearMethod"),
}


@NAMES_CHANGE
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_layers_of_popular_checkpoints(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """SGLang's own classes, built as for a Hopper GPU; their kernels need one."""
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
    assert weights.get_linear_kind(layer).endswith(kind)
    assert weights.has_independent_rows(layer) == (name != "GGUF")
    assert not compat.layers.is_plain_linear(
        layer
    )  # so that the donor computes all of its projection


@NAMES_CHANGE
def test_every_name_is_one_of_sglangs() -> None:
    """SGLang's sources decide: many of these classes cannot be imported on a CPU."""
    sources = Path(sglang.srt.__path__[0])
    names, found = set[str](), set[str]()
    for kind in weights._INDEPENDENT_ROWS:
        names.update(kind.split("."))
    for folder in ("layers/quantization", "hardware_backend"):
        for source in (sources / folder).rglob("*.py"):
            found.update(re.findall(r"^ *class (\w+)", source.read_text(), re.MULTILINE))
    assert names - found == set()
