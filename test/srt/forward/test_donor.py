"""The donor, layer S-1, and the inputs of the cut: on SGLang's own layers, weights and streams.

Each refusal is provoked on the real engine, and the rows show whether the batch was cut.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.models.gemma4_causal import Gemma4Attention, Gemma4DecoderLayer

from harness.batches import BATCHES, new_rows
from harness.forwards import (
    CHUNKS,
    assert_fast,
    assert_served_by_stock,
    assert_stock,
    assert_untouched,
    norm_called,
    outcomes,
    state_of,
)
from harness.layer_rows import FIRST_CUT, LAYERS
from harness.observe import run
from harness.stand_ins import Doubled, Packed, halved_weights
from sglang_gemma4_reference.engine import Engine, Prompt, reset_log
from sglang_gemma4_yoco import compat, settings
from sglang_gemma4_yoco.core import cut, per_layer
from sglang_gemma4_yoco.core import model as core_model
from sglang_gemma4_yoco.models import gemma4

pytestmark = pytest.mark.usefixtures("fresh_decisions")


def donor_layer(engine: Engine) -> Any:
    return engine.text_model.layers[FIRST_CUT]


# ---------------------------------------------------------------- the scatter


def test_the_output_is_the_residual_at_the_cut(engine: Engine) -> None:
    """So the scatter comes last. If K and V are written after it, most tests of this file fail."""
    with mock.patch.object(cut, "finish_prefill", wraps=cut.finish_prefill) as finished:
        assert_fast(engine)
    _, _, output, rows, *_ = finished.call_args.args
    assert output is rows


# ---------------------------------------------------------------- linear layers


@pytest.fixture(scope="module", autouse=True)
def trusted(engine: Engine) -> Iterator[None]:
    """Trust the classes of the tests, which are third-party code and would refuse a server."""
    with settings.changed(trust=(__name__, "harness.forwards", "harness.stand_ins")):
        yield


def _give(**values: Any) -> Callable[[Any], None]:
    return lambda projection: vars(projection).update(values)


def _store(store: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def change(projection: Any) -> None:
        weight = torch.nn.Parameter(store(projection.weight.data), requires_grad=False)
        projection._parameters["weight"] = weight

    return change


# Each violates exactly one of the conditions.
NOT_PLAIN = {
    "a method derived from the plain one": _give(quant_method=Doubled()),
    "no method": _give(quant_method=None),
    "weights by another name": lambda linear: linear._parameters.pop("weight"),
    "one dimension": _store(torch.flatten),
    "int16": _store(lambda weight: weight.to(torch.int16)),
    "a class of tensors": _store(lambda weight: weight.as_subclass(Packed)),
    "fp8": _store(lambda weight: weight.to(torch.float8_e4m3fn)),
    "packed for the CPU": _give(use_intel_amx_backend=True),
    "a bias": lambda linear: linear._parameters.update(bias=torch.nn.Parameter(torch.ones(1))),
}


def changed_projection(engine: Engine, change: Callable[[Any], None]) -> Any:
    """Return a changed copy of the donor's own projection."""
    projection = copy.copy(donor_layer(engine).self_attn.qkv_proj)
    projection._parameters = dict(projection._parameters)
    change(projection)
    return projection


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_projections_that_cannot_be_sliced(engine: Engine, name: str) -> None:
    assert compat.layers.is_plain_linear(changed_projection(engine, _give()))
    assert not compat.layers.is_plain_linear(changed_projection(engine, NOT_PLAIN[name]))


@pytest.mark.parametrize("prompts", [*BATCHES.values(), CHUNKS], ids=[*BATCHES, "chunks"])
def test_a_donor_whose_weights_are_not_plain(engine: Engine, prompts: list[Prompt]) -> None:
    """Its whole projection is computed, and the unneeded part dropped."""
    with halved_weights(donor_layer(engine).self_attn.qkv_proj):
        assert_fast(engine, prompts)


@pytest.mark.parametrize("name", BATCHES)
def test_per_layer_inputs_whose_weights_are_not_plain(engine: Engine, name: str) -> None:
    """They are then projected for all rows and layers at once, as in stock."""
    prompts, model = BATCHES[name], engine.text_model
    with halved_weights(model.per_layer_model_projection):
        assert not per_layer.can_be_split(model)
        engine.runner.init_attention_backends()  # weights are judged at start
        assert_fast(engine, prompts, projected=[(new_rows(prompts), LAYERS)])


# ---------------------------------------------------------------- kinds of layer S-1


class AnotherLayer(Gemma4DecoderLayer):
    """Layer class as another kind of model would derive it."""


class AnotherAttention(Gemma4Attention):
    """Attention class as another kind of model would derive it."""


def test_a_donor_of_another_kind_makes_the_server_stock(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = donor_layer(engine)
    for part, kind, reason in (
        (layer, AnotherLayer, "layer 3 is a AnotherLayer"),
        (layer.self_attn, AnotherAttention, "the attention of layer 3 is a AnotherAttention"),
    ):
        with monkeypatch.context() as other:
            other.setattr(part, "__class__", kind)
            engine.runner.init_attention_backends()
            assert_stock(engine, reason)
    engine.runner.init_attention_backends()
    assert_fast(engine)


def test_a_donor_without_its_own_keys_and_values(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cut would write them to another layer's slots."""
    monkeypatch.setattr(donor_layer(engine).self_attn.attn, "layer_id", 1)
    reason = gemma4.find_unsupported_reason(engine.text_model)
    assert str(reason) == "layer 3 reads K and V of layer 1"


# ---------------------------------------------------------------- inputs of the cut


def assert_refused_late(engine: Engine, reason: str) -> None:
    """Assert that the forward stops at the cut, and is run again as stock.

    The fast path is then off, and no later forward runs twice.
    """
    scheduled = engine.schedule(BATCHES["three, two of them cached"])
    stock = run(engine, scheduled, "0")
    reset_log()
    seen, later = run(engine, scheduled, "1"), run(engine, scheduled, "1")
    total = stock.rows[0]
    assert stock.rows == later.rows == [total] * LAYERS
    assert seen.rows == [total] * FIRST_CUT + stock.rows
    for one in (seen, later):
        assert_served_by_stock(stock, one)
    assert_untouched(engine)
    off = state_of(engine).off_because
    assert outcomes() == {off: 2}
    assert str(off) == reason


def adding(call: Any, rows: torch.Tensor, *_: Any) -> Any:
    """Pass the norm the residual beside the tensor to add to it."""
    return call(rows, torch.zeros_like(rows))[0]


def twice(call: Any, rows: torch.Tensor, *others: Any) -> Any:
    """Call the norm twice: the model returns the second call's rows, so no tail can begin."""
    if not others:
        call(rows)
    return call(rows, *others)


@pytest.mark.parametrize("call", [adding, twice])
def test_a_norm_that_is_called_differently(engine: Engine, call: Callable[..., Any]) -> None:
    with norm_called(engine, call):
        assert_refused_late(engine, core_model.OTHER_END)


def test_something_else_before_the_norm(engine: Engine) -> None:
    """The norm may get its rows in another tensor: the tail begins with those."""
    with norm_called(engine, lambda call, rows, *others: call(rows.clone(), *others)):
        assert_fast(engine)


@pytest.mark.parametrize("weights", [nullcontext, halved_weights], ids=["plain", "not plain"])
def test_inputs_that_were_not_projected(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, weights: Callable[[Any], Any]
) -> None:
    """The model computes them in another way, so those of the tail are not known."""
    model = engine.text_model
    unseen = functools.partial(type(model).project_per_layer_inputs, model)
    monkeypatch.setattr(per_layer.PerLayerInputs, "project", lambda _, *args: unseen(*args))
    with weights(model.per_layer_model_projection):
        engine.runner.init_attention_backends()
        assert_refused_late(engine, cut.OTHER_INPUTS)


@pytest.mark.parametrize("rows", [-1, 1])
def test_rows_that_are_not_the_batchs(engine: Engine, rows: int) -> None:
    """Padding for a kernel could bring such rows; they come once, so stock can serve the batch."""
    padded: list[torch.Tensor] = []

    def pad(_: Any, __: Any, call: dict[str, Any], hidden: torch.Tensor) -> torch.Tensor:
        if padded or model.end_layer != FIRST_CUT:  # once, and not stock's
            return hidden
        padded.append(hidden)
        more = torch.cat([hidden, hidden[:1]]) if rows > 0 else hidden[:rows]
        compat.layers.start_residual(call["forward_batch"], more)
        return more

    model = engine.text_model
    with model.layers[FIRST_CUT - 1].register_forward_hook(pad, with_kwargs=True):
        assert_refused_late(engine, cut.OTHER_ROWS)
    assert len(padded) == 1
