"""A release of SGLang after the last tested one: stock, unless the operator enables it.

With ``SGLANG_GEMMA4_YOCO_UNTESTED=1`` it is cut after the self-check. Its tail runs in extend mode,
since a decode step may count the keys of a window differently, and is not captured. The default,
and what users see of it: ``server/test_untested_server``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from packaging.version import Version

from harness.batches import batch_of
from harness.breakages import BREAKAGES
from harness.checking import result_of_check
from harness.decode_graphs import recorded_decode_steps
from harness.fixtures import Change, Said
from harness.forwards import ENGINE, assert_fast, assert_stock, outcomes, state_of
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.admission import arguments
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.checking import self_check as check

pytestmark = pytest.mark.usefixtures("forgotten_reports")

MOST = 4
#: All but the last have more keys than a window.
PROMPTS = batch_of((0, 40), (90, 5), (0, 3))


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    """Return the engine of other tests, whose graphs may be captured."""
    return Engine(tiny_checkpoint, **ENGINE, cuda_graph_bs_decode=[MOST])


@pytest.fixture
def untested(engine: Engine, setting: Change) -> Iterator[Change]:
    """Yield a function that starts an SGLang newer than the last tested one, which is enabled."""

    def start(*, self_check: bool = True) -> None:
        setting(graph_rows=MOST, untested=True, self_check=self_check)
        engine.runner.init_attention_backends()
        with recorded_decode_steps(engine):
            pass

    with (
        mock.patch.object(compat.release, "LAST_TESTED", Version("0.5.0")),
        mock.patch.object(compat.server, "has_name", return_value=True),
    ):
        yield start
    engine.runner.init_attention_backends()


def test_with_the_setting_it_extends_eagerly(engine: Engine, untested: Change, said: Said) -> None:
    """The check passes first; the tail is eager although SGLang's decode steps are captured."""
    untested()
    state = state_of(engine)
    assert (state.off_because, state.captured) == (None, None)
    assert result_of_check(state)["compared"] is not None
    assert state.report.tail_mode == f"eager ({lifecycle.NOT_DECODING})"
    [warning] = said(logging.WARNING)
    assert warning.endswith(f"SGLANG_GEMMA4_YOCO_UNTESTED=1: {arguments.RUNS_UNTESTED}")
    assert_fast(engine, PROMPTS, tail_mode="EXTEND")
    assert outcomes() == {counters.TAIL_EAGER: 1}
    with recorded_decode_steps(engine):  # as for new weights, while it serves
        assert_fast(engine, PROMPTS, tail_mode="EXTEND")


def test_a_check_that_finds_a_defect_turns_it_off(engine: Engine, untested: Change) -> None:
    """The tail's keys are wrong while the server starts."""
    with BREAKAGES["keys doubled"](state_of(engine)):
        untested()
    assert_stock(engine, check.CHECK_FAILED, PROMPTS)


def test_without_the_check_it_is_stock(engine: Engine, untested: Change) -> None:
    untested(self_check=False)
    reason = state_of(engine).off_because
    assert reason is not None
    needs = "SGLANG_GEMMA4_YOCO_UNTESTED=1 needs SGLANG_GEMMA4_YOCO_SELF_CHECK=1"
    assert reason.text.endswith(needs)
    assert_stock(engine, reason, PROMPTS)
