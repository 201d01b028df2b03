"""Lasting state after a failed capture, a lack of memory, and further captures."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harness.forwards import state_of
from rehearsal import operations, serving
from rehearsal.device import Answer
from rehearsal.serving import CAPTURED, EAGER
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.checking import tail_graphs
from sglang_gemma4_yoco.compat import captured_prefills
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.patched import patched


def _measure_memory() -> Answer:
    """Return memory in MiB, and the number of PyTorch's pools that hold some, graphs' included."""
    gc.collect()
    torch.cuda.empty_cache()
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    return {
        "allocated": torch.cuda.memory_allocated() / 2**20,
        "reserved": torch.cuda.memory_reserved() / 2**20,
        "pools": len(pools),
    }


def _capture(engine: Engine, state: ModelState) -> Answer:
    lifecycle.capture_tail(engine.runner, state, tail_graphs.check_graphs)
    return _measure_memory()


def _serve(engine: Engine, way: str = CAPTURED, name: str = "40 tokens") -> list[Any]:
    cost = serving.serve(engine, name, way)
    return [cost["outcome"], cost["failure"]]


def _fail_in_a_capture(engine: Engine, state: ModelState) -> Answer:
    """Wait for the device in the second bucket, after the layers of its tail: the capture fails."""
    stock, captures = gemma4.run_tail, iter(range(1000))

    def failing(*args: Any) -> torch.Tensor:
        rows = stock(*args)
        if torch.cuda.is_current_stream_capturing() and next(captures) == 1:
            torch.cuda.synchronize()
        return rows

    with patched(gemma4, run_tail=failing):
        _capture(engine, state)
    found: Answer = {
        "tail": state.report.tail_mode,
        "eager": _serve(engine, EAGER),
        **examine_device(engine),
    }
    _capture(engine, state)
    found["captured again"] = _serve(engine)
    return found


@contextmanager
def failing_prefill_capture() -> Iterator[None]:
    """Wait for the device in the second bucket of captured prefills: the capture fails."""
    stock, captures = captured_prefills._note_exit_point, iter(range(1000))

    def failing(*tensors: torch.Tensor) -> None:
        stock(*tensors)
        if torch.cuda.is_current_stream_capturing() and next(captures) == 1:
            torch.cuda.synchronize()

    with patched(captured_prefills, _note_exit_point=failing):
        yield


def examine_device(engine: Engine) -> Answer:
    """Return what a failed capture could have left behind."""
    return {
        "prefills": type(engine.runner.prefill_cuda_graph_runner).__name__,
        "still captures": torch.cuda.is_current_stream_capturing(),
        "random numbers": list(torch.rand(1, device="cuda").shape),
        "memory": _measure_memory(),
    }


def _run_out_of_memory(engine: Engine) -> list[Any]:
    """Run out of memory at each of the five gathers of rows in turn; there is no sixth."""
    found: list[Any] = []
    for at in range(1, 7):
        gathers = Counter[str]()

        def run_out(name: str, *_: Any, at: int = at, gathers: Counter[str] = gathers) -> None:
            gathers[name] += 1
            if name == "index_select" and gathers[name] == at:
                torch.empty(200 << 30, dtype=torch.uint8, device="cuda")

        with patched(operations.current, accesses=run_out):
            found.append(_serve(engine, EAGER, "1100 tokens"))
    return found


def fail_in_each_way(engine: Engine) -> Answer:
    """Run each failure in turn, at the size of ``engine``'s model."""
    state = state_of(engine)
    found: Answer = {"as started": _serve(engine)}
    lifecycle.drop_tail(state, lifecycle.NOT_YET)
    found["without the tail"] = _measure_memory()
    found["captured"] = [_capture(engine, state) for _ in range(4)]
    found["captured four times"] = _serve(engine)
    found["a capture fails"] = _fail_in_a_capture(engine, state)
    found["out of memory"] = _run_out_of_memory(engine)
    found["refused"] = state.off_because
    found["after it"] = _serve(engine)
    return found
