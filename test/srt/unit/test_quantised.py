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
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config

from sglang_gemma4_yoco import quantised, seams
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
    gone = {"FBGEMMFp8LinearMethod", "QoQLinearMethod"}  # up to 0.5.15
    assert names - classes_of_this_release() == gone
    assert Fp8LinearMethod.__name__ in names
