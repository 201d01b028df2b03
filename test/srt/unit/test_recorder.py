"""The recorder in place of CUDA graphs: what it replays, and each defect that it must show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from sglang_gemma4_reference import recorder
from sglang_gemma4_reference.recorder import (
    CaptureError,
    RecordedGraph,
    as_one_node,
)

HIDDEN, HEADS, DIM, SLOTS, KEYS, ROWS = 16, 2, 8, 64, 5, 4


class Layer(nn.Module):
    """Attention to a pool, an in-place residual, a scratch buffer, a number of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.calls = 0

    def forward(
        self, rows: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor, scale: float = 2.0
    ) -> torch.Tensor:
        self.calls += 1
        rows = rows.clone()
        kv = pool.index_select(0, slots.flatten()).view(len(rows), KEYS, HEADS, DIM).transpose(1, 2)
        q = self.q(rows).view(-1, 1, HEADS, DIM).transpose(1, 2)
        rows.add_(
            self.o(functional.scaled_dot_product_attention(q, kv, kv).reshape(len(rows), HIDDEN))
        )
        scratch = torch.empty_like(rows)
        torch.mul(rows, 1.0 / scale, out=scratch)
        return functional.gelu(scratch) + scratch[:, :1]


class Static:
    """A layer, and the buffers that its graph reads."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = Layer()
        self.rows, self.slots = live(1)
        self.pool = torch.randn(SLOTS, HIDDEN)

    def graph(self, **numbers: float) -> RecordedGraph:
        return RecordedGraph.of(lambda: self.layer(self.rows, self.slots, self.pool, **numbers))

    def eager(self, seed: int, **numbers: float) -> torch.Tensor:
        out: torch.Tensor = self.layer(*live(seed), self.pool, **numbers)
        return out

    def load(self, seed: int) -> None:
        rows, slots = live(seed)
        self.rows.copy_(rows)
        self.slots.copy_(slots)


def live(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, HIDDEN, generator=draw)
    return rows, torch.randint(SLOTS, (ROWS, KEYS), generator=draw)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def static() -> Static:
    return Static()


def test_a_replay_equals_an_eager_call(static: Static) -> None:
    graph = static.graph()
    graph.replay()
    assert static.layer.calls == 1, "a replay runs no Python"
    for seed in (2, 3, 4):
        static.pool.normal_()  # the cache moves on, where it is
        static.load(seed)
        graph.replay()
        assert torch.equal(graph.outputs, static.eager(seed))
        graph.replay()  # it has left its inputs alone
        assert torch.equal(graph.outputs, static.eager(seed))


# ---------------------------------------------------------------- each defect shows


def test_a_tensor_of_the_batch_is_undeclared(static: Static) -> None:
    slots = live(1)[1]
    graph = RecordedGraph.of(lambda: static.layer(static.rows, slots, static.pool))
    declared = [static.rows, static.pool, *static.layer.parameters()]
    ((found, call),) = graph.undeclared(declared)
    assert found.data_ptr() == slots.data_ptr()
    assert "index_select" in call
    assert graph.undeclared(declared, {"slots": slots}) == []


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "mask": lambda x: x[x > 0],
    "assignment by a mask": lambda x: x.__setitem__(x > 0, 0),
    "resize": lambda x: x.resize_(2, 2),
    "other memory": lambda x: x.set_(torch.ones(3).untyped_storage()),
    "numbers of the host": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
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
    seen: list[torch.Tensor] = []

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


def test_a_kernel_on_the_host_is_one_node_that_reads_anew() -> None:
    lens, pool, out = torch.tensor([2, 3]), torch.arange(8.0), torch.zeros(2)

    def kernel(lens: torch.Tensor, pool: torch.Tensor, out: torch.Tensor, *, bias: float) -> None:
        for row, length in enumerate(lens.tolist()):
            out[row] = pool[:length].sum() + bias

    def body() -> torch.Tensor:
        as_one_node(kernel, lens, pool, out, bias=1.0)
        return out * 2

    graph = RecordedGraph.of(body)
    assert len(graph) == 2
    lens.copy_(torch.tensor([4, 1]))
    graph.replay()
    assert graph.outputs.tolist() == [14, 2]
    assert graph.undeclared(lens, out) == [(graph.undeclared(lens, out)[0][0], "kernel")]
    as_one_node(kernel, lens, pool, out, bias=0.0)  # without a recording: a call
    assert out.tolist() == [6, 0]


def test_a_replay_overwrites_the_outputs_of_later_graphs() -> None:
    """Of one memory pool: not those of earlier ones, nor of another pool."""
    backend = pytest.importorskip(
        "sglang_gemma4_reference.graph_backend", reason="of SGLang 0.5.21"
    )
    x, pool, other = torch.ones(2), backend.Pool(), backend.Pool()
    first, second, apart = (RecordedGraph.of(partial(torch.mul, x, n)) for n in (2, 3, 4))
    pool.add(first)
    pool.add(second)
    other.add(apart)
    other.replay(apart)
    pool.replay(second)
    assert second.outputs.tolist() == [3, 3]
    pool.replay(first)
    assert second.outputs.isnan().all()
    pool.replay(second)
    assert (first.outputs.tolist(), apart.outputs.tolist()) == ([2, 2], [4, 4])
