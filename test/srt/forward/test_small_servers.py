"""The self-check of a server with few requests, small pools or short contexts.

Prompts longer than the window are always compared, one after another if they do not fit together:
otherwise a window one key too short or too long would pass as "checked". What a server has no room
to serve need not be compared. If another comparison is impossible, the server runs as stock.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfigurator

from harness.batches import batch_of
from harness.breakages import BREAKAGES
from harness.checking import checked, tensors_unchanged
from harness.decode_graphs import recorded_decode_steps
from harness.fixtures import Checkpoints, Said
from harness.forwards import ENGINE, assert_stock, state_of
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import metrics
from sglang_gemma4_yoco.checking import self_check as check
from sglang_gemma4_yoco.checking import synthetic_requests
from sglang_gemma4_yoco.commands import status
from sglang_gemma4_yoco.core import state as states

pytestmark = pytest.mark.usefixtures("forgotten_reports")

WINDOW = E2B_TINY.sliding_window
#: All heads are as wide, as one pool for all layers needs.
SHAPE = dataclasses.replace(E2B_TINY, global_head_dim=E2B_TINY.head_dim)
SHORT, LONG = "windows one key short", "windows one key long"
#: ``max_total_tokens``; the window's pool gets four fifths of it. SGLang starts no server whose
#: window's pool is not larger than the window.
TOO_FEW, JUST_ENOUGH, PLENTY = 41, 42, 4096


def start_engine(checkpoints: Checkpoints, **arguments: Any) -> Engine:
    """Return an engine whose fast path the check has turned on, or off."""
    return Engine(checkpoints(SHAPE), **(ENGINE | arguments))


def find_wrong_windows(engine: Engine) -> list[str]:
    """Return the wrong windows that the check finds; assert that right ones pass."""
    found = []
    with tensors_unchanged(engine):
        assert checked(engine).agrees
        for way in (SHORT, LONG):
            with BREAKAGES[way](state_of(engine)):
                if not checked(engine).agrees:
                    found.append(way)
    return found


@pytest.mark.parametrize("tokens", [JUST_ENOUGH, JUST_ENOUGH + 1, PLENTY])
@pytest.mark.parametrize("running", [1, 2, 3])
def test_wrong_windows_are_found(checkpoints: Checkpoints, running: int, tokens: int) -> None:
    """Several prompts are compared in one batch, where the server has such batches."""
    engine = start_engine(checkpoints, max_running_requests=running, max_total_tokens=tokens)
    assert find_wrong_windows(engine) == [SHORT, LONG]
    batches = synthetic_requests.choose_batches(engine.runner, state_of(engine))
    assert (max(map(len, batches)) > 1) == (running > 1)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"max_total_tokens": WINDOW - 1}, []),
        ({"max_total_tokens": WINDOW}, [SHORT]),
        ({"max_total_tokens": WINDOW + 1}, [SHORT, LONG]),
        ({"context_length": WINDOW // 2}, []),
    ],
)
def test_windows_that_no_prompt_exceeds(
    checkpoints: Checkpoints, arguments: dict[str, Any], found: list[str]
) -> None:
    """The longest prompt is within the window: the check is complete without a longer one."""
    engine = start_engine(checkpoints, disable_hybrid_swa_memory=True, **arguments)
    assert find_wrong_windows(engine) == found
    assert state_of(engine).off_because is None


def test_what_has_no_room_is_not_cut(checkpoints: Checkpoints, said: Said) -> None:
    """Prompts may be longer than the window, but the pool has no room for the K and V of one."""
    with mock.patch.object(MemoryPoolConfigurator, "validate_swa_pool_size"):
        engine = start_engine(checkpoints, max_total_tokens=TOO_FEW)
    reason = f"{check.UNCHECKED}: {synthetic_requests.NO_ROOM}"
    assert f"is off for this server: {reason}; nothing was compared" in said(logging.ERROR)[-1]
    with mock.patch.object(states, "_attached", WeakSet([state_of(engine)])):
        described = metrics.describe_state()
    assert described["check"]["unchecked"] == synthetic_requests.NO_ROOM
    assert status.verdict([described]) == (False, reason)
    assert_stock(engine, reason, batch_of((0, 20)))


def test_a_captured_tail_with_less_room_than_the_table(checkpoints: Checkpoints) -> None:
    """The table has three requests; the tail is captured for one row and two, and replayed so."""
    engine = start_engine(checkpoints, max_running_requests=3, cuda_graph_bs_decode=[2])
    with recorded_decode_steps(engine):
        tail = state_of(engine).captured
        assert tail is not None, state_of(engine).report
        assert tail.sizes == (1, 2)
        assert checked(engine).agrees
        with BREAKAGES["a stale input of graphs: lengths"](state_of(engine)) as applies:
            assert applies
            assert not checked(engine).agrees
