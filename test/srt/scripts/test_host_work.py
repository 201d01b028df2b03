"""What ``host_work`` counts and times, on forwards whose work is known; and the table of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

import bench_prefill
import host_work
from harness.batches import batch_of
from harness.layer_rows import FIRST_CUT, FIRST_SHARED, LAYERS
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_reference.recorder import RecordedGraph
from triton import language as tl

pytestmark = pytest.mark.usefixtures("forgotten_reports")


@pytest.fixture
def forward(engine: Engine) -> Callable[[], Any]:
    """A stock forward."""
    batch = engine.schedule(batch_of((0, 12)))

    def stock() -> Any:
        with switched("0"):
            return engine.forward(batch)

    return stock


LAYER_OF = {"front": 0, "donor layer": FIRST_CUT, "tail": LAYERS - 1}


@contextmanager
def added(engine: Engine, region: str, work: Callable[[], object]) -> Iterator[None]:
    """Planning, or the FFN of one layer, does something more."""
    where = engine.runner.attn_backend, "init_forward_metadata"
    if region != "planning":
        where = engine.text_model.layers[LAYER_OF[region]].mlp, "forward"
    stock = getattr(*where)

    def more(*arguments: Any, **named: Any) -> Any:
        work()
        return stock(*arguments, **named)

    with mock.patch.object(*where, more):
        yield


def copied(x: torch.Tensor, out: torch.Tensor) -> None:
    """A Triton kernel; its arguments are pointers there."""
    tl.store(out + tl.arange(0, 4), tl.load(x + tl.arange(0, 4)))


@pytest.mark.parametrize("region", ["planning", *LAYER_OF])
def test_operations_and_time_belong_to_their_region(
    engine: Engine, forward: Callable[[], Any], region: str
) -> None:
    assert FIRST_CUT == FIRST_SHARED - 1
    x = torch.ones(2)
    plain = host_work.count(engine, forward)

    def work() -> None:
        torch.add(x.view(2, 1), 1)
        time.sleep(0.5)

    with added(engine, region, work):
        more = host_work.count(engine, forward)
        seconds = host_work.clock(engine, forward)
    assert more.operations - plain.operations == {region: 2}
    assert plain.operations["rest"] > 0
    assert plain.operations["front"] > 20 * FIRST_CUT
    assert tuple(seconds) == host_work.REGIONS
    assert max(seconds, key=lambda name: seconds[name]) == region
    assert seconds[region] > 0.5


def test_reads_launches_and_replays_are_counted(engine: Engine, forward: Callable[[], Any]) -> None:
    x, out = torch.arange(4.0), torch.zeros(4)
    kernel = InterpretedFunction(copied)
    graph = RecordedGraph.of(lambda: (x + 1) * 2)
    plain = host_work.count(engine, forward)

    def work() -> None:
        _ = x.sum().item(), x.tolist(), kernel[(1,)](x, out)
        graph.replay()

    with added(engine, "front", work):
        more = host_work.count(engine, forward)
    assert (plain.triton_launches, plain.replays) == (0, 0)
    assert (more.triton_launches, more.replays) == (1, 1)
    assert more.device_reads - plain.device_reads == 2
    assert more.operations - plain.operations == {"front": 3}, "the sum, its reading, the replay"
    assert out.tolist() == x.tolist()
    assert graph.outputs.tolist() == [2, 4, 6, 8]


def test_the_time_of_a_replay_is_the_devices(engine: Engine, forward: Callable[[], Any]) -> None:
    graph = RecordedGraph.of(lambda: torch.ones(2) + 1)
    with (
        mock.patch.object(RecordedGraph, "replay", side_effect=lambda: time.sleep(0.5)),
        added(engine, "tail", lambda: graph.replay()),
    ):
        assert host_work.clock(engine, forward)["tail"] < 0.5


def test_off_and_on(engine: Engine) -> None:
    batch = engine.schedule(batch_of((0, 40)))
    with switched("1"):
        host = bench_prefill.measure_host(engine, batch, repeats=1)
    assert host.keys() == {"off", "on"}
    for work in host.values():
        assert work.operations == sum(work.operations_by_region.values())
        assert min(work.seconds.values()) > 0
    off, on = host["off"].operations_by_region, host["on"].operations_by_region
    assert abs(on["front"] - off["front"]) <= FIRST_CUT, "its layers' inputs come as slices or not"
    assert on["donor layer"] > off["donor layer"], "K and V apart, and the rows gathered"
    assert host["on"].device_reads == host["off"].device_reads
