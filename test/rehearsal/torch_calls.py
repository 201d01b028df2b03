"""What PyTorch's own calls count on the rehearsal's device, and how they fail there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rehearsal import device
from rehearsal.operations import RUNTIME


def _count_in(call: Callable[[], object]) -> dict[str, int]:
    before = device.read_counters(RUNTIME)
    call()
    after = device.read_counters(RUNTIME)
    return {name: after[name] - before[name] for name in after}


def _find_error(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "none"


def _capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _leave_a_stream() -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.ones(1, device="cuda")


def make_each(_: object) -> dict[str, Any]:
    """By call what it counts, or the error with which it fails."""
    x = torch.zeros(4, 4, device="cuda")
    pinned = torch.arange(4).pin_memory()
    pageable = torch.arange(4)
    graph = _capture(lambda: x + 1)
    counted = {
        "an operation": lambda: x + 1,
        "a copy of pinned memory": lambda: pinned.to("cuda", non_blocking=True),
        "a copy of pageable memory": lambda: pageable.to("cuda", non_blocking=True),
        "a replay": graph.replay,
    }
    failing = {
        "tensors on two devices": lambda: x + torch.ones(4),
        "too much memory": lambda: torch.empty(1 << 40, device="cuda"),
        "a value is read in a capture": lambda: _capture(x.sum().item),
        "the device is synchronised in a capture": lambda: _capture(torch.cuda.synchronize),
        "a stream is left in a capture": lambda: _capture(_leave_a_stream),
        "a capture after these": lambda: _capture(lambda: x + 1),
    }
    found: dict[str, Any] = {name: _count_in(call) for name, call in counted.items()}
    for name, call in failing.items():
        found[name] = _find_error(call)
    return found
