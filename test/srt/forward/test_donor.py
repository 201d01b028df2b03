"""The donor, layer S-1, and what comes to the cut: on SGLang's own layers, weights and streams.

Each refusal is brought about on the real engine, and the rows show what became of the cut. Where a
wrong yes would only cost accuracy, that it would is shown as well.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config
from sglang.srt.models.gemma4_causal import Gemma4Attention, Gemma4DecoderLayer

from batches import BATCHES, batch_of
from breakages import as_returned
from forwards import assert_fast, assert_served_by_stock, assert_stock, assert_untouched
from layer_rows import FIRST_CUT, LAYERS
from observe import run
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import compat, log
from sglang_gemma4_yoco.core import cut, donor, per_layer
from sglang_gemma4_yoco.loading import start
from stand_ins import Doubled, Packed, halved_weights


@pytest.fixture(autouse=True)
def _fresh_decisions(engine: Engine) -> Iterator[None]:
    log.reset()
    yield
    state = start.of(engine.text_model)
    state.failures_in_a_row, state.refused = 0, None


def donor_layer(engine: Engine) -> Any:
    return engine.text_model.layers[FIRST_CUT]


# ---------------------------------------------------------------- what a linear layer computes


@pytest.fixture
def doubled() -> Iterator[Callable[[Any], None]]:
    """Have a linear layer compute what it did, from weights of half the size."""
    with ExitStack() as stack:
        yield lambda projection: stack.enter_context(halved_weights(projection))


def _give(**values: Any) -> Callable[[Any], None]:
    def change(projection: Any) -> None:
        for name, value in values.items():
            setattr(projection, name, value)

    return change


def _store(store: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def change(projection: Any) -> None:
        weight = torch.nn.Parameter(store(projection.weight.data), requires_grad=False)
        projection._parameters["weight"] = weight

    return change


def _lose(name: str) -> Callable[[Any], None]:
    return lambda projection: projection._parameters.pop(name)


# Each leaves all but one of the conditions as they are.
NOT_PLAIN: dict[str, Callable[[Any], None]] = {
    "a method derived from the plain one": _give(quant_method=Doubled()),
    "no method": _give(quant_method=None),
    "weights by another name": _lose("weight"),
    "one dimension": _store(torch.flatten),
    "int16": _store(lambda weight: weight.to(torch.int16)),
    "a class of tensors": _store(lambda weight: weight.as_subclass(Packed)),
    "fp8": _store(lambda weight: weight.to(torch.float8_e4m3fn)),
    "packed for the CPU": _give(use_intel_amx_backend=True),
    "a bias": lambda linear: linear._parameters.update(bias=torch.nn.Parameter(torch.ones(1))),
}


def changed_projection(engine: Engine, change: Callable[[Any], None]) -> Any:
    """The donor's own projection, copied and changed."""
    projection = copy.copy(donor_layer(engine).self_attn.qkv_proj)
    projection._parameters = dict(projection._parameters)
    change(projection)
    return projection


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_projections_that_cannot_be_sliced(engine: Engine, name: str) -> None:
    assert compat.is_plain_linear(changed_projection(engine, _give()))
    assert not compat.is_plain_linear(changed_projection(engine, NOT_PLAIN[name]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sglangs_unquantised_layers_can_be_sliced(bias: bool, dtype: torch.dtype) -> None:
    plain = compat.is_plain_linear(ReplicatedLinear(16, 32, bias=bias, params_dtype=dtype))
    assert plain is not bias


@pytest.mark.parametrize(
    "config", [W8A8Int8Config(), Fp8Config(is_checkpoint_fp8_serialized=True)], ids=["int8", "fp8"]
)
def test_sglangs_quantised_layers_cannot_be_sliced(config: Any) -> None:
    """Nor could they by their weights' type alone, should their method be taken for plain."""
    projection = ReplicatedLinear(128, 128, quant_config=config)
    assert type(projection.quant_method) is not UnquantizedLinearMethod
    assert not compat.is_plain_linear(projection)
    projection.quant_method = UnquantizedLinearMethod()
    assert not compat.is_plain_linear(projection)


@pytest.mark.parametrize("name", BATCHES)
def test_a_donor_whose_weights_are_not_plain(
    engine: Engine, doubled: Callable[[Any], None], name: str
) -> None:
    """All of its projection is computed, and what is not needed dropped."""
    doubled(donor_layer(engine).self_attn.qkv_proj)
    assert_fast(engine, BATCHES[name])


@pytest.mark.skipif(
    not releases.tells_unread_chunks(), reason="this SGLang does not tell which rows are unread"
)
def test_an_unread_chunk_in_a_donor_whose_weights_are_not_plain(
    engine: Engine, doubled: Callable[[Any], None]
) -> None:
    doubled(donor_layer(engine).self_attn.qkv_proj)
    assert_fast(engine, batch_of((20, 60), (0, 30), to_come=(21, 22)))
    assert log.forwards[log.TAIL_SKIPPED] > 0


def test_slicing_them_all_the_same_would_show(
    engine: Engine, doubled: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled(donor_layer(engine).self_attn.qkv_proj)
    monkeypatch.setattr(compat, "is_plain_linear", lambda _: True)
    with pytest.raises(AssertionError, match="differs"):
        assert_fast(engine, BATCHES["one prompt"])


@pytest.mark.parametrize("name", BATCHES)
def test_per_layer_inputs_whose_weights_are_not_plain(
    engine: Engine, doubled: Callable[[Any], None], name: str
) -> None:
    """They are then projected for all rows and layers at once, as in stock."""
    prompts = BATCHES[name]
    doubled(engine.text_model.per_layer_model_projection)
    assert not per_layer.can_be_split(engine.text_model)
    engine.runner.init_attention_backends()  # when a server starts, its weights are what they are
    total = sum(len(prompt.new) for prompt in prompts)
    assert_fast(engine, prompts, projected=[(total, LAYERS)])


# ---------------------------------------------------------------- what layer K-1 is


class AnotherLayer(Gemma4DecoderLayer):
    """As a model of another kind would derive it."""


class AnotherAttention(Gemma4Attention):
    """As a model of another kind would derive it."""


@pytest.mark.parametrize(
    ("of", "kind", "reason"),
    [
        (lambda layer: layer, AnotherLayer, "layer 3 is a AnotherLayer"),
        (
            lambda layer: layer.self_attn,
            AnotherAttention,
            "the attention of layer 3 is a AnotherAttention",
        ),
    ],
    ids=["layer", "attention"],
)
def test_a_donor_of_another_kind_refuses_the_server(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    of: Callable[[Any], Any],
    kind: type,
    reason: str,
) -> None:
    with monkeypatch.context() as other:
        other.setattr(of(donor_layer(engine)), "__class__", kind)
        engine.runner.init_attention_backends()
        assert_stock(engine, reason)
    engine.runner.init_attention_backends()
    assert_fast(engine)


@pytest.mark.parametrize(("first", "inside"), [(2, True), (1, False)])
def test_a_donor_without_a_layer_before_it_is_left_alone(
    engine: Engine, first: int, inside: bool
) -> None:
    """Its residual is the caller's. No server comes to it: SGLang wants layers of both kinds, each
    with a donor."""
    config = SimpleNamespace(num_hidden_layers=LAYERS, num_kv_shared_layers=LAYERS - first)
    model = SimpleNamespace(config=config, layers=engine.text_model.layers)
    reason = None if inside else "there is no layer before the donor"
    assert donor.why_not(model) == reason


# ---------------------------------------------------------------- what comes to the cut


def assert_refused_late(engine: Engine, reason: str) -> None:
    """The forward comes to the cut, is given up there, and is run again as stock; then the path
    is off, and no later forward pays twice."""
    scheduled = engine.schedule(BATCHES["three, two of them cached"])
    stock = run(engine, scheduled, "0")
    log.reset()
    seen, later = run(engine, scheduled, "1"), run(engine, scheduled, "1")
    total = stock.rows[0]
    assert stock.rows == later.rows == [total] * LAYERS
    assert seen.rows == [total] * FIRST_CUT + stock.rows
    for one in (seen, later):
        assert_served_by_stock(stock, one)
    assert_untouched(engine)
    assert log.forwards == {reason: 2}
    assert start.of(engine.text_model).refused == reason


def test_an_update_that_the_norm_would_add(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model whose norm is given the residual beside what is to be added to it."""
    model = engine.text_model
    call = type(model.norm).__call__

    def adding(norm: Any, rows: torch.Tensor, *others: Any) -> Any:
        if norm is not model.norm:
            return call(norm, rows, *others)
        normed, _ = call(norm, rows, torch.zeros_like(rows))
        return normed

    monkeypatch.setattr(type(model.norm), "__call__", adding)
    assert_refused_late(engine, cut.OTHER_NORM)


def test_a_norm_that_is_called_twice(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are the answer by then, of which no tail begins."""
    model = engine.text_model
    call = type(model.norm).__call__

    def twice(norm: Any, rows: torch.Tensor, *others: Any) -> Any:
        if norm is model.norm and not others:
            call(norm, rows)
        return call(norm, rows, *others)

    monkeypatch.setattr(type(model.norm), "__call__", twice)
    assert_refused_late(engine, cut.OTHER_NORM)


def test_something_else_before_the_norm(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the norm gets in another tensor are the rows that the tail begins with."""
    model = engine.text_model
    call = type(model.norm).__call__

    def of_a_copy(norm: Any, rows: torch.Tensor, *others: Any) -> Any:
        return call(norm, rows.clone() if norm is model.norm else rows, *others)

    monkeypatch.setattr(type(model.norm), "__call__", of_a_copy)
    assert_fast(engine)


@pytest.mark.parametrize("plain", [True, False])
def test_inputs_that_were_not_projected(
    engine: Engine,
    doubled: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    plain: bool,
) -> None:
    """The model has made them in a way of its own, and nobody knows those of the tail."""
    model = engine.text_model
    if not plain:
        doubled(model.per_layer_model_projection)
        engine.runner.init_attention_backends()
    unseen = functools.partial(type(model).project_per_layer_inputs, model)
    monkeypatch.setattr(per_layer.PerLayerInputs, "project", lambda _, *args: unseen(*args))
    assert_refused_late(engine, cut.OTHER_INPUTS)


@pytest.mark.parametrize("rows", [-1, 1])
def test_rows_that_are_not_the_batchs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """As padding for a kernel would bring: once, so that stock can serve the batch."""
    last = FIRST_CUT - 1
    padded: list[torch.Tensor] = []

    def padding(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            output = stock(layer, *args, **kwargs)
            is_fast = model.end_layer == FIRST_CUT
            if padded or not is_fast or layer is not model.layers[last]:
                return output
            hidden = compat.layer_rows(output)
            padded.append(hidden)
            more = torch.cat([hidden, hidden[:1]]) if rows > 0 else hidden[:rows]
            compat.write_residual(kwargs["forward_batch"], more)
            return as_returned(more)

        return call

    model = engine.text_model
    kind = type(model.layers[last])
    monkeypatch.setattr(kind, "forward", padding(kind.forward))
    assert_refused_late(engine, cut.OTHER_ROWS)
    assert len(padded) == 1


@pytest.mark.skipif(not compat.HAS_RESIDUAL_STREAM, reason="layers pass plain tensors")
class TestResidualIsWritten:
    """The question itself, on SGLang's streams."""

    def batch(self, stream: Any) -> SimpleNamespace:
        return SimpleNamespace(residual_stream=stream)

    def test_a_written_stream(self) -> None:
        from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream

        hidden = torch.ones(3, 4)
        stream = ResidualStream()
        assert compat.residual_is_written(self.batch(stream), hidden)  # nothing but the embeddings
        stream.write(hidden)
        assert compat.residual_is_written(self.batch(stream), hidden)
        assert not compat.residual_is_written(self.batch(stream), hidden.clone())
        assert compat.residual_is_written(self.batch(None), hidden)
        assert compat.residual_is_written(SimpleNamespace(), hidden)

    def test_a_pending_update(self) -> None:
        from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
        from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream

        hidden, residual = torch.ones(3, 4), torch.ones(3, 4)
        given, stream = ResidualStream.from_handoff(hidden, residual, PLAIN_ADD)
        assert not compat.residual_is_written(self.batch(stream), given)
        assert not compat.residual_is_written(self.batch(stream), residual)
        stream.write(residual)
        assert compat.residual_is_written(self.batch(stream), residual)
