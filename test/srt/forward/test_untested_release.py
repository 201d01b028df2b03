"""A release of SGLang that was never tested: does the tail decode, and is it captured?

Its decode step may count the keys of a window differently. So a decode step is compared with stock
on the server itself, before anything is captured. On Triton: ``triton/test_planning``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any
from unittest import mock

import pytest
from packaging.version import Version

from harness.batches import batch_of
from harness.checking import counted
from harness.decode_graphs import recorded_decode_steps
from harness.forwards import (
    ENGINE,
    NEEDS_GRAPHS,
    assert_fast,
    attention_of,
    outcomes,
    state_of,
)
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine, settings_changed
from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.checking import start as check
from sglang_gemma4_yoco.replaced import replaced

pytestmark = [
    NEEDS_GRAPHS,
    pytest.mark.usefixtures("forgotten_reports"),
    pytest.mark.skipif(
        Version(version("sglang")) < compat.release.LAST_TESTED,
        reason="an older release lacks arguments that a newer one is refused without",
    ),
]

MOST = 4
#: All but the last have more keys than a window.
PROMPTS = batch_of((0, 40), (90, 5), (0, 3))
#: Forwards of the check at start, and of the comparison before it.
OF_THE_CHECK, OF_THE_COMPARISON = 5, 2


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Any) -> Engine:
    """The engine of other tests, whose graphs may be captured."""
    return Engine(tiny_checkpoint, **ENGINE, cuda_graph_bs_decode=[MOST])


@contextmanager
def begun_anew(engine: Engine, tested: Version) -> Iterator[None]:
    """The runner has new backends, and nothing is decided; so it is again after the span."""
    with mock.patch.object(compat.release, "LAST_TESTED", tested):
        engine.runner.init_attention_backends()
        yield
    engine.runner.init_attention_backends()


@pytest.fixture
def untested(engine: Engine) -> Iterator[None]:
    """The installed SGLang claims to be newer than the last one that was tested."""
    with begun_anew(engine, Version("0.5.0")):
        yield


@contextmanager
def decode_windows(engine: Engine, *, more: int) -> Iterator[None]:
    """A decode step of the tail's backend sees so many keys more in a window; an extend row not."""
    tail = attention_of(engine).tail
    stock = tail.forward_decode

    def forward_decode(q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer.sliding_window_size > 0:
            layer = copy.copy(layer)
            layer.sliding_window_size += more
        return stock(q, k, v, layer, *args, **kwargs)

    with replaced(tail, forward_decode=forward_decode):
        yield


@contextmanager
def captured(engine: Engine) -> Iterator[None]:
    """SGLang has captured its decode steps, and the package what it will."""
    with settings_changed(graph_rows=MOST), recorded_decode_steps(engine):
        yield


def assert_extends(engine: Engine, said: Callable[..., list[str]], why: str) -> None:
    """The path is on, its tail extends, eagerly, answers are stock's, and one warning says so."""
    state = state_of(engine)
    assert state.unsupported is None
    assert state.captured is None
    assert state.report["tail"] == f"eager ({lifecycle.NOT_DECODING})"
    [warning] = [line for line in said(logging.WARNING) if "the tail extends" in line]
    assert why in warning
    assert_fast(engine, PROMPTS, tail_mode="EXTEND")
    assert outcomes() == {counters.TAIL_EAGER: 1}


@pytest.mark.usefixtures("untested")
def test_a_decode_step_that_is_shown_to_be_right_is_captured(
    engine: Engine, said: Callable[..., list[str]]
) -> None:
    assert not attention_of(engine).decodes
    with counted(engine) as forwards, captured(engine):
        assert len(forwards) >= OF_THE_CHECK + OF_THE_COMPARISON
        assert attention_of(engine).decodes
        assert_fast(engine, PROMPTS, replays=True)
    assert outcomes() == {counters.TAIL_CAPTURED: 1}
    assert said(logging.WARNING) == []


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("more", [-1, 1])
def test_a_decode_step_that_sees_other_keys_is_not_used(
    engine: Engine, said: Callable[..., list[str]], more: int
) -> None:
    assert len(PROMPTS[0].new) > E2B_TINY.sliding_window + 1
    with decode_windows(engine, more=more), captured(engine):
        assert_extends(engine, said, " of layer ")
        assert "check" in state_of(engine).report


def test_a_tested_release_compares_nothing_more(engine: Engine) -> None:
    with (
        begun_anew(engine, Version(version("sglang"))),
        replaced(engine.runner, decode_cuda_graph_runner=None),
        counted(engine) as forwards,
    ):
        engine.runner.init_decode_cuda_graph()
        assert len(forwards) == OF_THE_CHECK
        assert attention_of(engine).decodes


@pytest.mark.usefixtures("untested")
def test_without_the_check_it_extends(
    engine: Engine, setting: Callable[..., None], said: Callable[..., list[str]]
) -> None:
    setting(self_check=False)
    with captured(engine):
        assert_extends(engine, said, f"not checked: {check.OFF}")


@pytest.mark.usefixtures("untested")
def test_a_decode_step_that_raises_is_not_used(
    engine: Engine, said: Callable[..., list[str]]
) -> None:
    def forward_decode(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("it needs K and V")

    with replaced(attention_of(engine).tail, forward_decode=forward_decode), captured(engine):
        [error] = said(logging.ERROR)
        assert "it needs K and V" in error
        assert_extends(engine, said, check.RAISED)


@pytest.mark.usefixtures("untested")
def test_graphs_that_are_captured_anew_find_it_decided(
    engine: Engine, said: Callable[..., list[str]]
) -> None:
    """While it serves nothing is compared; what was decided at start stays."""
    with captured(engine):
        pass
    with (
        mock.patch.object(check, "check_decode_step", side_effect=AssertionError),
        captured(engine),
    ):
        assert_fast(engine, PROMPTS, replays=True)
    assert said(logging.WARNING) == []
