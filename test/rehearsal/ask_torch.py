"""Asks torch on the rehearsal's device, and prints JSON. Run in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rehearsal import device

RUNTIME = device.load_runtime()

import torch  # noqa: E402


def count_in(call: Callable[[], object]) -> dict[str, int]:
    before = device.read_counters(RUNTIME)
    call()
    after = device.read_counters(RUNTIME)
    return {name: after[name] - before[name] for name in after}


def find_error(call: Callable[[], object]) -> str | None:
    try:
        call()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return None


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def ask_about_capture(x: torch.Tensor) -> dict[str, Any]:
    graph = capture(lambda: x + 1)
    side = torch.cuda.Stream()

    def leave_a_stream() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1

    return {
        "replay": count_in(graph.replay),
        "item while capturing": find_error(lambda: capture(x.sum().item)),
        "synchronize while capturing": find_error(lambda: capture(torch.cuda.synchronize)),
        "unjoined stream": find_error(lambda: capture(leave_a_stream)),
        "capture after these": find_error(lambda: capture(lambda: x + 1)),
    }


def ask() -> dict[str, Any]:
    x = torch.zeros(4, 4, device="cuda")
    pinned = torch.arange(4).pin_memory()
    pageable = torch.arange(4)
    answers = {
        "name": torch.cuda.get_device_name(0),
        "one operation": count_in(lambda: x + 1),
        "copy of pinned": count_in(lambda: pinned.to("cuda", non_blocking=True)),
        "copy of pageable": count_in(lambda: pageable.to("cuda", non_blocking=True)),
        "values": pinned.to("cuda").cpu().tolist(),
        "other device": find_error(lambda: x + torch.ones(4)),
        "out of memory": find_error(lambda: torch.empty(1 << 40, device="cuda")),
        "captures": ask_about_capture(x),
    }
    torch.cuda.set_sync_debug_mode("error")
    answers["item in error mode"] = find_error(x.sum().item)
    return answers


if __name__ == "__main__":
    print(json.dumps(ask()))
