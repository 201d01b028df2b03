"""When layer K-1 is cut less deep, or not at all: on SGLang's own layers, weights and streams.

Each refusal is brought about on the real engine, and the rows show what became of the cut. Where a
wrong yes would only cost accuracy, that it would is shown as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
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
from forwards import (
    assert_fast,
    assert_served_by_stock,
    assert_untouched,
    norms_that_add_in_place,
    with_image,
)
from layer_rows import FIRST_CUT, FIRST_SHARED, LAYERS
from observe import run
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import log, seams, settings
from sglang_gemma4_yoco.cutting import cut, fallback
from sglang_gemma4_yoco.loading import starting
from sglang_gemma4_yoco.tail import donor, per_layer
from sglang_gemma4_yoco.tail.donor import DonorCut
from sglang_gemma4_yoco.tail.shadow import Shadows
from stand_ins import Doubled, Packed, halved_weights


@pytest.fixture(autouse=True)
def _fresh_decisions(engine: Engine) -> Iterator[None]:
    vars(starting.of(engine.text_model)).pop("donor_cut", None)
    log.reset()
    fallback.reset()
    yield
    vars(starting.of(engine.text_model)).pop("donor_cut", None)


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
    "a bias of which nobody knows": _lose("bias"),
}


def changed_projection(engine: Engine, change: Callable[[Any], None]) -> Any:
    """The donor's own projection, copied and changed."""
    projection = copy.copy(donor_layer(engine).self_attn.qkv_proj)
    projection._parameters = dict(projection._parameters)
    change(projection)
    return projection


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_projections_that_cannot_be_sliced(engine: Engine, name: str) -> None:
    assert seams.is_plain_linear(changed_projection(engine, _give()))
    assert not seams.is_plain_linear(changed_projection(engine, NOT_PLAIN[name]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sglangs_unquantised_layers_can_be_sliced(bias: bool, dtype: torch.dtype) -> None:
    assert seams.is_plain_linear(ReplicatedLinear(16, 32, bias=bias, params_dtype=dtype))


@pytest.mark.parametrize(
    "config", [W8A8Int8Config(), Fp8Config(is_checkpoint_fp8_serialized=True)], ids=["int8", "fp8"]
)
def test_sglangs_quantised_layers_cannot_be_sliced(config: Any) -> None:
    """Nor could they by their weights' type alone, should their method be taken for plain."""
    projection = ReplicatedLinear(128, 128, quant_config=config)
    assert type(projection.quant_method) is not UnquantizedLinearMethod
    assert not seams.is_plain_linear(projection)
    projection.quant_method = UnquantizedLinearMethod()
    assert not seams.is_plain_linear(projection)


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
    monkeypatch.setattr(seams, "is_plain_linear", lambda _: True)
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
    total = sum(len(prompt.new) for prompt in prompts)
    assert_fast(engine, prompts, projected=[(total, LAYERS)])


# ---------------------------------------------------------------- what layer K-1 is


class AnotherLayer(Gemma4DecoderLayer):
    """As a model of another kind would derive it."""


class AnotherAttention(Gemma4Attention):
    """As a model of another kind would derive it."""


@pytest.mark.parametrize("name", BATCHES)
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
def test_a_donor_of_another_kind_is_left_alone(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    of: Callable[[Any], Any],
    kind: type,
    reason: str,
    name: str,
) -> None:
    monkeypatch.setattr(of(donor_layer(engine)), "__class__", kind)
    with caplog.at_level("INFO", "sglang_gemma4_yoco"):
        assert_fast(engine, BATCHES[name], DonorCut.NONE)
        assert_fast(engine, BATCHES[name], DonorCut.NONE)
    [told] = [m for m in caplog.messages if "because" in m]
    assert "cut before layer 4" in told
    assert told.endswith(f"because {reason}")


class Negating(Gemma4Attention):
    """Does something of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = -super().forward(*args, **kwargs)
        return output


def test_the_first_shared_layer_runs_its_own_code(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cut comes before it; nobody has asked what it is."""
    starting.of(engine.text_model).donor_cut = DonorCut.NONE
    attention = engine.text_model.layers[FIRST_SHARED].self_attn
    monkeypatch.setattr(attention, "__class__", Negating)
    assert_fast(engine, BATCHES["one prompt"], DonorCut.NONE)


def without(owner: Any, name: str) -> Any:
    """A shallow copy of a real module that lacks one of its parts."""
    lacking = copy.copy(owner)
    for kind in ("_modules", "_parameters", "_buffers"):
        lacking.__dict__[kind] = {n: v for n, v in owner.__dict__[kind].items() if n != name}
    lacking.__dict__.pop(name, None)
    return lacking


@pytest.mark.parametrize("name", [*donor._LAYER_PARTS, *donor._ATTENTION_PARTS])
def test_a_donor_that_lacks_a_part_is_left_alone(engine: Engine, name: str) -> None:
    model, layer = engine.text_model, donor_layer(engine)
    if name in donor._LAYER_PARTS:
        layer = without(layer, name)
    else:
        layer = without(layer, "self_attn")
        layer.self_attn = without(donor_layer(engine).self_attn, name)
    layers = [*model.layers[:FIRST_CUT], layer, *model.layers[FIRST_SHARED:]]
    lacking = SimpleNamespace(config=model.config, layers=layers)
    assert donor.why_not_inside(model) is None
    assert donor.why_not_inside(lacking) == f"layer {FIRST_CUT} lacks {name}"


@pytest.mark.parametrize(("first", "inside"), [(2, True), (1, False)])
def test_a_donor_without_a_layer_before_it_is_left_alone(
    engine: Engine, first: int, inside: bool
) -> None:
    """Its residual is the caller's. No server comes to it: SGLang wants layers of both kinds, each
    with a donor."""
    config = SimpleNamespace(num_hidden_layers=LAYERS, num_kv_shared_layers=LAYERS - first)
    model = SimpleNamespace(config=config, layers=engine.text_model.layers)
    reason = None if inside else "there is no layer before the donor"
    assert donor.why_not_inside(model) == reason


# ---------------------------------------------------------------- what comes to the cut


def owing_an_update(engine: Engine) -> Shadows:
    """Have layer K-2 leave half of its output's columns as an update that is still to be added.

    SGLang's next boundary adds it: the stock forward computes what it did, bit for bit.
    """
    from sglang.srt.layers.layer_boundary.residual.add_norm import PlainAdd
    from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream

    class AddedLater(PlainAdd):
        """A layer that writes its output itself is followed by one that takes no plain update."""

        is_plain_add = False

    def leaving(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def finish(hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
            output = stock(hidden_states, forward_batch)
            owed = output.clone()
            owed[:, ::2] = 0
            hidden, forward_batch.residual_stream = ResidualStream.from_handoff(
                owed, output - owed, AddedLater()
            )
            rows: torch.Tensor = hidden
            return rows

        return finish

    shadows = Shadows()
    shadows.add(engine.text_model.layers[FIRST_CUT - 1].ffn_boundary, "finish", leaving)
    return shadows


WITH_AN_IMAGE = "image"


def assert_steps_aside(engine: Engine, name: str, cut_at: DonorCut, reason: str) -> None:
    """The forward comes to the cut, is given up there, and is run again as stock."""
    starting.of(engine.text_model).donor_cut = cut_at
    scheduled = engine.schedule(BATCHES["one prompt" if name == WITH_AN_IMAGE else name])
    if name == WITH_AN_IMAGE:
        with_image(engine, scheduled)
    stock = run(engine, scheduled, "0")
    log.reset()
    seen = run(engine, scheduled, "1")
    total = stock.rows[0]
    front = FIRST_SHARED - (cut_at is not DonorCut.NONE)
    assert stock.rows == [total] * LAYERS
    assert seen.rows == [total] * front + stock.rows
    assert_served_by_stock(stock, seen)
    assert_untouched(engine)
    assert log.forwards == {reason: 1}


@pytest.mark.skipif(not seams.HAS_RESIDUAL_STREAM, reason="layers pass plain tensors")
@pytest.mark.parametrize("norms", ["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_residual_that_is_owed_an_update(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ranks: int, norms: str
) -> None:
    """On all ranks alike, so that each may run stock by itself; embeddings are put back for it."""
    monkeypatch.setattr(fallback, "is_alone", lambda: ranks == 1)
    in_place = norms_that_add_in_place(engine) if norms == "as on a GPU" else nullcontext()
    owing = owing_an_update(engine)
    try:
        with in_place:
            for name in (*BATCHES, WITH_AN_IMAGE):
                assert_steps_aside(engine, name, DonorCut.KEYS_AND_VALUES, cut.STREAM_PENDING)
    finally:
        owing.close()
    starting.of(engine.text_model).donor_cut = DonorCut.KEYS_AND_VALUES
    assert_fast(engine, BATCHES["one prompt"])


@pytest.mark.skipif(not seams.HAS_RESIDUAL_STREAM, reason="layers pass plain tensors")
def test_an_update_that_is_added_before_the_cut_is_nobodys_matter(engine: Engine) -> None:
    """Layer K-1 runs as stock where the cut comes before layer K, and writes the residual."""
    starting.of(engine.text_model).donor_cut = DonorCut.NONE
    owing = owing_an_update(engine)
    try:
        assert_fast(engine, BATCHES["one prompt"], DonorCut.NONE)
    finally:
        owing.close()


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
    assert_steps_aside(engine, "one prompt", DonorCut.KEYS_AND_VALUES, cut.OTHER_NORM)


@pytest.mark.parametrize("rows", [-1, 1])
@pytest.mark.parametrize("cut_at", list(DonorCut))
def test_rows_that_are_not_the_batchs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, cut_at: DonorCut, rows: int
) -> None:
    """As padding for a kernel would bring: once, so that stock can serve the batch."""
    last = FIRST_SHARED - 1 if cut_at is DonorCut.NONE else FIRST_CUT - 1
    padded: list[torch.Tensor] = []

    def padding(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            output = stock(layer, *args, **kwargs)
            if padded or not settings.current.enabled or layer is not model.layers[last]:
                return output
            hidden = seams.layer_rows(output)
            padded.append(hidden)
            more = torch.cat([hidden, hidden[:1]]) if rows > 0 else hidden[:rows]
            seams.write_residual(kwargs["forward_batch"], more)
            return as_returned(more)

        return call

    model = engine.text_model
    kind = type(model.layers[last])
    monkeypatch.setattr(kind, "forward", padding(kind.forward))
    assert_steps_aside(engine, "three, two of them cached", cut_at, cut.OTHER_ROWS)
    assert len(padded) == 1


@pytest.mark.skipif(not seams.HAS_RESIDUAL_STREAM, reason="layers pass plain tensors")
class TestResidualIsWritten:
    """The question itself, on SGLang's streams."""

    def batch(self, stream: Any) -> SimpleNamespace:
        return SimpleNamespace(residual_stream=stream)

    def test_a_written_stream(self) -> None:
        from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream

        hidden = torch.ones(3, 4)
        stream = ResidualStream()
        assert seams.residual_is_written(self.batch(stream), hidden)  # nothing but the embeddings
        stream.write(hidden)
        assert seams.residual_is_written(self.batch(stream), hidden)
        assert not seams.residual_is_written(self.batch(stream), hidden.clone())
        assert seams.residual_is_written(self.batch(None), hidden)
        assert seams.residual_is_written(SimpleNamespace(), hidden)

    def test_a_pending_update(self) -> None:
        from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
        from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream

        hidden, residual = torch.ones(3, 4), torch.ones(3, 4)
        given, stream = ResidualStream.from_handoff(hidden, residual, PLAIN_ADD)
        assert not seams.residual_is_written(self.batch(stream), given)
        assert not seams.residual_is_written(self.batch(stream), residual)
        stream.write(residual)
        assert seams.residual_is_written(self.batch(stream), residual)


@pytest.mark.skipif(
    not releases.tells_unread_chunks(), reason="this SGLang does not tell which rows are unread"
)
@pytest.mark.skipif(not seams.HAS_RESIDUAL_STREAM, reason="layers pass plain tensors")
def test_an_unread_chunk_that_is_owed_an_update(engine: Engine) -> None:
    """Its K and V would be those of half a residual."""
    scheduled = engine.schedule(batch_of((20, 60), (0, 30), to_come=(21, 22)))
    owing = owing_an_update(engine)
    try:
        stock, seen = run(engine, scheduled, "0"), run(engine, scheduled, "1")
    finally:
        owing.close()
    assert seen.rows == [90] * FIRST_CUT + stock.rows
    assert_served_by_stock(stock, seen)
    assert log.forwards[cut.STREAM_PENDING] == 1
