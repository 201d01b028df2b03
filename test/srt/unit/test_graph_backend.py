"""The recorder behind SGLang's interface of graph backends, called as SGLang's runners call it.

``forward/test_decode_graphs`` has SGLang itself call it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip(
    "sglang.srt.model_executor.runner_backend.base_cuda_graph_backend",
    reason="this SGLang asks no platform for its graphs",
)

from sglang_gemma4_reference import graph_backend, recorder
from sglang_gemma4_reference.recorder import RecordedGraph


@pytest.fixture
def backend() -> Iterator[graph_backend.RecordedGraphBackend]:
    """As an owner of graphs beside SGLang's runner makes one: of a device's module, and no more."""
    group = SimpleNamespace(tp_group=SimpleNamespace(barrier=lambda: None))
    with mock.patch.object(graph_backend, "get_parallel", return_value=group):
        backend = graph_backend.RecordedGraphBackend(SimpleNamespace(device_module=torch.cpu))
    backend._pool = graph_backend.Pool()
    with backend.capture_session(torch.cpu.current_stream()):
        yield backend
    backend.cleanup()


def test_a_backend_warms_up_twice_and_records_once(
    backend: graph_backend.RecordedGraphBackend,
) -> None:
    x, calls, resets = torch.ones(2), [], []

    def body() -> torch.Tensor:
        calls.append(recorder.is_recording())
        return x * 2

    backend.capture_one(3, body, post_warmup_hook=lambda: resets.append(len(calls)))
    assert calls == [False, False, True]
    assert resets == [1, 2]
    assert backend.can_run(None, 3)
    assert not backend.can_run(None, 4)
    with backend.replay_session():
        assert backend.replay(3, None).tolist() == [2, 2]
    assert len(calls) == 3


def test_a_replay_overwrites_the_outputs_of_later_graphs(
    backend: graph_backend.RecordedGraphBackend,
) -> None:
    x = torch.ones(2)
    backend.capture_one("first", lambda: x * 2)
    backend.capture_one("second", lambda: x * 3)
    second = backend.replay("second", None)
    assert second.tolist() == [3, 3]
    first = backend.replay("first", None)
    assert second.isnan().all()
    assert backend.replay("second", None) is second
    assert first.tolist() == [2, 2], "what was recorded first is out of the later ones' reach"


def test_graphs_of_pools_of_their_own_leave_each_other_alone(
    backend: graph_backend.RecordedGraphBackend,
) -> None:
    x = torch.ones(2)
    backend.capture_one("ours", lambda: x * 2)
    ours = backend.replay("ours", None)
    theirs = graph_backend.Pool()
    graph = RecordedGraph.of(lambda: x * 3)
    theirs.graphs.append(graph)
    theirs.replay(graph)
    assert ours.tolist() == [2, 2]
