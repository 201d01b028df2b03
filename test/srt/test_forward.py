"""One forward on the real model: exceptions, fallbacks, and no trace left behind."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.model_executor import forward_context

from observe import (
    Observed,
    assert_same_answers,
    assert_same_cache,
    assert_same_objects,
    run,
    switched,
    watching,
)
from sglang_gemma4_reference.checkpoint import E2B_TINY, write_checkpoint
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import cut, donor, gate, patch, per_layer, report, seams
from sglang_gemma4_yoco.donor import DonorCut

LAYERS, FIRST_SHARED = E2B_TINY.layers, E2B_TINY.layers - E2B_TINY.kv_shared_layers
TOLERANCE = 5e-5


def batch_of(*lens: tuple[int, int], **more: Any) -> list[Prompt]:
    """Prompts with (cached, new) random tokens."""
    draw = random.Random(0)
    return [
        Prompt(
            tuple(draw.randrange(20, 500) for _ in range(cached)),
            tuple(draw.randrange(20, 500) for _ in range(new)),
            **more,
        )
        for cached, new in lens
    ]


BATCHES = {
    "one prompt": batch_of((0, 70)),
    "three, two of them cached": batch_of((30, 40), (0, 7), (90, 1)),
    "input logprobs": [*batch_of((10, 40), logprob_start=35), *batch_of((0, 9))],
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, E2B_TINY)
    return Engine(path, device="cpu", dtype="float32", max_total_tokens=4096)


@pytest.fixture(autouse=True)
def _fresh_decisions(engine: Engine) -> Iterator[None]:
    engine.text_model.__dict__.pop("_yoco_donor_cut", None)
    report.reset()
    yield
    engine.text_model.__dict__.pop("_yoco_donor_cut", None)


def untouched(engine: Engine) -> None:
    """Nothing of the fast path is left on the model or in the attention state."""
    model = engine.text_model
    owners = [model, model.norm, *model.layers, *(layer.self_attn for layer in model.layers)]
    assert [o for o in owners if {"forward", "project_per_layer_inputs"} & o.__dict__.keys()] == []
    assert not forward_context.has_forward_context()
    attention = cut.tail_attention(model)
    if attention is not None:
        assert attention.tail.forward_metadata is None


def rows(total: int, kept: int, first_cut: int) -> list[int]:
    return [total] * first_cut + [kept] * (LAYERS - first_cut)


def compare(engine: Engine, prompts: list[Prompt], first_cut: int, kept: int) -> None:
    scheduled = engine.schedule(prompts)
    stock, fast = run(engine, scheduled, "0"), run(engine, scheduled, "1")
    assert fast.rows == rows(sum(len(p.new) for p in prompts), kept, first_cut)
    assert_same_objects(fast)
    assert_same_cache(stock, fast)
    assert_same_answers(stock, fast, TOLERANCE)
    untouched(engine)


KEPT = {"one prompt": 1, "three, two of them cached": 3, "input logprobs": 16}


@pytest.mark.parametrize("name", BATCHES)
def test_cut_inside_the_donor(engine: Engine, name: str) -> None:
    compare(engine, BATCHES[name], FIRST_SHARED - 1, KEPT[name])


@pytest.mark.parametrize("name", BATCHES)
def test_donor_that_is_not_as_expected_is_left_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setattr(donor, "why_not_inside", lambda _: "layer 3 is a Surprise")
    with caplog.at_level("INFO", "sglang_gemma4_yoco"):
        compare(engine, BATCHES[name], FIRST_SHARED, KEPT[name])
        compare(engine, BATCHES[name], FIRST_SHARED, KEPT[name])
    told = [m for m in caplog.messages if "layer 3 is a Surprise" in m]
    assert len(told) == 1
    assert "cut before layer 4" in told[0]


@pytest.mark.parametrize("name", BATCHES)
def test_donor_with_a_quantised_projection(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(donor, "why_not_keys_and_values", lambda *_: "it is quantised")
    compare(engine, BATCHES[name], FIRST_SHARED - 1, KEPT[name])
    assert cut.donor_cut(engine.text_model) is DonorCut.AFTER_ATTENTION


@pytest.mark.parametrize("name", BATCHES)
def test_per_layer_inputs_that_cannot_be_split(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(per_layer, "can_be_split", lambda _: False)
    compare(engine, BATCHES[name], FIRST_SHARED - 1, KEPT[name])


@pytest.mark.parametrize("name", BATCHES)
def test_backend_whose_decode_is_not_proven(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(seams, "decodes_like_extend", lambda _: False)
    compare(engine, BATCHES[name], FIRST_SHARED - 1, KEPT[name])


@pytest.mark.parametrize("cut_at", list(DonorCut))
def test_unread_chunks_skip_the_tail_at_every_cut(engine: Engine, cut_at: DonorCut) -> None:
    engine.text_model.__dict__["_yoco_donor_cut"] = cut_at
    scheduled = engine.schedule(batch_of((20, 60), (0, 30), to_come=(21, 22)))
    stock, fast = run(engine, scheduled, "0"), run(engine, scheduled, "1")
    front = FIRST_SHARED - (cut_at is DonorCut.KEYS_AND_VALUES)
    assert fast.rows == [90] * front
    assert_same_objects(fast)
    assert_same_cache(stock, fast)
    assert fast.hidden is not None
    assert fast.hidden.isfinite().all()
    assert report.forwards[report.TAIL_SKIPPED] == 1
    untouched(engine)


def test_stepping_aside_at_the_last_moment(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "residual_is_written", lambda *_: False)
    for cut_at in DonorCut:
        engine.text_model.__dict__["_yoco_donor_cut"] = cut_at
        scheduled = engine.schedule(BATCHES["three, two of them cached"])
        report.reset()
        stock, fast = run(engine, scheduled, "0"), run(engine, scheduled, "1")
        assert fast.rows == stock.rows
        assert_same_objects(fast)
        assert_same_cache(stock, fast)
        assert_same_answers(stock, fast, TOLERANCE)
        untouched(engine)
        assert report.forwards == {gate.OFF: 1, cut.STREAM_PENDING: 1}


def test_a_refused_batch_is_the_stock_forward_bit_for_bit(engine: Engine) -> None:
    scheduled = engine.schedule(batch_of((0, 20), (5, 9), logprob_start=0))
    stock, refused = run(engine, scheduled, "0"), run(engine, scheduled, "1")
    assert refused.rows == stock.rows
    assert stock.hidden is not None
    assert refused.hidden is not None
    assert torch.equal(stock.hidden, refused.hidden)
    assert_same_answers(stock, refused, 0.0)
    assert report.forwards[gate.NOTHING_TO_SKIP] == 1


class InjectedError(Exception):
    pass


def fail_at(engine: Engine, place: str) -> Callable[[], None]:
    """Make one module raise; return how to mend it."""
    model = engine.text_model
    module = {
        "donor's attention": model.layers[FIRST_SHARED - 1].self_attn.attn,
        "donor's ffn": model.layers[FIRST_SHARED - 1].mlp,
        "first tail layer": model.layers[FIRST_SHARED].mlp,
        "middle tail layer": model.layers[(FIRST_SHARED + LAYERS) // 2].self_attn,
        "last tail layer": model.layers[-1].mlp,
        "final norm": model.norm,
    }[place]

    def raising(*_: Any) -> None:
        raise InjectedError(place)

    mend: Callable[[], None] = module.register_forward_pre_hook(raising).remove
    return mend


PLACES = [
    "donor's attention",
    "donor's ffn",
    "first tail layer",
    "middle tail layer",
    "last tail layer",
    "final norm",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["three, two of them cached", "input logprobs"])
def test_an_exception_leaves_all_ready_for_the_next_batch(
    engine: Engine, place: str, name: str
) -> None:
    scheduled = engine.schedule(BATCHES[name])
    mend, seen = fail_at(engine, place), Observed()
    model, inside = engine.text_model, []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inside.append(kwargs.get("forward_batch") or args[2])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with switched("1"), watching(engine, seen), pytest.raises(InjectedError, match=place):
            engine.forward(scheduled)
    finally:
        mend()
        hook.remove()
    (batch,) = inside
    after = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    changed = [n for n, value in seen.before.items() if after[n] is not value]
    # A forward that raises leaves the stream it was in, with or without the fast path.
    assert [name for name in changed if name != "residual_stream"] == []
    untouched(engine)
    compare(engine, BATCHES[name], FIRST_SHARED - 1, KEPT[name])


def test_an_exception_while_planning_the_tail_costs_one_stock_forward(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = cut.tail_attention(engine.text_model)
    assert attention is not None
    scheduled = engine.schedule(BATCHES["one prompt"])
    stock = run(engine, scheduled, "0")

    def out_of_memory(_: Any) -> None:
        raise MemoryError("planning")

    with monkeypatch.context() as broken:
        broken.setattr(attention.tail, "init_forward_metadata", out_of_memory)
        fast = run(engine, scheduled, "1")
    assert fast.rows == stock.rows
    assert_same_objects(fast)
    assert_same_answers(stock, fast, 0.0)
    assert report.forwards[cut.NOT_PLANNED] == 1
    compare(engine, BATCHES["one prompt"], FIRST_SHARED - 1, 1)


def test_an_exception_while_planning_is_raised_where_other_ranks_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = cut.tail_attention(engine.text_model)
    assert attention is not None
    scheduled = engine.schedule(BATCHES["one prompt"])

    def out_of_memory(_: Any) -> None:
        raise MemoryError("planning")

    with monkeypatch.context() as broken:
        broken.setattr(attention.tail, "init_forward_metadata", out_of_memory)
        broken.setattr(seams, "tensor_parallel_group", object)
        with switched("1"), pytest.raises(MemoryError, match="planning"):
            engine.forward(scheduled)
    untouched(engine)
    compare(engine, BATCHES["one prompt"], FIRST_SHARED - 1, 1)


def test_decode_goes_straight_through(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled = engine.schedule(batch_of((0, 20), (0, 8)))
    with switched("1"):
        engine.forward(scheduled)
        report.reset()

        def asked(*_: Any) -> str:
            raise AssertionError("a decode step asked the gate")

        monkeypatch.setattr(gate, "ineligible_reason", asked)
        engine.decode(scheduled, [30, 31])
    assert not report.forwards


@pytest.fixture
def without_own_backend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    def impossible(_: Any) -> None:
        raise NotImplementedError("only one backend here")

    with monkeypatch.context() as context:
        context.setattr(seams, "build_attn_backend", impossible)
        engine.runner.init_attention_backends()
    yield engine
    engine.runner.init_attention_backends()


@pytest.mark.parametrize("name", BATCHES)
def test_without_a_backend_of_its_own_the_tail_rebuilds_the_runners(
    without_own_backend: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = without_own_backend
    assert cut.tail_attention(engine.text_model) is None
    planned: list[tuple[str, list[int]]] = []
    backend = engine.runner.attn_backend
    stock = backend.init_forward_metadata

    def recording(batch: Any) -> None:
        planned.append((batch.forward_mode.name, list(batch.extend_seq_lens_cpu)))
        stock(batch)

    monkeypatch.setattr(backend, "init_forward_metadata", recording)
    compare(engine, BATCHES[name], FIRST_SHARED - 1, KEPT[name])
    # The stock forward, then the fast one: front, tail, and the front's again on the way out.
    new = [len(p.new) for p in BATCHES[name]]
    assert [lens for _, lens in planned[-3:]] == [new, planned[-2][1], new]
    assert sum(planned[-2][1]) == KEPT[name]


def test_two_backends_share_nothing_but_the_pools(engine: Engine) -> None:
    attention = cut.tail_attention(engine.text_model)
    assert attention is not None
    assert attention.main is engine.runner.attn_backend
    assert attention.tail is not attention.main
    assert attention.tail.token_to_kv_pool is attention.main.token_to_kv_pool


def test_reinitialised_backends_are_followed(engine: Engine) -> None:
    before = cut.tail_attention(engine.text_model)
    engine.runner.init_attention_backends()
    after = cut.tail_attention(engine.text_model)
    assert after is not None
    assert before is not None
    assert after is not before
    assert after.main is engine.runner.attn_backend
    assert "init_forward_metadata" not in before.main.__dict__
    compare(engine, BATCHES["one prompt"], FIRST_SHARED - 1, 1)


def test_a_model_without_shared_layers_is_never_touched(tmp_path: Path, engine: Engine) -> None:
    write_checkpoint(tmp_path, dataclasses.replace(E2B_TINY, kv_shared_layers=0, layers=5))
    plain = Engine(tmp_path, device="cpu", dtype="float32", max_total_tokens=2048)
    assert cut.tail_attention(plain.text_model) is None
    assert "init_forward_metadata" not in plain.runner.attn_backend.__dict__
    scheduled = plain.schedule(batch_of((0, 30)))
    with switched("1"):
        seen = Observed()
        with watching(plain, seen):
            plain.forward(scheduled)
    assert seen.rows == [30] * 5
    assert report.forwards == {gate.NO_SHARED_LAYERS: 1}


class TestInstallation:
    def test_twice_is_an_error_that_changes_nothing(self) -> None:
        forward = seams.gemma4_causal.Gemma4TextModel.forward
        with pytest.raises(RuntimeError, match="installed already"):
            patch.install()
        assert seams.gemma4_causal.Gemma4TextModel.forward is forward

    def test_uninstall_puts_the_very_originals_back(self, engine: Engine) -> None:
        model, runner = seams.gemma4_causal.Gemma4TextModel, seams.ModelRunner
        stock = model.forward.__wrapped__, runner.init_attention_backends.__wrapped__
        patch.uninstall()
        try:
            assert (model.forward, runner.init_attention_backends) == stock
            assert not hasattr(model, "_yoco_eligibility")
            assert not hasattr(model, "_yoco_truncate_to_last_tokens")
            assert not patch.is_installed()
            assert "init_forward_metadata" not in engine.runner.attn_backend.__dict__
            assert run(engine, engine.schedule(BATCHES["one prompt"]), "1").rows == [70] * LAYERS
            patch.uninstall()  # nothing is installed: nothing to do
        finally:
            patch.install()
        engine.runner.init_attention_backends()
        compare(engine, BATCHES["one prompt"], FIRST_SHARED - 1, 1)

    def test_uninstall_refuses_under_another_plugins_wrapper(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = seams.gemma4_causal.Gemma4TextModel
        ours = model.forward

        def theirs(*args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs)

        monkeypatch.setattr(model, "forward", theirs)
        with pytest.raises(RuntimeError, match=r"Gemma4TextModel\.forward was wrapped"):
            patch.uninstall()
        assert patch.is_installed()
        assert model.forward is theirs

    def test_a_second_copy_of_the_package_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(patch, "_installed", {})
        with pytest.raises(seams.SeamError, match="is it patched already"):
            patch.install()

    def test_an_unsupported_version_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(seams, "version", lambda _: "0.5.9")
        with pytest.raises(seams.SeamError, match=r"SGLang 0\.5\.9 lacks .*>=0\.5\.14"):
            seams.check()


def test_the_fast_path_says_once_that_it_is_active(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    scheduled = engine.schedule(BATCHES["one prompt"])
    with caplog.at_level("INFO", "sglang_gemma4_yoco"), switched("1"):
        for _ in range(3):
            engine.forward(scheduled)
    (line,) = [m for m in caplog.messages if "active" in m]
    for part in ("Gemma4TextModel", "layer 3", "of 8", type(engine.runner.attn_backend).__name__):
        assert part in line
    assert report.forwards[report.ACTIVE] == 3


def test_each_reason_is_said_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    scheduled = engine.schedule(BATCHES["one prompt"])
    with caplog.at_level("INFO", "sglang_gemma4_yoco"), switched("0"):
        for _ in range(3):
            engine.forward(scheduled)
    assert [m for m in caplog.messages if gate.OFF in m] == [
        f"Gemma 4 fast prefill steps aside: {gate.OFF}"
    ]
    assert report.forwards[gate.OFF] == 3
