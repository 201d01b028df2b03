"""Which linear layers keep their rows apart: SGLang's classes, as far as a CPU builds them."""

from __future__ import annotations

import ast
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization import get_quantization_config, marlin_utils
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.deciding import quantised
from stand_ins import Doubled, Packed


def linear(config: Any = None) -> Any:
    """A linear layer of SGLang's own."""
    return ReplicatedLinear(128, 128, quant_config=config)


def of_class(name: str, module: str = "sglang.srt.layers.a", **values: Any) -> Any:
    """A layer of a kind that a CPU does not build: an object of a class of this name."""
    method = type(name, (), {"__module__": module})()
    scheme = values.pop("scheme", None)
    if scheme is not None:
        values["scheme"] = type(scheme, (), {})()
    for attribute in ("quant_config", "use_per_token_if_dynamic"):
        if attribute in values:
            setattr(method, attribute, values.pop(attribute))
    return SimpleNamespace(quant_method=method, **values)


@pytest.mark.parametrize(
    "config",
    [None, Fp8Config(is_checkpoint_fp8_serialized=True), W8A8Int8Config()],
    ids=["plain", "fp8", "int8"],
)
def test_layers_that_sglang_builds_here(config: Any) -> None:
    assert quantised.keeps_rows_apart(linear(config))


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


@pytest.mark.skipif(
    Version(version("sglang")) != seams.LAST_TESTED, reason="names come and go between releases"
)
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
    assert quantised._kind(layer) == kind
    assert quantised.keeps_rows_apart(layer) == (name != "GGUF")
    assert not seams.is_plain_linear(layer)  # so that layer K-1 computes all of its projection


@pytest.mark.parametrize("name", sorted(quantised._APART))
def test_a_method_is_known_by_its_own_name_in_sglang(name: str) -> None:
    assert quantised.keeps_rows_apart(of_class(name))
    assert not quantised.keeps_rows_apart(of_class(name, "sglang.multimodal_gen.a"))
    assert not quantised.keeps_rows_apart(of_class(f"{name}V2"))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        (name, scheme)
        for name, known in quantised._SCHEMES_APART.items()
        for scheme in sorted(known)
    ],
)
def test_a_scheme_is_known_beside_its_method(name: str, scheme: str) -> None:
    assert quantised.keeps_rows_apart(of_class(name, scheme=scheme))
    assert not quantised.keeps_rows_apart(of_class(name, scheme="Another"))
    assert not quantised.keeps_rows_apart(of_class(name))
    assert not quantised.keeps_rows_apart(of_class("Another", scheme=scheme))


def test_a_class_that_is_derived_from_a_known_one_is_not_known() -> None:
    layer = linear()
    layer.quant_method = Doubled()
    assert not quantised.keeps_rows_apart(layer)


def test_weights_of_a_class_of_their_own_are_not_known() -> None:
    layer = linear()
    assert type(layer.quant_method) is UnquantizedLinearMethod
    layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(Packed), requires_grad=False)
    assert not quantised.keeps_rows_apart(layer)


@pytest.mark.parametrize("eight_bits", [True, False])
def test_eight_bits_of_bitsandbytes_pick_columns_by_all_rows(eight_bits: bool) -> None:
    config = SimpleNamespace(load_in_8bit=eight_bits)
    layer = of_class("BitsAndBytesLinearMethod", quant_config=config)
    assert quantised.keeps_rows_apart(layer) != eight_bits


class TestOnAmd:
    """There a layer whose weights have one scale takes one for all rows of its inputs."""

    @pytest.fixture(autouse=True)
    def _amd(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "hip", "7.0")

    @pytest.mark.parametrize(
        ("apart", "values"),
        [
            (False, {"weight_scale": torch.ones(1)}),
            (False, {"weight_scale": torch.ones(1), "input_scale": None}),
            (True, {"weight_scale": torch.ones(128)}),
            (True, {"weight_scale": torch.ones(1), "input_scale": torch.ones(1)}),
            (True, {"weight_scale": torch.ones(1), "use_per_token_if_dynamic": True}),
            (True, {"weight_scale_inv": torch.ones(1)}),
        ],
    )
    def test_fp8(self, apart: bool, values: dict[str, Any]) -> None:
        assert quantised.keeps_rows_apart(of_class("Fp8LinearMethod", **values)) == apart

    @pytest.mark.parametrize("per_token", [True, False])
    def test_quark(self, per_token: bool) -> None:
        layer = of_class("QuarkLinearMethod", scheme="QuarkW8A8Fp8", weight_scale=torch.ones(1))
        layer.scheme.per_token = per_token
        assert quantised.keeps_rows_apart(layer) == per_token

    def test_weights_that_are_kept_twice(self) -> None:
        weight = SimpleNamespace(_ptpc_weight=torch.ones(1))
        assert not quantised.keeps_rows_apart(of_class("Fp8LinearMethod", weight=weight))

    def test_plain_layers(self) -> None:
        assert quantised.keeps_rows_apart(linear())


def test_elsewhere_fp8_has_a_scale_for_each_row() -> None:
    assert quantised.keeps_rows_apart(of_class("Fp8LinearMethod", weight_scale=torch.ones(1)))


# ---------------------------------------------------------------- a model


def foreign() -> Any:
    """A linear layer whose kind nobody knows."""
    layer = linear()
    layer.quant_method = Doubled()
    return torch.nn.Sequential(layer)


def known() -> Any:
    return torch.nn.Sequential(linear(), torch.nn.Linear(2, 2))


@pytest.mark.parametrize("place", range(4))
def test_a_tail_of_layers_that_are_not_known_is_refused(place: int) -> None:
    """From the last donor on, of whose rows all but the kept ones are dropped."""
    layers = [known() for _ in range(4)]
    layers[place] = foreign()
    reason = quantised.coupled_reason(SimpleNamespace(layers=layers), first_shared=2)
    assert reason == (None if place == 0 else "rows of Doubled may depend on each other")


def test_a_scheme_is_named_before_its_method() -> None:
    layer = linear()
    layer.quant_method = of_class("AWQLinearMethod").quant_method
    layer.scheme = type("AWQAscendLinearScheme", (), {})()
    model = SimpleNamespace(layers=[known(), torch.nn.Sequential(layer)])
    reason = quantised.coupled_reason(model, first_shared=1)
    assert reason == "rows of AWQAscendLinearScheme may depend on each other"


# ---------------------------------------------------------------- the names


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


@pytest.mark.skipif(
    Version(version("sglang")) != seams.LAST_TESTED, reason="names come and go between releases"
)
def test_every_name_is_one_of_sglangs() -> None:
    names = quantised._APART.union(quantised._SCHEMES_APART, *quantised._SCHEMES_APART.values())
    assert names - classes_of_this_release() == set()
    assert Fp8LinearMethod.__name__ in names
