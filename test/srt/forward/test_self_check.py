"""The check at start: it takes both ways, finds what is broken, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from breakages import BREAKAGES
from checking import NEW, REQUESTS, checked, counted
from forwards import (
    ENGINE,
    PLACES,
    assert_fast,
    assert_stock,
    assert_untouched,
    failing,
)
from layer_rows import FIRST_SHARED, LAYERS
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import (
    E2B_TINY_SHARP,
    write_checkpoint,
)
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import report, seams, settings
from sglang_gemma4_yoco.checking import layerwise, self_check
from sglang_gemma4_yoco.checking.checked import Checked
from sglang_gemma4_yoco.core import forward, gate
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.loading import start

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def everything(engine: Engine) -> list[torch.Tensor]:
    """Copies of tables, pools, and what is free in them."""
    runner = engine.runner
    allocator = runner.token_to_kv_pool_allocator
    parts = [getattr(allocator, f"{n}_attn_allocator", None) for n in ("full", "swa")]
    free = [part.free_pages for part in parts if part is not None]
    mapping = getattr(runner.token_to_kv_pool, "full_to_swa_index_mapping", None)
    tables = [runner.req_to_token_pool.req_to_token, *([] if mapping is None else [mapping])]
    pools = [buffer for buffers in engine.kv_buffers() for buffer in buffers]
    return [tensor.clone() for tensor in (*tables, *free, *pools)]


# ---------------------------------------------------------------- what it does


def test_it_has_run_when_a_runner_is_ready(engine: Engine) -> None:
    found = start.of(engine.text_model).checked
    assert found is not None
    assert found.worst is not None
    assert 0 < found.worst.error < 1e-5
    assert found.agrees
    assert found.apart is not None
    assert 0 < found.apart < 1e-5


def test_both_ways_are_taken(engine: Engine) -> None:
    """Once as stock; of each kind once cut, forced; once as it serves; and stock, rounded more."""
    with counted(engine) as forwards:
        found = checked(engine)
    total, kept, suffix = sum(NEW), REQUESTS, (NEW[0] - 2) + 1 + NEW[2]
    stock = [total] * LAYERS
    front = [total] * (FIRST_SHARED - 1)
    behind = LAYERS - len(front)
    unread = 0 if releases.tells_unread_chunks() else kept
    # Suffixes are no decode step, so layer K-1 attends with all of its rows.
    assert forwards == [
        stock,
        front + [kept] * behind,
        front + [suffix] * behind,
        front + [unread] * behind,
        front + [kept] * behind,
        stock,
    ]
    assert found.agrees


def test_nothing_is_left_behind(engine: Engine) -> None:
    before, reported = everything(engine), dict(report.forwards)
    assert checked(engine).agrees
    after = everything(engine)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert dict(report.forwards) == reported
    assert_untouched(engine)
    assert_unhooked(engine)
    assert_fast(engine)


def test_nothing_is_counted_or_said(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        checked(engine)
    assert [r.getMessage() for r in caplog.records if "fast prefill" in r.getMessage()] == []
    assert not report.forwards
    assert not report.rows


@pytest.mark.parametrize("place", ["first layer", "donor's attention", "last tail layer"])
def test_what_fails_leaves_nothing_either(engine: Engine, place: str) -> None:
    assert place in PLACES
    before = everything(engine)
    with failing(engine, place), pytest.raises(Exception, match=place):
        checked(engine)
    after = everything(engine)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert_untouched(engine)
    assert_unhooked(engine)
    assert_fast(engine)


def assert_unhooked(engine: Engine) -> None:
    modules = list(engine.text_model.modules())
    assert [m for m in modules if m._forward_hooks or m._forward_pre_hooks] == []
    assert "project_per_layer_inputs" not in vars(engine.text_model)


# ---------------------------------------------------------------- what it finds


@pytest.mark.parametrize("layer", [FIRST_SHARED - 2, FIRST_SHARED - 1, LAYERS - 1])
def test_what_is_broken_is_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """A defect of one layer is told of that layer, and of none behind it."""
    known = start.of(engine.text_model)
    mlp = engine.text_model.layers[layer].mlp
    stock = mlp.forward

    def forward(x: torch.Tensor, *args: Any) -> Any:
        off = 1.0 if known.refused else 1.05  # stock runs as if it were refused
        return stock(x * off, *args)

    monkeypatch.setattr(mlp, "forward", forward)
    with self_check.comparing(engine.runner, known) as both:
        named = {found.what for found in both.findings() if not found.is_rounding}
    behind_it = {"rows behind the norm"} if layer == LAYERS - 1 else set()
    assert named == {f"output of layer {layer}"} | behind_it


def test_slots_of_others_stay_as_they_are(engine: Engine) -> None:
    known = start.of(engine.text_model)
    [first, *_] = engine.kv_buffers()[0]
    stray = 40  # of a cached token

    def write(*_: Any) -> None:
        if not known.refused:
            first[stray] = 0.5

    hook = engine.text_model.layers[-1].mlp.register_forward_pre_hook(write)
    try:
        found = checked(engine)
    finally:
        hook.remove()
    assert found.worst is not None
    assert found.worst.what == self_check.OTHERS_SLOTS
    assert not found.agrees


def test_logits_that_are_no_numbers(engine: Engine) -> None:
    """Only where nothing is forced, as what a forward finds in memory is."""
    known, calls = start.of(engine.text_model), []

    def poison(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        calls.append(known.refused)
        served = len(calls) == 5  # stock, three forced
        return output * math.nan if served else None

    hook = engine.text_model.register_forward_hook(poison)
    try:
        found = checked(engine)
    finally:
        hook.remove()
    assert found.worst is not None
    assert found.worst.what == self_check.NO_NUMBERS
    assert found.apart == math.inf


def test_answers_of_another_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = engine.runner.model.logits_processor.forward
    calls: list[int] = []

    def swapped(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        calls.append(1)
        if len(calls) == 5:
            output.next_token_logits = output.next_token_logits.flip(0)
        return output

    monkeypatch.setattr(engine.runner.model.logits_processor, "forward", swapped)
    found = checked(engine)
    assert found.worst is not None
    assert found.worst.what == self_check.OTHERS_ROW


def test_a_fast_path_that_fails_is_no_rounding(engine: Engine) -> None:
    with failing(engine, "first tail layer", calls=(1,)):  # the first is stock's
        found = checked(engine)
    assert found.describe() == f"checked layer by layer: {self_check.RAISED}"
    assert not found.agrees
    fallback.reset()


def test_the_threshold_has_no_say(engine: Engine, setting: Callable[..., None]) -> None:
    setting(min_skipped_rows=1000)
    with counted(engine) as forwards:
        assert checked(engine).worst is not None
    assert [f[-1] < f[0] for f in forwards[:4]] == [False, True, True, True]
    assert settings.current.min_skipped_rows == 1000


# ---------------------------------------------------------------- what becomes of it


@pytest.fixture
def started(engine: Engine) -> Iterator[ModelState]:
    """What is known of the engine's model before its graphs are recorded."""
    engine.runner.init_attention_backends()
    yield start.of(engine.text_model)
    engine.runner.init_attention_backends()
    starting.record(engine.runner, engine.text_model)


def test_the_start_line_says_what_was_found(
    started: ModelState, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    assert started.checked is None
    with caplog.at_level("INFO", "sglang_gemma4_yoco"):
        starting.record(engine.runner, engine.text_model)
    [line] = [r.getMessage() for r in caplog.records if " is on: " in r.getMessage()]
    assert started.checked is not None
    assert line.endswith(f", {started.checked.describe()}")
    assert ", checked layer by layer: " in line


def test_a_server_that_fails_is_served_by_stock(
    started: ModelState, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    breakage = BREAKAGES["rows of the next request"]
    with settings.changed(self_check=True), breakage(started), caplog.at_level("INFO"):
        starting.record(engine.runner, engine.text_model)
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert [line for _, line in said if " is on: " in line] == []
    [error] = [line for level, line in said if level == "ERROR"]
    assert (
        "is off for this server: its self-check at start failed; checked layer by layer: " in error
    )
    assert started.refused == self_check.FAILED
    assert_stock(engine, self_check.FAILED)


def test_it_is_made_once(started: ModelState, engine: Engine) -> None:
    """Weights that are replaced have their graphs recorded anew, while prefixes are cached."""
    starting.record(engine.runner, engine.text_model)
    first = started.checked
    with counted(engine) as forwards:
        starting.record(engine.runner, engine.text_model)
    assert forwards == []
    assert started.checked is first


def test_the_operator_has_a_say(
    started: ModelState, engine: Engine, setting: Callable[..., None]
) -> None:
    setting(self_check=False)
    with counted(engine) as forwards:
        starting.record(engine.runner, engine.text_model)
    assert forwards == []
    assert started.checked is not None
    assert started.checked.describe() == f"not checked: {self_check.OFF}"
    assert_fast(engine)


def test_what_cannot_be_compared_is_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine.runner
    with monkeypatch.context() as later:
        later.setattr(seams, "is_backed_later", lambda _: True)
        assert self_check.why_not(runner) == self_check.BACKED_LATER
    with monkeypatch.context() as small:
        small.setattr(self_check, "_lengths", lambda *_: [(5000, 5)])
        assert checked(engine) == Checked(unchecked=self_check.NO_ROOM)
    with monkeypatch.context() as refused:
        refused.setattr(gate, "_graph", lambda: gate.CAPTURING)
        assert checked(engine) == Checked(unchecked=gate.CAPTURING)
    with monkeypatch.context() as unseen:
        unseen.setattr(report, "_count", lambda *_, **__: None)
        assert checked(engine) == Checked(unchecked=self_check.NOT_SEEN)
    norm = engine.text_model.norm.weight
    right = norm.data.clone()
    try:
        norm.data[0] = float("nan")
        assert checked(engine) == Checked(unchecked=self_check.NOT_FINITE)
    finally:
        norm.data.copy_(right)
    assert checked(engine).agrees


def test_a_check_that_cannot_be_run_costs_nothing(
    started: ModelState, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with failing(engine, "first layer"):
        starting.record(engine.runner, engine.text_model)
    [error] = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "could not be run" in error.getMessage()
    assert error.exc_info
    assert started.checked is not None
    assert started.checked.describe() == "not checked: it could not be run: InjectedError"
    assert_fast(engine)


# ---------------------------------------------------------------- other servers


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_agrees_with_pages(tiny_checkpoint: Path, page: int, dtype: str) -> None:
    engine = Engine(tiny_checkpoint, **(ENGINE | {"page_size": page, "dtype": dtype}))
    found = start.of(engine.text_model).checked
    assert found is not None
    assert found.worst is not None
    assert found.agrees


def test_one_key_of_many(tmp_path: Path) -> None:
    """Among 512 values one is near rounding in bf16, and none that a sharp head looks at."""
    shape = dataclasses.replace(E2B_TINY_SHARP, sliding_window=512)
    engine = Engine(write_checkpoint(tmp_path, shape), **(ENGINE | {"dtype": "bfloat16"}))
    known = start.of(engine.text_model)
    assert checked(engine).agrees
    for way in ("windows one key short", "windows one key long"):
        with BREAKAGES[way](known), self_check.comparing(engine.runner, known) as both:
            found = both.findings()
        means = [one.excess for one in found if one.what.startswith("mean of the values")]
        assert max(means) > 50  # without marks it would be 6


def test_keys_of_the_pool_are_as_large_as_the_models(engine: Engine) -> None:
    """Gemma 4 scales no scores: larger keys would be attended to as no prompt's are."""
    with self_check.comparing(engine.runner, start.of(engine.text_model)) as both:
        [request, *_] = [r for r in both._requests if r.cached]
        for layer, (keys, _) in zip(engine.text_model.layers, engine.kv_buffers(), strict=False):
            window = layer.self_attn.attn.sliding_window_size > 0
            slots = request.window_slots if window else request.slots
            drawn, made = keys[slots[: request.cached]], keys[slots[request.cached :]]
            assert 0.5 < drawn.std() / made.std() < 2


def test_layers_that_nobody_saw(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise.Trace, "is_whole", False)
    assert checked(engine) == Checked(unchecked=self_check.NOT_SEEN)
