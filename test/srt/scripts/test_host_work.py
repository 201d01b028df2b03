"""What ``host_work`` counts and times, on forwards whose work is known; and the table of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from triton import language as tl
from triton.runtime.interpreter import InterpretedFunction

import bench_prefill
import host_work
from batches import batch_of
from layer_rows import FIRST_CUT, FIRST_SHARED, LAYERS
from sglang_gemma4_reference.checkpoint import E2B, E2B_HOST, E4B, E4B_HOST
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_reference.recorder import RecordedGraph
from sglang_gemma4_yoco import log

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


def test_reads_and_launches_are_counted(engine: Engine, forward: Callable[[], Any]) -> None:
    x, out = torch.arange(4.0), torch.zeros(4)
    kernel = InterpretedFunction(copied)
    plain = host_work.count(engine, forward)
    assert plain.triton_launches == 0
    with added(engine, "front", lambda: [x.sum().item(), x.tolist(), kernel[(1,)](x, out)]):
        more = host_work.count(engine, forward)
    assert more.device_reads - plain.device_reads == 2
    assert more.triton_launches == 1
    assert more.operations - plain.operations == {"front": 2}, "the sum and its reading"
    assert out.tolist() == x.tolist()


def test_a_replay_is_one_operation_whose_time_is_the_devices(
    engine: Engine, forward: Callable[[], Any]
) -> None:
    x = torch.ones(2)
    graph = RecordedGraph.of(lambda: (x + 1) * 2)
    plain = host_work.count(engine, forward)
    with added(engine, "tail", lambda: graph.replay()):
        more = host_work.count(engine, forward)
    assert more.operations - plain.operations == {"tail": 1}
    assert graph.outputs.tolist() == [4, 4]

    def slow(_: Any) -> None:
        time.sleep(0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedGraph, "replay", slow)
        with added(engine, "tail", lambda: graph.replay()):
            assert host_work.clock(engine, forward)["tail"] < 0.5
            assert RecordedGraph.replay is slow, "put back"


def test_nothing_is_left_behind(engine: Engine, forward: Callable[[], Any]) -> None:
    backend, layers = engine.runner.attn_backend, engine.text_model.layers
    before = dict(vars(backend)), [dict(layer._forward_pre_hooks) for layer in layers]
    host_work.count(engine, forward)
    host_work.clock(engine, forward)
    assert (dict(vars(backend)), [dict(layer._forward_pre_hooks) for layer in layers]) == before


def test_off_and_on(engine: Engine) -> None:
    """The fast path's tail is seen for what it is; and the answer is that of a plain forward."""
    batch = engine.schedule(batch_of((0, 40)))
    with switched("1"):
        host = bench_prefill.measure_host(engine, batch, repeats=1)
    assert log.forwards[log.TAIL_EAGER] == 2, "counted once, timed once"
    assert host.keys() == {"off", "on"}
    for work in host.values():
        assert work.operations == sum(work.operations_by_region.values())
        assert tuple(work.seconds) == tuple(work.operations_by_region) == host_work.REGIONS
        assert min(work.seconds.values()) > 0
        assert work.outside_of_layers.median == host_work.outside_of_layers(work.seconds)
    assert host["off"].added_outside.median == 0
    assert host["on"].added_outside.median == (
        host["on"].outside_of_layers.median - host["off"].outside_of_layers.median
    )
    off, on = host["off"].operations_by_region, host["on"].operations_by_region
    assert abs(on["front"] - off["front"]) <= FIRST_CUT, "its layers' inputs come as slices or not"
    assert on["donor layer"] > off["donor layer"], "K and V apart, and the rows gathered"
    assert host["on"].device_reads == host["off"].device_reads


def test_presets_of_the_host_have_the_real_layers() -> None:
    for real, host in ((E2B, E2B_HOST), (E4B, E4B_HOST)):
        assert host.layer_types == real.layer_types
        assert host.kv_shared_layers == real.kv_shared_layers
        assert host.kv_heads == real.kv_heads
        assert host.double_wide_mlp == real.double_wide_mlp
        assert host.hidden_size == 64
