"""Single forwards on the engine, off and on: rows that were computed, and lasting state.

``observe`` records what a forward did; this module asserts what it must have done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.model_executor import forward_context

from harness import observe
from harness.batches import batch_of
from harness.layer_rows import FIRST_SHARED
from harness.observe import (
    TOLERANCE,
    Observed,
    assert_as_expected,
    assert_metadata_unchanged,
    assert_same_answers,
    assert_same_cache,
    assert_same_objects,
    expected,
    replayed,
    run,
)
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.attention import FrontBackend
from sglang_gemma4_reference.engine import SWITCHED_OFF, Engine, Prompt
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.core.backend_pair import BackendPair
from sglang_gemma4_yoco.core.state import ModelState, find_state, get_state
from sglang_gemma4_yoco.counters import Outcome
from sglang_gemma4_yoco.patched import patched

# The server arguments of the engine that most tests share.
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 4096}
# Those of a small engine whose kernels run in Triton's interpreter, one program after another; each
# split of a request's keys is a program.
INTERPRETED_ENGINE = ENGINE | {
    "max_total_tokens": 512,
    "max_running_requests": 8,
    "triton_attention_num_kv_splits": 2,
}
TWO_PROMPTS = batch_of((0, 40), (0, 3))
CHUNKS = batch_of((20, 60), (0, 30), to_come=(21, 22))

MARKS_CHUNKS = pytest.mark.skipif(
    not releases.marks_intermediate(), reason="this SGLang does not mark intermediate chunks"
)

#: A context in which the runner's own backend must not run a tail, where it is a ``FrontBackend``.
no_tail_on_main = mock.patch.object(
    FrontBackend, "forward_decode", side_effect=AssertionError("on main")
)


def state_of(engine: Engine) -> ModelState:
    """Return the state of the engine's model, which must have one."""
    return get_state(engine.text_model)


def backends_of(engine: Engine) -> BackendPair:
    """Return the attention of its tail."""
    state = state_of(engine)
    attention = state.backends
    assert attention is not None, state.off_because
    return attention


def assert_fast(
    engine: Engine,
    prompts: Sequence[Prompt] = TWO_PROMPTS,
    tolerance: float = TOLERANCE,
    *,
    prefix: str = "0",
    replays: bool = False,
    **changed: Any,
) -> tuple[Observed, Observed]:
    """Assert that a forward of ``prompts`` is cut and equals stock; return stock and fast.

    Args:
        prefix: the switch under which its cached tokens are computed.
        replays: its tail is replayed, so none of the tail's Python code runs.
        changed: fields of ``observe.Expected`` that differ for this forward.
    """
    wanted = expected(engine, prompts)
    assert wanted is not None, "there is nothing to skip"
    if replays:
        wanted = replayed(wanted)
    scheduled = engine.schedule(prompts)
    stock = run(engine, scheduled, "0")
    if prefix == "1":
        scheduled = engine.schedule(prompts, prefix=prefix)
    fast = run(engine, scheduled, "1")
    observe.assert_stock(engine, prompts, stock)
    assert_as_expected(fast, dataclasses.replace(wanted, **changed))
    assert_same_objects(fast)
    assert_metadata_unchanged(fast)
    assert_same_cache(stock, fast)
    assert fast.hidden.isfinite().all()
    if not observe.skips_tail(prompts):
        assert_same_answers(stock, fast, tolerance)
    assert_untouched(engine)
    return stock, fast


def assert_stock(
    engine: Engine, reason: object, prompts: Sequence[Prompt] = TWO_PROMPTS
) -> Observed:
    """Assert that the switch changes no computed value, and that the reason is counted."""
    scheduled, before = engine.schedule(prompts), times(reason)
    stock, refused = run(engine, scheduled, "0"), run(engine, scheduled, "1")
    observe.assert_stock(engine, prompts, stock)
    observe.assert_stock(engine, prompts, refused)
    assert times(reason) == before + 1
    assert_served_by_stock(stock, refused)
    captured = stock.output.hidden_states
    if captured is not None:
        assert torch.equal(captured, refused.output.hidden_states)
    return refused


def assert_served_by_stock(stock: Observed, seen: Observed) -> None:
    """Assert that the result is stock's bit for bit, and that the last run computed all rows."""
    assert seen.rows[-len(stock.rows) :] == stock.rows
    assert_same_objects(seen)
    assert_same_cache(stock, seen)
    assert torch.equal(stock.hidden, seen.hidden)
    assert_same_answers(stock, seen, 0.0)


def assert_untouched(engine: Engine) -> None:
    """Assert that nothing of the fast path is left on the model or in the attention state."""
    model = engine.text_model
    owners = [model, model.norm, *model.layers, *(layer.self_attn for layer in model.layers)]
    assert [o for o in owners if {"forward", "project_per_layer_inputs"} & o.__dict__.keys()] == []
    assert "layers" not in model.__dict__
    if hasattr(model, "end_layer"):  # Gemma 3n's loop has no bounds
        assert (model.start_layer, model.end_layer) == (0, len(model.layers))
    assert not forward_context.has_forward_context()
    state = find_state(model)
    if state is not None and state.backends is not None:
        assert state.backends.tail_backend.forward_metadata is None


def outcomes() -> dict[Outcome, int]:
    """Return the outcomes of forwards with the fast path on, since the counters were reset."""
    found = dict(counters.served.forwards)
    found.pop(SWITCHED_OFF, None)
    return found


def times(outcome: object) -> int:
    """Return the number of forwards with this outcome, which may also be given by its text."""
    found = {str(one): number for one, number in counters.served.forwards.items()}
    return found.get(str(outcome), 0)


class InjectedError(Exception):
    """Failure that a test injects."""


_PLACES = {"first layer": 0, "first tail layer": FIRST_SHARED, "last tail layer": -1}


@contextmanager
def failing(
    engine: Engine,
    place: str,
    *,
    calls: Container[int] = (0,),
) -> Iterator[list[int]]:
    """Make the FFN at ``place`` raise in these of its calls; yield the numbers of its calls."""
    seen: list[int] = []

    def hook(*_: Any) -> None:
        seen.append(len(seen))
        if seen[-1] in calls:
            raise InjectedError(place)

    ffn = engine.text_model.layers[_PLACES[place]].mlp
    with ffn.register_forward_pre_hook(hook):
        yield seen


@contextmanager
def norms_that_add_in_place(engine: Engine) -> Iterator[None]:
    """Make the norms before the FFNs add into their arguments, as their CUDA kernel does."""

    def in_place(stock: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor, residual: torch.Tensor, *rest: Any) -> Any:
            normed, written = stock(x, residual, *rest)
            return x.copy_(normed), residual.copy_(written)

        return forward

    with ExitStack() as span:
        for layer in engine.text_model.layers:
            norm = layer.pre_feedforward_layernorm
            span.enter_context(patched(norm, _forward_method=in_place(norm._forward_method)))
        yield


@contextmanager
def norm_called(engine: Engine, otherwise: Callable[..., Any]) -> Iterator[None]:
    """Call the model's last norm by ``otherwise(call, rows, *others)``, as another SGLang may.

    A server treats that as third-party code, unless its setting ``trust`` names this module.
    """
    last, kind = engine.text_model.norm, type(engine.text_model.norm)
    call = kind.__call__

    def called(norm: Any, *args: Any) -> Any:
        stock = partial(call, norm)
        if norm is last:
            return otherwise(stock, *args)
        return stock(*args)

    with mock.patch.object(kind, "__call__", called):
        yield


def with_one_argument_more(call: Callable[..., Any], *args: Any) -> Any:
    """Call the norm with an extra argument, for ``norm_called``: no release does so today."""
    return call(*args, None)
