"""Failures of each call that the package makes: stock answers, and all lasting state is kept.

A *site* is a call that a line of the package makes: file and line, what is called, and the phase
in which that happens. One site of a prefill whose tail runs eagerly, for example, is::

    K and V: models/gemma4.py:137 calls linear

No site is written down here. A forward, or a part of the start, first runs without failures, and
Python's profiler (``sys.setprofile``), which sees every call, notes those that lines of the package
make. Then it runs again for each site, and at the site's first call in that phase the profiler
raises: the line sees an exception in place of what it calls. Python removes a profiler that raises,
so nothing else fails. Calls of Python itself are no sites (``len``, ``dict.get``, ``contextlib``).

What comes of it is compared with stock: the answer, K and V of all layers, the fields of the batch,
the next decode step, the free slots, and every attribute of what outlives a forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from sglang.srt.model_executor import forward_context

from harness import call_sites
from harness.batches import batch_of
from harness.call_sites import PACKAGE, SGLANGS, is_of_package
from harness.checking import audited, tensors_unchanged
from harness.decode_graphs import recorded_decode_steps
from harness.forwards import ENGINE, InjectedError, backends_of, outcomes, state_of, times
from harness.observe import TOLERANCE, fields_of, without_padding
from harness.prefill_exits import RECORDED
from sglang_gemma4_reference import prefill_graphs as graphs_on_a_cpu
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import (
    Engine,
    Prompt,
    reset_log,
    switched,
)
from sglang_gemma4_reference.row_trace import batch_given
from sglang_gemma4_yoco import compat, counters, settings
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.prefill_exits import exit_setup
from sglang_gemma4_yoco.startup import checked, graphs_captured, guard

pytestmark = pytest.mark.usefixtures("forgotten_reports")

ERRORS = (InjectedError, torch.OutOfMemoryError)
AN_ANSWER = f"{SGLANGS}get_server_args"  # raises without a server, as expected: no site
GRAPH_REPLAYED = "RecordedGraphBackend.replay"  # when this fails the tail is eager from then on

# Function of the package -> phase of the calls made while it runs. If several of them run (a check
# cuts batches, an audit runs tails), the first in this table counts.
PHASES = {
    "check_graphs": "graphs compared",
    "capture_tail": "capture",
    "check_model": "check",
    "open_exits": "exits opened",
    "set_up": "the rest of the start",
    "Auditor.__call__": "audit",
    "plan_batch": "planning",
    "PerLayerInputs.project": "layers before the cut",
    "compute_keys_and_values": "K and V",
    "write_donor_keys_and_values": "K and V",
    "EagerTail.run": "tail",
    "Replay.run": "replay",
    "serve_forward": "the rest of the forward",  # the decision, the scatter, the counters
}


# ---------------------------------------------------------------- sites


class Site(NamedTuple):
    """A call of the package, as above."""

    phase: str
    file: str
    line: int
    callee: str

    def __str__(self) -> str:
        return f"{self.phase}: {self.file}:{self.line} calls {self.callee}"


def phase_of(frame: Any) -> str | None:
    """Return the phase of this frame; None outside of all phases."""
    running = set()
    while frame is not None:
        if is_of_package(frame.f_code.co_filename):
            running.add(frame.f_code.co_qualname)
        frame = frame.f_back
    for function, phase in PHASES.items():
        if function in running:
            return phase
    return None


def watched(on_site: Callable[[Site], None]) -> AbstractContextManager[None]:
    """Call ``on_site`` before each site in the ``with`` block; its line sees what that raises."""

    def note(caller: Any, callee: str) -> None:
        phase = phase_of(caller)
        if phase is not None and callee != AN_ANSWER:
            file = caller.f_code.co_filename.removeprefix(PACKAGE)
            on_site(Site(phase, file, caller.f_lineno, callee))

    return call_sites.watched(note)


@contextmanager
def failing_at(site: Site, error: type[BaseException]) -> Iterator[None]:
    """Raise at the first call of this site, which must happen, in the ``with`` block."""
    failed = []

    def fail(reached: Site) -> None:
        if reached == site:
            failed.append(site)
            raise error(str(site))

    with watched(fail):
        yield
    assert failed == [site]


def some_of(sites: list[Site], every: int) -> list[Site]:
    """Return the first site of each phase, and every nth one after it."""
    chosen = []
    for phase in dict.fromkeys(site.phase for site in sites):
        of_phase = [site for site in sites if site.phase == phase]
        chosen += of_phase[::every]
    return chosen


# ---------------------------------------------------------------- forwards, and lasting state


ROWS = 1  # prompts of a batch whose tail is captured


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    """Yield an engine whose prefills and tail are captured, and can be captured again."""
    recorded = RECORDED | {"cuda_graph_bs_decode": [ROWS], "cuda_graph_bs_prefill": [64]}
    with graphs_on_a_cpu.recordable(), settings.changed(graph_rows=ROWS):
        engine = Engine(tiny_checkpoint, **ENGINE, **recorded)
        with recorded_decode_steps(engine):
            yield engine


def set_up(engine: Engine, part: str) -> None:
    """Run a part of the setup after SGLang's own captures: ``capture``, ``check`` or ``exits``."""
    state = state_of(engine)
    with ExitStack() as without:
        if part != "capture":
            without.enter_context(mock.patch.object(lifecycle, "capture_tail"))
        if part in ("check", "exits"):
            state.serves = False
        if part == "check":
            state.report.check = None
        else:
            without.enter_context(mock.patch.object(checked, "_check_model"))
        if part != "exits":
            without.enter_context(mock.patch.object(exit_setup, "open_exits"))
        without.enter_context(guard.guarded("its setup failed", [engine.text_model]))
        graphs_captured.set_up(engine.runner, engine.text_model)


def turn_on(engine: Engine) -> None:
    """Turn on again what earlier failures turned off; reset counters and log."""
    state = state_of(engine)
    state.off_because, state.after_cut, state.failures_in_a_row = None, None, 0
    state.report.check = state.report.check or {}
    state.serves = True
    if state.captured is None:
        set_up(engine, "capture")
    exits = exit_setup.find_exits(engine.runner)
    assert exits is not None
    if not exits.are_open:
        set_up(engine, "exits")
    assert state.off_because is None
    reset_log()


class Way(NamedTuple):
    """A way through the package: prompts, and how they are counted."""

    prompts: tuple[Prompt, ...]
    outcome: str


# SGLang replays a prefill of at least half as many tokens as its graph has.
WAYS = {
    "eager": Way((*batch_of((10, 20), logprob_start=15), *batch_of((0, 9))), counters.TAIL_EAGER),
    "captured": Way(tuple(batch_of((9, 20))), counters.TAIL_CAPTURED),
    "exit": Way(tuple(batch_of((4, 40))), counters.EXIT_CAPTURED),
}


@dataclass(frozen=True)
class Served:
    """A prefill, and the decode step after it, which stock makes.

    Attributes:
        answer: logits and log-probabilities of the prefill; None if it raised.
        step: logits of the decode step.
        cache: K and V of each layer that has them after the prefill, without padding's slot.
        free: free slots of each pool in the end.
        changed: fields of the batch that refer to other objects after the prefill.
    """

    answer: torch.Tensor | None
    step: torch.Tensor
    cache: list[torch.Tensor]
    free: list[torch.Tensor]
    changed: set[str]


def serve(
    engine: Engine,
    way: Way,
    span: AbstractContextManager[Any] | None = None,
    raises: type[BaseException] | None = None,
) -> Served:
    """Serve the prompts in ``span``, or as stock; with ``raises`` the prefill must end with it."""
    scheduled = engine.schedule(way.prompts)
    engine.poison(scheduled)
    batch = releases.forward_batch(scheduled, engine.runner)
    seen = [(batch, fields_of(batch))]

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = batch_given(args, kwargs)  # SGLang's eager runner copies the batch
        seen.append((given, fields_of(given)))

    answer, expected = None, nullcontext() if raises is None else pytest.raises(raises)
    noted = engine.text_model.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad(), noted, expected, span or switched("0"):
        output = engine.runner.forward(batch).logits_output
        parts = output.next_token_logits, output.input_token_logprobs
        answer = torch.cat([part.flatten() for part in parts if part is not None])
    changed = set()
    for one, before in seen:
        changed |= {name for name, value in fields_of(one).items() if value is not before[name]}
    cache = without_padding(engine.kv())
    with switched("0"):
        step = engine.decode(scheduled, [30] * len(way.prompts)).next_token_logits.clone()
    allocator = engine.runner.token_to_kv_pool_allocator
    pools = allocator.full_attn_allocator, allocator.swa_attn_allocator
    return Served(answer, step, cache, [pool.free_pages.clone() for pool in pools], changed)


@functools.cache
def served_by_stock(engine: Engine, way: Way) -> Served:
    """Return stock's results."""
    return serve(engine, way)


def what_lives(engine: Engine) -> dict[str, Any]:
    """Return the attributes of everything that outlives a forward, by owner and name."""
    runner, state, backends = engine.runner, state_of(engine), backends_of(engine)
    prefills = runner.prefill_cuda_graph_runner
    owners = dict(runner.model.named_modules()) | {
        "state": state,
        "runner": runner,
        "runner's backend": runner.attn_backend,
        "tail's backend": backends.tail_backend,
        "prefills": prefills,
        "prefills' backend": prefills.backend,
        "exits": exit_setup.find_exits(runner),
        "pool": runner.token_to_kv_pool,
    }
    found = {"context": forward_context.has_forward_context()}
    for owner, one in owners.items():
        found |= {f"{owner}.{name}": value for name, value in vars(one).items()}
        if isinstance(one, torch.nn.Module):
            hooks = *one._forward_hooks.values(), *one._forward_pre_hooks.values()
            found[f"hooks of {owner}"] = len(hooks)
    for name in COUNT_FORWARDS:
        found.pop(name, None)
    return found


# Attributes that stock changes with each forward, and ``state.serves``, which ``set_up`` sets.
COUNT_FORWARDS = (
    "state.serves",
    *("runner.forward_pass_id", "runner.shared_read_done_event"),
    *("prefills.raw_bs", "prefills.raw_num_tokens"),
)


def changes(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the names whose object, number or string has changed."""

    def is_same(name: str) -> bool:
        if name not in before or name not in after:
            return False
        one, other = before[name], after[name]
        plain = isinstance(one, (bool, int, float, str, tuple))
        return one is other or (plain and bool(one == other))

    return {name for name in before.keys() | after.keys() if not is_same(name)}


# ---------------------------------------------------------------- failures, one by one


def assert_left_as_by(stock: Served, seen: Served) -> None:
    """Assert that pools, batch and next decode step are those of the stock forward."""
    assert all(map(torch.equal, seen.cache, stock.cache)), "K and V"
    assert torch.equal(seen.step, stock.step), "the next decode step"
    assert all(map(torch.equal, seen.free, stock.free)), "free slots"
    assert seen.changed == stock.changed, "fields of the batch"


def assert_nothing_else_changed(engine: Engine, before: dict[str, Any], *but: str) -> None:
    """Assert that nothing that outlives a forward has changed, except these attributes."""
    changed = changes(before, what_lives(engine)).difference(but)
    # A new capture has new buffers.
    assert not [name for name in changed if not name.startswith("tail's backend.cuda_graph_")]


def serve_failing(
    engine: Engine, way: Way, site: Site, error: type[BaseException], *, is_audited: bool
) -> None:
    """Assert that stock serves when a call of the fast path fails, and that one failure is counted.

    If the call is an audit's, the fast path serves, no failure is counted, and audits end.
    """
    turn_on(engine)
    stock, before = served_by_stock(engine, way), what_lives(engine)
    with audited(engine) if is_audited else nullcontext():
        seen = serve(engine, way, failing_at(site, error))
        assert state_of(engine).after_cut is None
    may_change = ["state.captured"] * (site.callee == GRAPH_REPLAYED)
    if is_audited:
        torch.testing.assert_close(seen.answer, stock.answer, atol=TOLERANCE, rtol=0)
        assert outcomes() == {way.outcome: 1}
    else:
        torch.testing.assert_close(seen.answer, stock.answer, atol=0, rtol=0)
        assert times(counters.FAILED) == 1, outcomes()
        assert state_of(engine).failures_in_a_row == 1
        may_change.append("state.failures_in_a_row")
    assert_left_as_by(stock, seen)
    assert_nothing_else_changed(engine, before, *may_change)


# Set by the start itself.
SET_UP = (*("state.captured", "state.off_because", "exits.are_open"),)


def start_failing(engine: Engine, part: str, site: Site, error: type[BaseException]) -> None:
    """Assert that a failed start continues, restores what it borrowed, and answers as stock."""
    turn_on(engine)
    before = what_lives(engine)
    with tensors_unchanged(engine), failing_at(site, error):
        set_up(engine, part)
    assert_nothing_else_changed(engine, before, *SET_UP)
    assert not counters.served.forwards
    if site.phase in ("capture", "graphs compared"):
        assert state_of(engine).off_because is None, "the tail can still run eagerly"
    for way in (WAYS["captured"], WAYS["exit"]):
        stock, seen = served_by_stock(engine, way), serve(engine, way, nullcontext())
        torch.testing.assert_close(seen.answer, stock.answer, atol=TOLERANCE, rtol=0)
        assert_left_as_by(stock, seen)
    assert counters.FAILED not in counters.served.forwards


class Work(NamedTuple):
    """Work whose calls fail one by one: a prefill, or a part of the start.

    Attributes:
        every: by default one in ``every`` of its sites fails.
        way: the prefill; None for a part of the start.
        is_audited: the calls that fail are those of the prefill's audit.
        part: the part of the start (see ``set_up``).
    """

    every: int
    way: Way | None = None
    is_audited: bool = False
    part: str = ""

    def run(self, engine: Engine, span: AbstractContextManager[Any]) -> None:
        """Do the work; the part of it in which calls fail runs in ``span``."""
        if self.way is None:
            with span:
                set_up(engine, self.part)
        else:
            with audited(engine) if self.is_audited else nullcontext():
                serve(engine, self.way, span)

    def fail(self, engine: Engine, site: Site, error: type[BaseException]) -> None:
        """Do the work with this call failing, and judge the result."""
        if self.way is None:
            start_failing(engine, self.part, site, error)
        else:
            serve_failing(engine, self.way, site, error, is_audited=self.is_audited)

    def sites(self, engine: Engine) -> list[Site]:
        """Return all sites, in the order of their first calls."""
        turn_on(engine)
        found: dict[Site, None] = {}
        self.run(engine, watched(found.setdefault))
        if self.is_audited:
            return [site for site in found if site.phase == "audit"]
        return list(found)

    def some_sites(self, engine: Engine) -> list[Site]:
        """Return the sites that fail by default; of a prefill, all calls of SGLang's code too."""
        sites = self.sites(engine)
        chosen = some_of(sites, self.every)
        if self.way is not None:
            chosen += [s for s in sites if s.callee.startswith(SGLANGS) and s not in chosen]
        return chosen


WORKS = {
    "eager": Work(8, WAYS["eager"]),
    "captured": Work(8, WAYS["captured"]),
    "exit": Work(8, WAYS["exit"]),
    "eager, audited": Work(16, WAYS["eager"], is_audited=True),
    "captured, audited": Work(16, WAYS["captured"], is_audited=True),
    "exit, audited": Work(16, WAYS["exit"], is_audited=True),
    "capture": Work(100, part="capture"),
    "check": Work(50, part="check"),
    "exits": Work(50, part="exits"),
}


def test_calls_of_every_phase_are_seen(engine: Engine) -> None:
    """A renamed function would leave the calls of its phase out."""
    seen = {site.phase for work in WORKS.values() for site in work.sites(engine)}
    assert seen == set(PHASES.values())


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize(
    "which",
    # The start has a thousand sites: some twenty minutes.
    ["some", pytest.param("all", marks=[pytest.mark.release, pytest.mark.timeout(3600)])],
)
def test_each_call_fails_once(engine: Engine, name: str, which: str) -> None:
    """Some calls fail, with one error or the other; before a release all of them, with both."""
    work, wrong = WORKS[name], []
    sites = work.sites(engine) if which == "all" else work.some_sites(engine)
    for number, site in enumerate(sites):
        errors: tuple[type[Exception], ...] = ERRORS
        if which != "all":
            errors = (ERRORS[number % 2],)
        for error in errors:
            try:
                work.fail(engine, site, error)
            except (Exception, pytest.fail.Exception) as why:  # noqa: BLE001 - all are reported
                wrong.append(f"{site}: {type(why).__name__}: {why}")
    assert wrong == []


#: Why a failure must be raised (other ranks wait, or the process ends) -> the errors.
RAISED = {
    "several ranks": ERRORS,
    "interrupted": (KeyboardInterrupt, SystemExit),
}


@pytest.fixture(params=RAISED)
def raised(request: pytest.FixtureRequest) -> Iterator[tuple[type[BaseException], ...]]:
    """Yield the errors that must be raised."""
    is_alone = request.param == "interrupted"
    with mock.patch.object(compat.server, "is_single_rank", return_value=is_alone):
        yield RAISED[request.param]


@pytest.mark.parametrize("name", ["eager", "captured, audited", "exit, audited"])
def test_what_must_be_raised_leaves_all_as_it_was(
    engine: Engine, name: str, raised: tuple[type[BaseException], ...]
) -> None:
    work = WORKS[name]
    assert work.way is not None
    stock = served_by_stock(engine, work.way)
    for number, site in enumerate(some_of(work.sites(engine), every=50)):
        turn_on(engine)
        before, error = what_lives(engine), raised[number % 2]
        with audited(engine) if work.is_audited else nullcontext():
            seen = serve(engine, work.way, failing_at(site, error), raises=error)
        # A forward that raises leaves its residual on the batch, with or without this package.
        assert seen.changed <= stock.changed | {"residual_stream"}, site
        if work.is_audited:
            assert all(map(torch.equal, seen.cache, stock.cache)), site
            assert torch.equal(seen.step, stock.step), site
        assert all(map(torch.equal, seen.free, stock.free)), site
        assert counters.FAILED not in counters.served.forwards
        assert_nothing_else_changed(engine, before)


@pytest.mark.release
@pytest.mark.parametrize("part", ["capture", "check", "exits"])
def test_a_start_that_must_raise_gives_back_what_it_borrowed(
    engine: Engine, part: str, raised: tuple[type[BaseException], ...]
) -> None:
    for number, site in enumerate(some_of(WORKS[part].sites(engine), every=40)):
        turn_on(engine)
        before, error = what_lives(engine), raised[number % 2]
        with tensors_unchanged(engine), pytest.raises(error), failing_at(site, error):
            set_up(engine, part)
        assert_nothing_else_changed(engine, before, *SET_UP)
