"""Captures that fail halfway, memory that runs out, captures again: what is left afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rehearsal import operations
from rehearsal.batches_served import BATCHES, CAPTURED, EAGER, prompt, serve
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.checking import tail_graphs
from sglang_gemma4_yoco.core.state import ModelState, find_state
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.replaced import replaced

_ALLOCATES_ROWS = (torch.ops.aten.index_select.default, torch.ops.aten.index_select.out)


def _fail_in_python(_: torch.Tensor) -> None:
    raise ValueError("on purpose")


#: What happens in the middle of a capture.
IN_A_CAPTURE: dict[str, Callable[[torch.Tensor], Any]] = {
    "an exception": _fail_in_python,
    "a value is read": lambda rows: rows.sum().item(),
    "the device is synchronised": lambda _: torch.cuda.synchronize(),
}


def _give_back() -> None:
    """All memory that is not used."""
    gc.collect()
    torch.cuda.empty_cache()


def _count_pools() -> int:
    """PyTorch's pools that hold memory: its own, and each one's of graphs."""
    _give_back()
    return len({tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()})


def _memory() -> dict[str, float]:
    """In MiB."""
    _give_back()
    return {
        "allocated": torch.cuda.memory_allocated() / 2**20,
        "reserved": torch.cuda.memory_reserved() / 2**20,
        "device": operations.RUNTIME.rehearsal_used_bytes() / 2**20,
    }


def _capture(engine: Engine, state: ModelState) -> None:
    lifecycle.capture_tail(engine.runner, state, tail_graphs.check_graphs, can_be_captured=True)


def _serve(engine: Engine, way: str = CAPTURED) -> dict[str, Any]:
    cost = serve(engine, engine.schedule(BATCHES["40 tokens"]), way)
    return {"outcome": cost.outcome, "failure": cost.failure}


@contextmanager
def _capture_failing(happens: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """In the second bucket of a capture, after the layers of its tail."""
    stock, captures = gemma4.run_tail, iter(range(1000))

    def failing(*args: Any) -> torch.Tensor:
        rows = stock(*args)
        if torch.cuda.is_current_stream_capturing() and next(captures) == 1:
            happens(rows)
        return rows

    with replaced(gemma4, run_tail=failing):
        yield


def _after_a_failed_capture(engine: Engine, state: ModelState, what: str) -> dict[str, Any]:
    with _capture_failing(IN_A_CAPTURE[what]):
        _capture(engine, state)
    found: dict[str, Any] = {
        "tail": state.report["tail"],
        "still captures": torch.cuda.is_current_stream_capturing(),
        "random numbers": list(torch.rand(1, device="cuda").shape),
        "eager": _serve(engine, EAGER),
    }
    torch.cuda.synchronize()
    found["pools"] = _count_pools()
    _capture(engine, state)
    found["captured again"] = _serve(engine)
    return found


class _OutOfMemory(TorchDispatchMode):
    """Memory runs out at the n-th gather of rows in the block."""

    def __init__(self, at: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = at

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ALLOCATES_ROWS:
            self.left -= 1
            if self.left == 0:
                torch.empty(200 << 30, dtype=torch.uint8, device="cuda")
        return func(*args, **(kwargs or {}))


def _out_of_memory(engine: Engine, state: ModelState) -> dict[str, Any]:
    """By the number of the gather; the last one has none left to fail at."""
    found: dict[str, Any] = {}
    for at in range(1, 20):
        batch = engine.schedule([prompt(0, 1100)])
        with _OutOfMemory(at) as memory:
            cost = serve(engine, batch, EAGER)
        if memory.left > 0:
            break
        found[str(at)] = {"outcome": cost.outcome, "failure": cost.failure}
    found["refused"] = state.unsupported
    found["afterwards"] = _serve(engine)
    return found


def find_all(engine: Engine) -> dict[str, Any]:
    """Each failure in turn, at the size of ``engine``'s model."""
    state = find_state(engine.text_model)
    assert state is not None
    found: dict[str, Any] = {"as started": _serve(engine)}
    with_tail = _memory()
    lifecycle.drop_tail(state, lifecycle.NOT_YET)
    without = _memory()
    found["tail takes"] = {name: with_tail[name] - without[name] for name in without}
    _capture(engine, state)
    once = _memory()
    for _ in range(3):
        _capture(engine, state)
    four_times = _memory()
    found["three more captures take"] = {name: four_times[name] - once[name] for name in once}
    found["captured four times"] = _serve(engine)
    found["pools"] = _count_pools()
    found["failed captures"] = {
        what: _after_a_failed_capture(engine, state, what) for what in IN_A_CAPTURE
    }
    found["out of memory"] = _out_of_memory(engine, state)
    engine.runner.init_decode_cuda_graph()  # SGLang captures its decode steps anew
    found["after a recapture"] = _serve(engine)
    return found
