"""One wrong step of one layer on the fast path: the self-check names that step alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from harness.fixtures import Checkpoints
from harness.forwards import ENGINE, state_of
from harness.layer_rows import FIRST_SHARED
from sglang_gemma4_reference.checkpoint import E2B_TINY_SHARP
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco.checking import self_check as check
from sglang_gemma4_yoco.core import cut, per_layer
from sglang_gemma4_yoco.patched import patched

pytestmark = pytest.mark.usefixtures("forgotten_reports")

LAYER = FIRST_SHARED + 1
DONOR = FIRST_SHARED - 1

Wrong = Callable[[Engine], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def sharp(checkpoints: Checkpoints) -> Engine:
    """Return an engine on which one more rounding is enough to change an answer."""
    return Engine(checkpoints(E2B_TINY_SHARP), **(ENGINE | {"dtype": "bfloat16"}))


def module(layer: int, name: str, wrong: Callable[[Any], Any]) -> Wrong:
    """Return a breakage: ``wrong`` replaces this module's output where stock does not run it."""

    def broken(engine: Engine) -> AbstractContextManager[Any]:
        owner = engine.text_model.layers[layer].get_submodule(name)
        stock = owner.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            right = stock(*args, **kwargs)
            is_stock = state_of(engine).off_because  # it runs as if it were refused
            return right if is_stock else wrong(right)

        return patched(owner, forward=forward)

    return broken


def function(owner: Any, name: str, wrong: Callable[..., Any]) -> Wrong:
    """Return a breakage that calls ``wrong`` in place of a function, with it and its arguments."""
    stock = getattr(owner, name)
    return lambda _: mock.patch.object(owner, name, lambda *args: wrong(stock, *args))


def larger(rows: torch.Tensor) -> torch.Tensor:
    return rows * 1.05


def alternately(output: torch.Tensor) -> torch.Tensor:
    """Scale channels alternately up and down; a norm would hide a uniform scale."""
    share = 1 + 0.05 * (-1.0) ** torch.arange(output.shape[-1])
    return output * share.to(output.dtype)


def of_front(stock: Any, *args: Any) -> torch.Tensor:
    rows: torch.Tensor = stock(*args)
    if args[3] == 0:
        return larger(rows)
    return rows


def not_written(stock: Any, state: Any, plan: Any, *rows: torch.Tensor) -> None:
    """Leave out the K and V of prompts that end, whose slots stock's forward has filled."""
    if plan.runner is None:
        stock(state, plan, *rows)


def not_stored(engine: Engine) -> AbstractContextManager[Any]:
    """Leave out K and V of layer 0, whose slots stock's forward has filled."""
    pool = engine.runner.token_to_kv_pool
    stock = pool.set_kv_buffer

    def write(layer: Any, *args: Any) -> None:
        if layer.layer_id or state_of(engine).off_because:
            stock(layer, *args)

    return patched(pool, set_kv_buffer=write)


def stray(engine: Engine) -> AbstractContextManager[Any]:
    [first, *_] = engine.kv_buffers()[0]

    def write(rows: torch.Tensor) -> torch.Tensor:
        first[40] = 0.5  # a slot of a cached token
        return rows

    return module(-1, "mlp", write)(engine)


KEYS, VALUES = (f"{what} of layer {DONOR} in the pool" for what in ("keys", "values"))
#: Name of a defect -> the defect, and all findings of the check.
CASES = {
    "queries": (module(LAYER, "self_attn.q_norm", larger), {f"queries of layer {LAYER}"}),
    "attention": (
        module(LAYER, "self_attn.attn", alternately),
        {f"attention of layer {LAYER}", f"mean of the values of layer {LAYER}"},
    ),
    "per-layer inputs before the cut": (
        function(per_layer, "project_layers", of_front),
        {f"per-layer inputs before those of layer {DONOR}"},
    ),
    "FFN of the donor": (module(DONOR, "mlp", alternately), {f"output of layer {DONOR}"}),
    "nothing written before the cut": (
        not_stored,
        {"keys of layer 0 in the pool", "values of layer 0 in the pool"},
    ),
    "nothing written": (function(cut, "write_donor_keys_and_values", not_written), {KEYS, VALUES}),
    **{
        f"keys of layer {layer}, before the cut": (
            module(layer, "self_attn.k_norm", larger),
            {f"keys of layer {layer} in the pool"},
        )
        for layer in range(DONOR)
    },
    "a slot of another request": (stray, {check.OTHERS_SLOTS}),
}


def named(engine: Engine) -> set[str]:
    """Return the names of all findings beyond rounding."""
    with check.run_both_paths(engine.runner, state_of(engine)) as both:
        found = set()
        for finding in both.findings():
            if not finding.is_rounding:
                found.add(finding.what)
        return found


@pytest.mark.parametrize("case", CASES)
def test_it_is_named(sharp: Engine, case: str) -> None:
    wrong, expected = CASES[case]
    with wrong(sharp):
        assert named(sharp) == expected


def test_a_layer_that_does_not_run(sharp: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is never called, so there is nothing to compare."""
    model = sharp.text_model
    stock = type(model.layers[LAYER]).__call__

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer is model.layers[LAYER] and not state_of(sharp).off_because:
            return kwargs["hidden_states"]
        return stock(layer, *args, **kwargs)

    monkeypatch.setattr(type(model.layers[LAYER]), "__call__", call)
    assert f"no output of layer {LAYER}" in named(sharp)
