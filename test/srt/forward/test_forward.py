"""One forward on the real model: exceptions, fallbacks, and restored state."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from harness.batches import BATCHES, batch_of
from harness.fixtures import Said
from harness.forwards import (
    CHUNKS,
    MARKS_CHUNKS,
    InjectedError,
    assert_fast,
    assert_served_by_stock,
    assert_untouched,
    backends_of,
    failing,
    norms_that_add_in_place,
    outcomes,
    state_of,
)
from harness.layer_rows import FIRST_CUT, LAYERS
from harness.media import MediaPrompt, media_batch
from harness.observe import (
    TOLERANCE,
    assert_same_answers,
    both_ways,
    run,
    step,
)
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine, reset_log, switched
from sglang_gemma4_yoco import counters, log
from sglang_gemma4_yoco.core import eligibility, forward
from sglang_gemma4_yoco.core import model as core_model
from sglang_gemma4_yoco.core import state as states
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.planning import PLAN_ENTRY

pytestmark = pytest.mark.usefixtures("fresh_decisions")


def planned_for(batch: Any) -> Any:
    """Return the decision for a batch, which is stored on it."""
    return getattr(batch, PLAN_ENTRY, None)


@MARKS_CHUNKS
def test_an_intermediate_chunk_waits_for_the_loads_that_stock_waits_for(engine: Engine) -> None:
    """A cache that loads prefixes layer by layer makes each reader of a layer's K and V wait."""
    pool, read = engine.runner.token_to_kv_pool, dict[str, set[int]]()
    scheduled = engine.schedule(CHUNKS)
    for switch in ("0", "1"):
        with (
            mock.patch.object(pool, "get_key_buffer", wraps=pool.get_key_buffer) as keys,
            mock.patch.object(pool, "get_kv_buffer", wraps=pool.get_kv_buffer) as both,
            switched(switch),
        ):
            engine.forward(scheduled, intermediate=True)
        read[switch] = {call.args[0] for call in keys.call_args_list + both.call_args_list}
    assert FIRST_CUT in read["0"]
    assert read["1"] == read["0"]


def scheduled_batch(engine: Engine, name: str) -> Any:
    if name == "image":
        return media_batch(engine, MediaPrompt("what do you see <|image|> there?"))
    return engine.schedule(BATCHES[name])


@pytest.fixture
def in_place_norms(engine: Engine) -> Iterator[None]:
    """Make the norm before each FFN add into its argument, as its CUDA kernel does."""
    with norms_that_add_in_place(engine):
        yield


@pytest.mark.usefixtures("in_place_norms")
@pytest.mark.parametrize("name", [*BATCHES, "image"])
def test_norms_that_add_in_place(engine: Engine, name: str) -> None:
    """The fast path does not read the embeddings after layer 0 has overwritten them."""
    stock, fast = both_ways(engine, scheduled_batch(engine, name))
    assert fast.rows[-1] < stock.rows[-1]
    assert (fast.before["mm_input_embeds"] is not None) == (name == "image")


@pytest.mark.usefixtures("in_place_norms")
@pytest.mark.parametrize("place", ["first layer", "last tail layer"])
@pytest.mark.parametrize("name", ["input logprobs", "image"])
def test_a_failure_is_served_by_stock(engine: Engine, said: Said, place: str, name: str) -> None:
    scheduled = scheduled_batch(engine, name)
    stock = run(engine, scheduled, "0")
    reset_log()
    before = len(said())
    with failing(engine, place) as calls:
        seen = run(engine, scheduled, "1")
    assert calls == [0, 1]
    assert len(seen.rows) > LAYERS or place == "first layer"
    assert_served_by_stock(stock, seen)
    assert_untouched(engine)
    assert outcomes() == {counters.FAILED: 1}
    [error] = said(logging.ERROR)
    assert said()[before:] == [error]
    assert "InjectedError" in error
    fast = run(engine, scheduled, "1")
    assert fast.rows[-1] < stock.rows[-1]
    assert_same_answers(stock, fast, TOLERANCE)


def test_failures_in_a_row_turn_the_fast_path_off(engine: Engine, said: Said) -> None:
    scheduled = engine.schedule(BATCHES["one prompt"])
    stock = run(engine, scheduled, "0")
    reset_log()
    for _ in range(forward.LIMIT):
        with failing(engine, "last tail layer"):
            assert_served_by_stock(stock, run(engine, scheduled, "1"))
    for _ in range(3):
        after = run(engine, scheduled, "1")
        assert after.rows == stock.rows
        assert_served_by_stock(stock, after)
    assert outcomes() == {counters.FAILED: forward.LIMIT, forward.GIVEN_UP: 3}
    _, off = said(logging.ERROR)
    assert [line for line in said() if forward.GIVEN_UP.text in line] == [off]
    # New attention backends start with a new state.
    engine.runner.init_attention_backends()
    assert_fast(engine, BATCHES["one prompt"])


def test_a_success_between_failures_keeps_the_fast_path_on(engine: Engine) -> None:
    scheduled = engine.schedule(BATCHES["one prompt"])
    for _ in range(3):
        for _ in range(forward.LIMIT - 1):
            with failing(engine, "last tail layer"):
                run(engine, scheduled, "1")
        assert run(engine, scheduled, "1").rows[-1] == 1
    assert outcomes() == {
        counters.FAILED: 3 * (forward.LIMIT - 1),
        counters.TAIL_EAGER: 3,
    }


def test_a_forward_that_never_calls_its_norm(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Its layers may have stopped early for nothing: it is run again as stock.

    Later batches are not cut: the fast path is off, with this reason, which is an error.
    """
    state, main = state_of(engine), backends_of(engine).main_backend
    monkeypatch.setattr(state, "after_cut", mock.Mock(side_effect=AssertionError("an audit")))
    batch = releases.forward_batch(engine.schedule(BATCHES["one prompt"]), engine.runner)
    model, ends = engine.text_model, []

    def answer() -> torch.Tensor:
        ends.append(model.end_layer)
        return torch.full((70, 1), float(len(ends)))

    with switched("1"), forward_context(ForwardContext(attn_backend=main)):
        main.init_forward_metadata(batch)
        assert isinstance(planned_for(batch), Plan)
        run_by_hand = forward.EagerForward(state, batch.positions, None, answer)
        assert forward.serve_forward(state, batch, run_by_hand)[0] == 2
    assert ends == [FIRST_CUT, LAYERS]
    assert planned_for(batch) is None
    assert str(state.off_because) == core_model.OTHER_END
    assert outcomes() == {state.off_because: 1}
    [line] = said(logging.ERROR)
    assert core_model.OTHER_END in line
    assert_untouched(engine)


@pytest.mark.parametrize("mode", [ForwardMode.IDLE, ForwardMode.TARGET_VERIFY])
def test_what_is_no_prefill_is_not_counted(engine: Engine, mode: ForwardMode) -> None:
    """An idle rank's forward, and a verify step of speculative decoding."""
    batch = ForwardBatch(mode, 0, *[torch.zeros(0)] * 3, torch.zeros(0), 0)
    wrapped = forward.wrap_model_forward(lambda *_: "stock's")
    assert wrapped(engine.text_model, batch.input_ids, batch.positions, batch) == "stock's"
    assert outcomes() == {}


def test_nothing_is_known_of_a_model_that_was_closed(engine: Engine) -> None:
    """It is not taken for the served one, and the runner's backend is restored."""
    state = state_of(engine)
    others = set(states._attached) - {state}
    state.close()
    try:
        assert states.find_state(engine.text_model) is None
        assert set(states._attached) == others
        assert "init_forward_metadata" not in vars(engine.runner.attn_backend)
    finally:
        engine.runner.init_attention_backends()


def test_a_batch_that_is_never_run_is_freed_at_once(engine: Engine) -> None:
    """Without the cyclic collector: a plan does not keep its batch alive."""
    batch = releases.forward_batch(engine.schedule(BATCHES["one prompt"]), engine.runner)
    engine.runner.attn_backend.init_forward_metadata(batch)
    assert isinstance(vars(batch)[PLAN_ENTRY], Plan)
    planned = weakref.ref(batch)
    gc.disable()
    try:
        del batch
        assert planned() is None
    finally:
        gc.enable()


def test_when_stock_fails_too_its_error_propagates(engine: Engine) -> None:
    scheduled = engine.schedule(BATCHES["one prompt"])
    with (
        switched("1"),
        failing(engine, "last tail layer", calls=(0, 1)) as calls,
        pytest.raises(InjectedError) as caught,
    ):
        engine.forward(scheduled)
    assert calls == [0, 1]
    assert isinstance(caught.value.__context__, InjectedError)
    assert_untouched(engine)


def test_the_first_try_frees_its_memory_before_the_second(engine: Engine) -> None:
    scheduled = engine.schedule(BATCHES["one prompt"])
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def hook(*_: Any) -> None:
        alive.extend(reference() is not None for reference in held)
        if not held:
            big = torch.zeros(1000)
            held.append(weakref.ref(big))
            raise InjectedError(big.shape)

    with engine.text_model.layers[-1].mlp.register_forward_pre_hook(hook):
        run(engine, scheduled, "1")
    assert alive == [False]


def test_decode_goes_straight_through(
    engine: Engine, caplog: pytest.LogCaptureFixture, said: Said
) -> None:
    """Eligibility is not checked, no tail is planned, nothing is counted or logged.

    ``triton/test_hard_batches`` compares such steps with stock's.
    """
    scheduled, tail = engine.schedule(batch_of((0, 20), (0, 8))), backends_of(engine).tail_backend
    run(engine, scheduled, "1")
    reset_log()
    caplog.clear()
    with (
        mock.patch.object(eligibility, "check_eligibility") as gated,
        mock.patch.object(tail, "init_forward_metadata") as planned,
        caplog.at_level("DEBUG", log.logger.name),
    ):
        step(engine, scheduled, [30, 31], "1")
    assert not gated.called
    assert not planned.called
    assert not counters.served.forwards
    assert said(logging.DEBUG) == []
