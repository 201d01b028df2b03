"""One step of one layer is wrong: it is told of that step, whatever stands behind it.

Stock is watched, and the fast path run on its numbers, by the check's own requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from forwards import ENGINE
from layer_rows import FIRST_SHARED, LAYERS
from sglang_gemma4_reference.checkpoint import E2B_TINY_SHARP, write_checkpoint
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco.checking import self_check
from sglang_gemma4_yoco.cutting import cut
from sglang_gemma4_yoco.loading import start
from sglang_gemma4_yoco.tail import donor, per_layer
from sglang_gemma4_yoco.core.replaced import replaced

pytestmark = pytest.mark.usefixtures("forgotten_reports")

LAYER = FIRST_SHARED + 1
DONOR = FIRST_SHARED - 1


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Where one rounding more is enough to make an answer another one."""
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), E2B_TINY_SHARP)
    return Engine(path, **(ENGINE | {"dtype": "bfloat16"}))


@contextmanager
def on_the_fast_path(
    engine: Engine, module: Any, name: str, wrong: Callable[..., Any]
) -> Iterator[None]:
    """``module.name`` is wrong where stock does not run it."""
    known = start.of(engine.text_model)

    def replaced(stock: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            right = stock(*args, **kwargs)
            return right if known.refused else wrong(right)

        return function

    with Shadows() as shadows:
        shadows.add(module, name, replaced)
        yield


def named(engine: Engine) -> set[str]:
    """All that is no rounding."""
    with self_check.comparing(engine.runner, start.of(engine.text_model)) as both:
        found = both.findings()
    return {finding.what for finding in found if not finding.is_rounding}


def test_nothing(sharp: Engine) -> None:
    assert named(sharp) == set()


def test_queries(sharp: Engine) -> None:
    norm = sharp.text_model.layers[LAYER].self_attn.q_norm
    with on_the_fast_path(sharp, norm, "forward", lambda q: q * 1.05):
        assert named(sharp) == {f"queries of layer {LAYER}"}


@pytest.mark.parametrize("number", [0, 1])
def test_keys(sharp: Engine, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Those in the pool are stock's by then where the tail attends to them."""
    stock = donor.keys_and_values

    def keys_and_values(*args: Any) -> Any:
        pair = list(stock(*args))
        pair[number] = pair[number] * 1.05
        return tuple(pair)

    monkeypatch.setattr(donor, "keys_and_values", keys_and_values)
    assert named(sharp) == {f"{('keys', 'values')[number]} of layer {DONOR} in the pool"}


def test_attention(sharp: Engine) -> None:
    attention = sharp.text_model.layers[LAYER].self_attn.attn

    def other(output: torch.Tensor) -> torch.Tensor:
        """Larger and smaller in turns: what is larger as a whole is as it was behind a norm."""
        share = 1 + 0.05 * (-1.0) ** torch.arange(output.shape[-1])
        return output * share.to(output.dtype)

    with on_the_fast_path(sharp, attention, "forward", other):
        found = named(sharp)
    assert found == {f"attention of layer {LAYER}", f"mean of the values of layer {LAYER}"}


def test_per_layer_inputs(sharp: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = per_layer.SplitInputs.kept

    def kept(inputs: Any) -> torch.Tensor:
        of_layers: torch.Tensor = stock(inputs)
        of_layers[:, LAYER - DONOR] *= 1.1
        return of_layers

    monkeypatch.setattr(per_layer.SplitInputs, "kept", kept)
    found = named(sharp)
    assert f"per-layer input of layer {LAYER}" in found
    assert found <= {f"per-layer input of layer {LAYER}", f"output of layer {LAYER}"}


def test_the_rows_in_the_end(sharp: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = cut.Cut.scatter

    def scatter(this: cut.Cut, front: torch.Tensor, rows: torch.Tensor) -> None:
        stock(this, front, rows * 1.1)

    monkeypatch.setattr(cut.Cut, "scatter", scatter)
    assert named(sharp) == {"rows behind the norm"}


def test_a_layer_that_does_not_run(sharp: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is never called, so nothing can be compared."""
    model, known = sharp.text_model, start.of(sharp.text_model)
    stock = type(model.layers[LAYER]).__call__

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer is model.layers[LAYER] and not known.refused:
            return kwargs["hidden_states"]
        return stock(layer, *args, **kwargs)

    monkeypatch.setattr(type(model.layers[LAYER]), "__call__", call)
    assert f"layer {LAYER} has not run" in named(sharp)
    assert LAYER < LAYERS - 1
