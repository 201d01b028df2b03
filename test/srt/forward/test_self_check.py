"""The check at start: it takes both ways, finds what is broken, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_graphs import recorded_decode_steps
from forwards import (
    ENGINE,
    PLACES,
    assert_fast,
    assert_stock,
    assert_untouched,
    failing,
    with_larger_keys,
)
from layer_rows import FIRST_SHARED, LAYERS
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import E2B_TINY, write_checkpoint
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import owner, seams
from sglang_gemma4_yoco.checking import difference, self_check
from sglang_gemma4_yoco.checking.self_check import Checked
from sglang_gemma4_yoco.cutting import cut, donor, fallback
from sglang_gemma4_yoco.deciding import gate, threshold
from sglang_gemma4_yoco.deciding.rows import KeptRows
from sglang_gemma4_yoco.telling import report

pytestmark = pytest.mark.usefixtures("forgotten_reports")

REQUESTS = 3
FORWARDS = 6 + 1 + REQUESTS  # three kinds both ways; then stock together and alone
NEW = [7, 6, 5]  # tokens, with pages of one


def checked(engine: Engine) -> Checked:
    return self_check.check(engine.runner, owner.of(engine.text_model))


@contextmanager
def counted(engine: Engine) -> Iterator[list[list[int]]]:
    """Rows of each layer's FFN, for every forward in the span."""
    forwards: list[list[int]] = []
    hooks = [engine.text_model.register_forward_pre_hook(lambda *_: forwards.append([0] * LAYERS))]

    def counter(number: int) -> Callable[..., None]:
        def count(_: Any, args: tuple[Any, ...]) -> None:
            forwards[-1][number] += args[0].shape[0]

        return count

    layers = enumerate(engine.text_model.layers)
    hooks += [layer.mlp.register_forward_pre_hook(counter(n)) for n, layer in layers]
    try:
        yield forwards
    finally:
        for hook in hooks:
            hook.remove()


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
    found = owner.of(engine.text_model).checked
    assert found is not None
    assert found.largest is not None
    assert 0 < found.largest < 1e-5
    assert found.agrees


def test_both_ways_are_taken(engine: Engine) -> None:
    """Three kinds of batches, each once of all rows and once cut; then stock by itself."""
    with counted(engine) as forwards:
        found = checked(engine)
    total, kept, suffix = sum(NEW), REQUESTS, (NEW[0] - 2) + 1 + NEW[2]
    stock = [total] * LAYERS
    front = [total] * (FIRST_SHARED - 1)
    behind = LAYERS - len(front)
    unread = 0 if releases.tells_unread_chunks() else kept
    # Suffixes are no decode step, so layer K-1 attends with all of its rows.
    assert forwards == [
        *(stock, front + [kept] * behind),
        *(stock, front + [suffix] * behind),
        *(stock, front + [unread] * behind),
        stock,
        *([new] * LAYERS for new in NEW),
    ]
    assert len(forwards) == FORWARDS
    assert found.agrees


def test_nothing_is_left_behind(engine: Engine) -> None:
    before, reported = everything(engine), dict(report.forwards)
    assert checked(engine).agrees
    after = everything(engine)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert dict(report.forwards) == reported
    assert_untouched(engine)
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
    assert_fast(engine)


# ---------------------------------------------------------------- what it finds


def _wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = KeptRows.indices
    monkeypatch.setattr(KeptRows, "indices", lambda self: [max(i - 1, 0) for i in stock(self)])


def _keys_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = donor.attend

    def attend(parts: Any, q: Any, k: Any, v: Any, batch: Any) -> Any:
        return stock(parts, q, None, None, batch)

    monkeypatch.setattr(donor, "attend", attend)


def _positions_of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = cut.gather

    def gather(*args: Any) -> Any:
        gathered = stock(*args)
        return dataclasses.replace(gathered, positions=gathered.positions + 1)

    monkeypatch.setattr(cut, "gather", gather)


BREAKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the rows before the last ones are kept": _wrong_row,
    "keys of the donor are a hundredth too large": with_larger_keys,
    "positions of the tail are one too high": _positions_of_other_rows,
    "keys of the donor are never written": _keys_never_written,
}


@pytest.mark.parametrize("way", BREAKS)
def test_what_is_broken_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    assert checked(engine).agrees
    with monkeypatch.context() as broken:
        BREAKS[way](broken)
        found = checked(engine)
    assert found.largest is not None
    assert found.allowed is not None
    assert not found.agrees
    assert found.largest > 100 * found.allowed
    assert checked(engine).agrees


def test_a_fast_path_that_fails_is_no_rounding(engine: Engine) -> None:
    with failing(engine, "first tail layer", calls=(1,)):  # the first is stock's
        found = checked(engine)
    assert found.largest == math.inf
    assert not found.agrees
    fallback.reset()


def test_the_threshold_has_no_say(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(threshold.VARIABLE, "1000")
    with counted(engine) as forwards:
        assert checked(engine).largest is not None
    assert [f[-1] < f[0] for f in forwards[:4]] == [False, True, False, True]
    assert threshold.min_skipped_rows() == 1000


def test_what_is_no_number_is_infinitely_far() -> None:
    two = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for wrong in (math.nan, math.inf):
        other = two.clone()
        other[1, 0] = wrong
        assert difference.relative_error(two, other) == math.inf
        assert difference.relative_error(other, two) == math.inf
    assert difference.relative_error(torch.zeros(2, 2), two) == math.inf


def test_the_worst_row_counts() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 10.0]])
    assert difference.relative_error(rows, rows) == 0.0
    assert difference.relative_error(rows, rows + torch.tensor([[0.0], [0.0], [1.0]])) == (
        pytest.approx(math.sqrt(2) / 10)
    )
    assert difference.relative_error(rows[:0], rows[:0]) == 0.0


def test_what_rounding_allows() -> None:
    """More than the rounding of all layers, and than stock's own difference; less than a bug."""
    fp32, bf16 = (difference.allowed(0.0, 35, t) for t in (torch.float32, torch.bfloat16))
    assert 1e-5 < fp32 < 1e-4
    assert 0.02 < bf16 < 0.1
    assert difference.allowed(0.0, 35, torch.float32, torch.bfloat16) == bf16
    assert difference.allowed(0.01, 35, torch.float32) == pytest.approx(0.08)


# ---------------------------------------------------------------- what becomes of it


@pytest.fixture
def started(engine: Engine) -> Iterator[owner.Owner]:
    """What is known of the engine's model before its graphs are recorded."""
    engine.runner.init_attention_backends()
    yield owner.of(engine.text_model)
    engine.runner.init_attention_backends()
    owner.record(engine.runner, engine.text_model)


def test_the_start_line_says_what_was_found(
    started: owner.Owner, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    assert started.checked is None
    with caplog.at_level("INFO", "sglang_gemma4_yoco"):
        owner.record(engine.runner, engine.text_model)
    [line] = [r.getMessage() for r in caplog.records if " is on: " in r.getMessage()]
    assert started.checked is not None
    assert line.endswith(f", {started.checked.describe()}")
    assert ", checked: largest difference " in line


def test_a_server_that_fails_is_served_by_stock(
    started: owner.Owner,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as broken, caplog.at_level("INFO", "sglang_gemma4_yoco"):
        _wrong_row(broken)
        owner.record(engine.runner, engine.text_model)
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert [line for _, line in said if " is on: " in line] == []
    [error] = [line for level, line in said if level == "ERROR"]
    assert "is off for this server: its self-check at start failed; checked: largest" in error
    assert started.constant_reason == self_check.FAILED
    assert_stock(engine, self_check.FAILED)


def test_it_is_made_once(started: owner.Owner, engine: Engine) -> None:
    """Weights that are replaced have their graphs recorded anew, while prefixes are cached."""
    owner.record(engine.runner, engine.text_model)
    first = started.checked
    with counted(engine) as forwards:
        owner.record(engine.runner, engine.text_model)
    assert forwards == []
    assert started.checked is first


@pytest.mark.parametrize(
    ("value", "reason"),
    [("0", self_check.OFF), ("maybe", "is not a valid value: use 1")],
)
def test_the_operator_has_a_say(
    started: owner.Owner,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    reason: str,
) -> None:
    monkeypatch.setenv(self_check.VARIABLE, value)
    with counted(engine) as forwards:
        owner.record(engine.runner, engine.text_model)
    assert forwards == []
    assert started.checked is not None
    assert reason in started.checked.describe()
    assert started.checked.describe().startswith("not checked: ")
    assert_fast(engine)


def test_what_cannot_be_compared_is_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine.runner
    with releases.published(pp_size=2):
        assert self_check.why_not(runner) == self_check.PIPELINE
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
    started: owner.Owner, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with failing(engine, "first layer"):
        owner.record(engine.runner, engine.text_model)
    [error] = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "could not be run" in error.getMessage()
    assert error.exc_info
    assert started.checked is not None
    assert started.checked.describe() == "not checked: it could not be run: InjectedError"
    assert_fast(engine)


# ---------------------------------------------------------------- other servers


def test_it_agrees_with_a_recorded_tail(tiny_checkpoint: Path) -> None:
    engine = Engine(tiny_checkpoint, **ENGINE, cuda_graph_bs_decode=[1, 2, 4])
    known = owner.of(engine.text_model)
    known.checked = None  # as if nobody had been served yet
    with recorded_decode_steps(engine):
        assert known.graphs is not None
        found, largest = known.checked, known.graphs.rows[-1]
        with counted(engine) as forwards:
            assert checked(engine).agrees
    assert found is not None
    assert found.agrees
    assert found.largest is not None
    # Those with one row for each request are replayed, which runs no Python.
    assert largest >= REQUESTS
    assert [f[-1] for f in forwards[:2]] == [sum(NEW), 0]


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_agrees_with_pages(tiny_checkpoint: Path, page: int, dtype: str) -> None:
    engine = Engine(tiny_checkpoint, **(ENGINE | {"page_size": page, "dtype": dtype}))
    found = owner.of(engine.text_model).checked
    assert found is not None
    assert found.largest is not None
    assert found.agrees


def test_a_window_of_one_token_less_is_found_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among 512 values it is near rounding where the edges are not marked."""
    wide = write_checkpoint(tmp_path / "wide", dataclasses.replace(E2B_TINY, sliding_window=512))
    engine = Engine(wide, **(ENGINE | {"dtype": "bfloat16"}))
    attention = owner.of(engine.text_model).attention
    assert attention is not None
    stock = type(attention.tail).forward_decode

    def forward_decode(self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kw: Any) -> Any:
        before, layer.sliding_window_size = (
            layer.sliding_window_size,
            layer.sliding_window_size - (layer.sliding_window_size > 0),
        )
        try:
            return stock(self, q, k, v, layer, *args, **kw)
        finally:
            layer.sliding_window_size = before

    assert checked(engine).agrees
    monkeypatch.setattr(type(attention.tail), "forward_decode", forward_decode)
    marked = checked(engine)
    monkeypatch.setattr(self_check, "_mark_edges", lambda *_: None)
    unmarked = checked(engine)
    assert not marked.agrees
    assert marked.largest is not None
    assert unmarked.largest is not None
    assert marked.largest > 3 * unmarked.largest
