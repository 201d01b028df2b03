"""Several graphs of one memory pool, as the reference has them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip(
    "sglang.srt.model_executor.runner_backend.base_cuda_graph_backend",
    reason="this SGLang asks no platform for its graphs",
)

from sglang_gemma4_reference.graph_backend import Pool
from sglang_gemma4_reference.recorder import RecordedGraph


def test_a_replay_overwrites_the_outputs_of_later_graphs() -> None:
    """Not those of earlier ones, nor of another pool."""
    x, pool, other = torch.ones(2), Pool(), Pool()
    first, second, apart = (RecordedGraph.of(partial(torch.mul, x, n)) for n in (2, 3, 4))
    pool.graphs += [first, second]
    other.graphs += [apart]
    other.replay(apart)
    pool.replay(second)
    assert second.outputs.tolist() == [3, 3]
    pool.replay(first)
    assert second.outputs.isnan().all()
    pool.replay(second)
    assert (first.outputs.tolist(), apart.outputs.tolist()) == ([2, 2], [4, 4])
