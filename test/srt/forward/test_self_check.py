"""The self-check: it runs both paths, finds defects, and restores all state."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch

from harness.breakages import BREAKAGES
from harness.checking import (
    NEW,
    REQUESTS,
    checked,
    counted,
    find_defect,
    result_of_check,
    tensors_unchanged,
)
from harness.fixtures import Change, Checkpoints, Said
from harness.forwards import (
    ENGINE,
    TWO_PROMPTS,
    InjectedError,
    assert_fast,
    assert_stock,
    assert_untouched,
    failing,
    state_of,
)
from harness.layer_rows import FIRST_SHARED, LAYERS
from harness.observe import run
from sglang_gemma4_reference.checkpoint import E2B_TINY_SHARP
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import compat, counters, metrics, settings
from sglang_gemma4_yoco.admission import runner_parts
from sglang_gemma4_yoco.checking import layerwise, rounding
from sglang_gemma4_yoco.checking import self_check as check
from sglang_gemma4_yoco.checking.self_check import CheckResult
from sglang_gemma4_yoco.checking.synthetic_requests import make_synthetic_requests
from sglang_gemma4_yoco.commands import status
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.core import state as states
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.patched import patched
from sglang_gemma4_yoco.prefill_exits import exit_setup
from sglang_gemma4_yoco.startup import graphs_captured, guard, runner_methods

pytestmark = pytest.mark.usefixtures("forgotten_reports")


# ---------------------------------------------------------------- what the check runs


def test_both_paths_are_taken(engine: Engine, said: Said) -> None:
    """Stock runs once, the tail once per kind of batch on stock's rows, and one whole forward.

    Nothing is left of it, counted or logged.
    """
    with tensors_unchanged(engine), counted(engine) as forwards:
        assert checked(engine).agrees
    assert said() == []
    assert not counters.served.forwards
    assert_untouched(engine)
    for module in engine.text_model.modules():
        assert not {**module._forward_hooks, **module._forward_pre_hooks}
        assert not {"forward", "project_per_layer_inputs"} & vars(module).keys()
    total, kept, suffix = sum(NEW), REQUESTS, (NEW[0] - 2) + 1 + NEW[2]
    before, tail = FIRST_SHARED - 1, LAYERS - FIRST_SHARED + 1
    assert forwards == [
        [total] * LAYERS,
        [0] * before + [kept] * tail,
        [0] * before + [suffix] * tail,
        [0] * LAYERS,
        [total] * before + [kept] * tail,
    ]
    assert_fast(engine)


def test_on_a_gpu_kernels_for_other_numbers_of_requests_are_compiled(engine: Engine) -> None:
    """Triton compiles for 1 request and for multiples of 16; the comparisons have 3."""
    state = state_of(engine)
    before, tail = FIRST_SHARED - 1, LAYERS - FIRST_SHARED + 1
    for most, numbers in ((4096, [1, 16]), (15, [1])):
        fits = mock.patch.object(engine.runner, "max_running_requests", most)
        with counted(engine) as forwards, fits, patched(state, on_gpu=True):
            assert checked(engine).agrees
        expected = [[NEW[0] * n] * before + [n] * tail for n in numbers]
        assert forwards[5 : 5 + len(expected)] == expected


# ---------------------------------------------------------------- findings


def test_slots_of_the_requests_may_be_written(engine: Engine) -> None:
    """Slot 0, which is for padding, may be too; any other one: ``test_forced``."""
    [first, *_] = engine.kv_buffers()[0]
    with make_synthetic_requests(engine.runner, state_of(engine)) as synthetic:
        first[synthetic.requests[0].window_slots] = 0.5
        first[0] = 0.5
        assert not synthetic.others_changed()


LAST = 5  # of the check's forwards: stock, three on stock's rows, and a whole one


def test_no_event_of_its_own_is_left(engine: Engine) -> None:
    """SGLang's scheduler waits for the event of the batch that it launched last."""
    runner, launched = engine.runner, object()
    state = state_of(engine)
    with patched(runner, shared_read_done_event=launched):
        with make_synthetic_requests(runner, state):
            runner.shared_read_done_event = object()
        assert runner.shared_read_done_event is launched


def test_a_plan_that_no_forward_has_taken(engine: Engine) -> None:
    """The check ignores it, and it is counted when a user's next batch is planned."""
    state = state_of(engine)
    with mock.patch.object(state, "planned_rows", 7):
        assert checked(engine).agrees
        assert state.planned_rows == 7


def test_nan_logits(engine: Engine) -> None:
    """Only the whole forward can give such logits, from uninitialised memory."""
    forwards = count(1)

    def poison(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        if next(forwards) == LAST:
            return output * math.nan
        return None

    with engine.text_model.register_forward_hook(poison):
        assert find_defect(engine) == check.NO_NUMBERS


@pytest.mark.parametrize("forward", [2, 3])
def test_answers_of_another_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, forward: int
) -> None:
    """The tail's output is right, but SGLang reads other rows: last rows, and suffixes."""
    processor, forwards = engine.runner.model.logits_processor, count(1)
    stock = processor.forward

    def swapped(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        if next(forwards) == forward:
            output.next_token_logits = output.next_token_logits.flip(0)
        return output

    monkeypatch.setattr(processor, "forward", swapped)
    assert find_defect(engine) == "logits"


#: A comparison -> the relative error of each number with which its bound is exceeded, in fp32.
ERRORS = {
    "keys": 3e-5,
    "per-layer inputs before": 3e-5,
    "queries": 3e-5,
    "attention": 1.4e-5,  # a tenth of the bound is due to scores
    "mean of the values": 3e-5,
    "output": 5e-5,
    "normed output": 6e-5,
    "logits": 9e-5,
}


@pytest.mark.parametrize("what", ERRORS)
def test_ten_times_a_bound_would_miss_what_it_finds(engine: Engine, what: str) -> None:
    compare, draw = rounding.compare_rows, torch.Generator().manual_seed(0)

    def compare_rows(name: str, expected: Any, found: Any, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(what):
            found = found * (1 + ERRORS[what] * torch.randn(found.shape, generator=draw))
        return compare(name, expected, found, *args, **kwargs)

    with mock.patch.object(rounding, "compare_rows", compare_rows):
        worst = checked(engine).worst
    assert worst is not None
    assert worst.what.startswith(what)
    assert 1 < worst.excess < 10


def test_a_fast_path_that_fails_is_no_rounding(engine: Engine) -> None:
    with failing(engine, "first tail layer", calls=(1,)):  # the first is stock's
        found = checked(engine)
    assert str(found) == check.RAISED
    assert not found.agrees


def test_the_threshold_does_not_apply(engine: Engine, setting: Change) -> None:
    setting(min_skipped_rows=1000)
    with counted(engine) as forwards:
        assert checked(engine).worst is not None
    assert forwards[-1][-1] < forwards[-1][0]
    assert settings.current.min_skipped_rows == 1000


# ---------------------------------------------------------------- consequences


@pytest.fixture
def started(engine: Engine) -> Iterator[ModelState]:
    """Yield the model state of the engine before its graphs are captured."""
    engine.runner.init_attention_backends()
    yield state_of(engine)
    engine.runner.init_attention_backends()
    capture(engine)


def capture(engine: Engine) -> None:
    """Run the steps after SGLang's own captures."""
    graphs_captured.set_up(engine.runner, engine.text_model)


def lines_of_start(engine: Engine, said: Said) -> tuple[list[str], list[str]]:
    """Return the log of a capture of the engine's graphs: "is on" lines, and errors."""
    capture(engine)
    return [line for line in said() if " is on: " in line], said(logging.ERROR)


def test_it_runs_once_and_the_start_line_has_its_worst_comparison(
    started: ModelState, engine: Engine, said: Said
) -> None:
    """After a weight update graphs are captured again, while prefixes are cached."""
    [line], _ = lines_of_start(engine, said)
    first = result_of_check(started)
    _, _, compared = line.partition(", self-check passed: worst error ")
    assert f" ({first['compared']}), tolerance " in compared
    with counted(engine) as forwards:
        capture(engine)
    assert forwards == []
    assert started.report.check is first


def test_a_server_that_fails_is_served_by_stock(
    started: ModelState, engine: Engine, said: Said
) -> None:
    with settings.changed(self_check=True), BREAKAGES["rows of the next request"](started):
        on, [error] = lines_of_start(engine, said)
    assert on == []
    assert f"is off for this server: {check.CHECK_FAILED}; error " in error
    assert_stock(engine, check.CHECK_FAILED)


def test_the_setting_skips_it(started: ModelState, engine: Engine, setting: Change) -> None:
    setting(self_check=False)
    with counted(engine) as forwards:
        capture(engine)
    assert forwards == []
    assert result_of_check(started)["unchecked"] == check.NOT_WANTED.unchecked
    assert_fast(engine)


def test_what_cannot_be_compared(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = engine.text_model.norm.weight.data
    kind = type(engine.text_model)
    for owner, name, value, reason in (
        (compat.attention, "is_capturing", lambda: True, eligibility.CAPTURING),
        # As if another plugin had replaced the package's forward with its own.
        (kind, "forward", kind.forward.__wrapped__, check.NOT_SEEN),
        # As where a graph of SGLang's runs the layers.
        (layerwise, "call_before_layers", lambda *_: nullcontext(), check.NOT_SEEN),
        (engine.text_model.norm.weight, "data", norm * math.nan, check.NOT_FINITE),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            found = checked(engine)
            assert found == CheckResult(unchecked=str(reason))
            assert not found.agrees
    assert checked(engine).agrees


def test_a_server_that_cannot_be_checked_is_stock(
    started: ModelState,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    said: Said,
) -> None:
    """It is not known to be right."""
    with failing(engine, "first layer"):
        on, [failed, off] = lines_of_start(engine, said)
    assert on == []
    assert "could not be run" in failed
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [bool(record.exc_info) for record in errors] == [True, False], (
        "the first has a traceback"
    )
    reason = f"{check.UNCHECKED}: it failed: InjectedError"
    assert f"is off for this server: {reason}; nothing was compared" in off
    assert result_of_check(started)["unchecked"] == "it failed: InjectedError"
    assert_stock(engine, reason)


def test_a_start_that_fails_is_stock(engine: Engine, said: Said) -> None:
    """SGLang continues; the next start tries the fast path again."""
    with mock.patch.object(runner_parts, "find_pool_reason", side_effect=InjectedError):
        engine.runner.init_attention_backends()
    assert_stock(engine, guard.NOT_SET_UP)
    assert "InjectedError" in said(logging.ERROR)[-1]
    engine.runner.init_attention_backends()
    assert_fast(engine)


@pytest.mark.parametrize("part", ["repair_capture", "open_exits"])
def test_a_capture_of_sglangs_goes_on(
    started: ModelState, engine: Engine, said: Said, part: str
) -> None:
    captured = list[Any]()
    wrap = runner_methods.WRAPPED[compat.server.ModelRunner, "init_cuda_graphs"]
    capture_graphs = wrap(captured.append)
    with mock.patch.object(exit_setup, part, side_effect=InjectedError):
        capture_graphs(engine.runner)
    assert captured == [engine.runner]
    assert started.off_because == guard.NOT_SET_UP
    assert "could not be set up; InjectedError" in said(logging.ERROR)[-1]
    assert_stock(engine, guard.NOT_SET_UP)


def test_prefills_that_bypass_the_path(
    engine: Engine, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After twenty prefills that bypass the path, the status is no longer "active".

    Another plugin has put a forward of its own, here SGLang's, in the place of the package's.
    """
    monkeypatch.setattr(states, "_attached", {state_of(engine)})
    batch, kind = engine.schedule(TWO_PROMPTS), type(engine.text_model)
    with mock.patch.object(kind, "forward", kind.forward.__wrapped__):
        for _ in range(20):
            assert run(engine, batch, "1").rows == [43] * LAYERS
        assert metrics.describe_state()["active"] is True
        assert said(logging.WARNING) == []
        for _ in range(3):
            run(engine, batch, "1")
    [warning] = said(logging.WARNING)
    assert counters.NOT_CUT in warning
    state = metrics.describe_state()
    assert (state["active"], state["reason"]) == (False, "set up, but no prefill was cut")
    assert state["forwards"][counters.UNSEEN] == 22  # the last one may still reach it
    assert status.verdict([state]) == (False, "set up, but no prefill was cut")
    run(engine, batch, "1")  # is cut
    assert metrics.describe_state()["active"] is True


# ---------------------------------------------------------------- other servers


def test_one_key_of_many(checkpoints: Checkpoints) -> None:
    """One key of 512 is near rounding in a mean, and sharp heads may not attend to it at all."""
    shape = dataclasses.replace(E2B_TINY_SHARP, sliding_window=512)
    engine = Engine(checkpoints(shape), **(ENGINE | {"dtype": "bfloat16"}))
    state = state_of(engine)
    assert checked(engine).agrees
    for way in ("windows one key short", "windows one key long"):
        with BREAKAGES[way](state), check.run_both_paths(engine.runner, state) as both:
            found = both.findings()
        means = [each.excess for each in found if each.what.startswith("mean of the values")]
        assert max(means) > 50  # 6 without the enlarged values at the window's edge


def test_keys_of_the_pool_are_as_large_as_the_models(engine: Engine) -> None:
    """Gemma 4 does not scale scores: larger keys would get more attention than any prompt's."""
    with check.run_both_paths(engine.runner, state_of(engine)) as both:
        [request, *_] = [r for r in both._requests.requests if r.cached]
        for layer, (keys, _) in zip(engine.text_model.layers, engine.kv_buffers(), strict=False):
            window = layer.self_attn.attn.sliding_window_size > 0
            slots = request.window_slots if window else request.slots
            drawn, made = keys[slots[: request.cached]], keys[slots[request.cached :]]
            assert 0.5 < drawn.std() / made.std() < 2
