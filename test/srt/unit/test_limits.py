"""What refuses a server: the tables against the installed SGLang, and what a newer one has changed.

What is refused, and that the rest gives stock's answers, is shown by forwards: ``test_deciding``
has the arguments and the linear layers, ``test_any_backend`` attention backends and pools.
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
from sglang.srt.debug_utils.dumper import dumper
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization import get_quantization_config, marlin_utils

from reviewed_arguments import installed
from sglang_gemma4_reference import releases
from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.commands import preflight
from sglang_gemma4_yoco.commands.console import Findings
from sglang_gemma4_yoco.loading import limits

pytestmark = pytest.mark.usefixtures("outside_of_a_server")
NAMES_CHANGE = pytest.mark.skipif(
    Version(version("sglang")) != compat.LAST_TESTED, reason="names come and go between releases"
)

# ---------------------------------------------------------------- all arguments there are


def test_every_argument_and_variable_is_judged_in_one_place() -> None:
    """What SGLang has changed since shows here first: scripts/dev/reviewed_arguments.py."""
    judged, reviewed = limits.judged_arguments(), limits.REVIEWED_ARGUMENTS
    unread = installed() - judged - reviewed
    assert unread == set(), f"read what SGLang does with {sorted(unread)}, and list them"
    assert judged & reviewed == set()
    if Version(version("sglang")) == compat.LAST_TESTED:
        assert judged - installed() == set()


def test_every_argument_that_is_read_is_judged() -> None:
    """By name, in a function: else a newer SGLang's name for it would not be missed."""
    read = {
        str(node.args[0].value)
        for node in ast.walk(ast.parse(inspect.getsource(limits)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "argument"
        and isinstance(node.args[0], ast.Constant)
    }
    arguments = {name for name in limits._OTHER_ARGUMENTS if not name.isupper()}
    assert read - limits._HIDDEN_STATE_ARGUMENTS == arguments


JUDGED = sorted(limits.judged_arguments())
LIST = {**dict.fromkeys(limits.REVIEWED_ARGUMENTS, True), **dict.fromkeys(JUDGED, False)}
NEW = "{} is set, which this version has not judged"
GONE = "this SGLang lacks {}, which may go by another name now"


def test_a_newer_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown means no. In a tested one there is nothing unknown, and nothing is looked for."""
    cases = [
        (LIST, None),
        (LIST | {"enable_surprises": False}, None),
        (
            LIST | {"enable_surprises": True, "surprise_size": True},
            NEW.format("--enable-surprises"),
        ),
        (LIST | {"SGLANG_SURPRISE": False, "DUMPER_SURPRISE": False}, None),
        (LIST | {"SGLANG_SURPRISE": True}, NEW.format("SGLANG_SURPRISE")),
        (LIST | {"DUMPER_SURPRISE": True}, NEW.format("DUMPER_SURPRISE")),
        (LIST | {"enable_lora": True}, None),  # what is set is looked at in a server
        *(
            ({name: LIST[name] for name in LIST if name != gone}, GONE.format(limits._flag(gone)))
            for gone in JUDGED
        ),
    ]
    with releases.published():
        for given, reason in cases:
            assert limits.server_reason() is None
            with monkeypatch.context() as newer:
                variables = {name: value for name, value in given.items() if name.isupper()}
                newer.setattr(compat, "arguments_set", lambda given=given: given)
                newer.setattr(compat, "variables_set", lambda variables=variables: variables)
                newer.setattr(compat, "is_newer_than_tested", lambda: True)
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
    monkeypatch.setattr(compat, "ServerArgs", Later)
    monkeypatch.setattr(compat, "get_server_args", lambda: SimpleNamespace(**given))
    names = ("model_path", "sizes", "mode")
    assert compat.arguments_set() == {name: name in is_set for name in names}


@pytest.mark.parametrize(
    ("name", "value", "is_set"),
    [
        ("SGLANG_LOG_MS", "1", True),
        ("SGLANG_LOG_MS", "false", False),
        ("SGLANG_CACHE_DIR", "/elsewhere", True),
        ("DUMPER_DIR", "/elsewhere", True),
        ("DUMPER_COLLECTIVE_TIMEOUT", "60", False),
    ],
)
def test_which_variable_is_set(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_set: bool
) -> None:
    """One that has its default is not, as SGLang itself sets some."""
    before = compat.variables_set()
    monkeypatch.setenv(name, value)
    assert compat.variables_set() == before | {name: is_set}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"enable": True}, limits.DUMPER),
        ({"server_port": "reuse"}, limits.DUMPER),
        ({"server_port": "40000"}, limits.DUMPER),
        ({"server_port": "-1", "filter": "layer_id=1"}, None),
    ],
)
def test_the_dumper(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], reason: str | None
) -> None:
    """It may be on from the start, or be turned on while the server serves; ``doctor`` asks too."""
    monkeypatch.setattr(dumper, "_config", dumper._config)
    dumper.configure(**config)
    findings = Findings()
    findings.facts["quantisation"] = None
    with releases.published():
        assert limits.server_reason() == reason
        preflight._judge(findings, {}.get)
    assert findings.refusals == ([reason] if reason else [])


def test_arguments_that_cannot_be_listed_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "is_newer_than_tested", lambda: True)
    monkeypatch.setattr(compat, "ServerArgs", SimpleNamespace)
    with releases.published():
        reason = limits.server_reason()
    assert reason == "the server's arguments are no record whose fields can be listed"


# ---------------------------------------------------------------- SGLang's classes


def test_the_listed_backends_exist() -> None:
    """Under these names, in modules of SGLang's that need another device to be imported."""
    modules = compat.gemma4_causal.__file__.replace("models/gemma4_causal.py", "layers/attention/")
    files = {
        "TritonAttnBackend": "triton",
        "TRTLLMHAAttnBackend": "trtllm_mha",
        "FlashAttentionBackend": "flashattention",
        "XPUAttentionBackend": "xpu",
    }
    for name, file in files.items():
        assert f"\nclass {name}(" in Path(f"{modules}{file}_backend.py").read_text()
    assert files.keys() == {name for name in limits.MAIN_BACKENDS if "." not in name}


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
    assert not compat.is_plain_linear(layer)  # so that the donor computes all of its projection


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
