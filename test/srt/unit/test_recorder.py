"""The recorder in place of CUDA graphs: each defect of a capture must show.

That a replay gives what an eager call gives, and that nothing of a batch is captured, is shown of
the tail itself: ``forward/test_captured_tail``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from sglang_gemma4_reference import recorder
from sglang_gemma4_reference.recorder import (
    CaptureError,
    RecordedGraph,
)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "slice by a scalar": lambda x: x[: x[0, 0].int()],
    "mask": lambda x: x[x > 0],
    "to cpu": lambda x: x.to("cpu"),
    "resize": lambda x: x.resize_(2, 2),
    "other memory": lambda x: x.set_(torch.ones(3).untyped_storage()),
    "a number for the device": lambda x: x + torch.tensor(2.0, device="cpu"),
    "a recording": lambda x: RecordedGraph.of(lambda: x + 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_capture_refuses(name: str) -> None:
    with pytest.raises(CaptureError, match=r"while a graph is recorded|inside a recording"):
        RecordedGraph.of(lambda: REFUSED[name](torch.ones(4, 4)))
    assert not recorder.is_recording()
    torch.ones(3).tolist()  # and nothing is left


def test_memory_that_was_not_written_is_dirty() -> None:
    x = torch.ones(4)
    seen = []

    def body() -> torch.Tensor:
        seen.append(x * 2)
        half = torch.empty(8)
        half[:4].copy_(seen[0])  # the other half is never written
        return half + 0

    graph = RecordedGraph.of(body)
    assert graph.outputs.isnan().all(), "a recording computes nothing"
    graph.replay()
    assert graph.outputs[:4].tolist() == [2] * 4
    assert graph.outputs[4:].isnan().all()
    assert seen[0].isnan().all(), "what is no output is gone after a replay"
