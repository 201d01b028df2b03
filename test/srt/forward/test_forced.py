"""One step of one layer is wrong: that step is named, whatever comes after it.

Stock is watched, and the cut made of its numbers, for the check's own requests.
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
from sglang_gemma4_yoco.checking import start as check
from sglang_gemma4_yoco.core import cut, donor
from sglang_gemma4_yoco.core.per_layer import PerLayerInputs
from sglang_gemma4_yoco.core.replaced import replaced
from sglang_gemma4_yoco.loading import start

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
    state, stock = start.of(engine.text_model), getattr(module, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        right = stock(*args, **kwargs)
        return right if state.refused else wrong(right)

    with replaced(module, **{name: function}):
        yield


def named(engine: Engine) -> set[str]:
    """All that is no rounding."""
    with check.comparing(engine.runner, start.of(engine.text_model)) as both:
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
    stock = PerLayerInputs.kept

    def kept(inputs: Any) -> torch.Tensor:
        of_layers = stock(inputs)
        assert of_layers is not None
        of_layers[:, LAYER - DONOR] *= 1.1
        return of_layers

    monkeypatch.setattr(PerLayerInputs, "kept", kept)
    found = named(sharp)
    assert f"per-layer input of layer {LAYER}" in found
    assert found <= {f"per-layer input of layer {LAYER}", f"output of layer {LAYER}"}


def test_the_rows_in_the_end(sharp: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = cut.run_layers
    monkeypatch.setattr(cut, "run_layers", lambda *args: stock(*args) * 1.1)
    assert named(sharp) == {"rows after the norm", "logits"}


def test_the_rows_at_the_beginning(sharp: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are replaced by stock's there, so they are compared before."""
    stock = cut.run_layers
    monkeypatch.setattr(
        cut,
        "run_layers",
        lambda state, batch, rows, *others: stock(state, batch, rows * 1.1, *others),
    )
    assert named(sharp) == {"rows at the cut"}


@pytest.mark.parametrize("finishes", [True, False])
def test_keys_and_values_that_are_not_written(
    sharp: Engine, monkeypatch: pytest.MonkeyPatch, finishes: bool
) -> None:
    """Those of stock's forward, which has written to the same slots, do not pass for them."""
    stock = cut.write_keys_and_values

    def write(state: Any, plan: Any, *rows: torch.Tensor) -> None:
        if (plan.runner is None) == finishes:
            stock(state, plan, *rows)

    monkeypatch.setattr(cut, "write_keys_and_values", write)
    assert named(sharp) == {f"{what} of layer {DONOR} in the pool" for what in ("keys", "values")}


def test_a_layer_that_does_not_run(sharp: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is never called, so nothing can be compared."""
    model, state = sharp.text_model, start.of(sharp.text_model)
    stock = type(model.layers[LAYER]).__call__

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer is model.layers[LAYER] and not state.refused:
            return kwargs["hidden_states"]
        return stock(layer, *args, **kwargs)

    monkeypatch.setattr(type(model.layers[LAYER]), "__call__", call)
    assert f"layer {LAYER} has not run" in named(sharp)
    assert LAYER < LAYERS - 1
