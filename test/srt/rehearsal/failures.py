"""Captures that fail halfway, memory that runs out, captures again: what is left afterwards."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from rehearsal import operations, serving
from rehearsal.device import Answer
from rehearsal.serving import CAPTURED, EAGER
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.checking import tail_graphs
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.replaced import replaced

#: What happens in the middle of a capture.
IN_A_CAPTURE: dict[str, Callable[[torch.Tensor], Any]] = {
    "an exception": lambda _: 1 / 0,
    "a value is read": lambda rows: rows.sum().item(),
    "the device is synchronised": lambda _: torch.cuda.synchronize(),
}


def _measure_memory() -> Answer:
    """In MiB; and how many of PyTorch's pools hold some: its own, and each one's of graphs."""
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


def _serve(engine: Engine, way: str = CAPTURED) -> list[Any]:
    cost = serving.serve_by_name(engine, "40 tokens", way)
    return [cost["outcome"], cost["failure"]]


def _fail_in_a_capture(engine: Engine, state: ModelState, what: str) -> Answer:
    """In the second bucket, after the layers of its tail."""
    stock, captures = gemma4.run_tail, iter(range(1000))

    def failing(*args: Any) -> torch.Tensor:
        rows = stock(*args)
        if torch.cuda.is_current_stream_capturing() and next(captures) == 1:
            IN_A_CAPTURE[what](rows)
        return rows

    with replaced(gemma4, run_tail=failing):
        _capture(engine, state)
    found: Answer = {
        "tail": state.report["tail"],
        "still captures": torch.cuda.is_current_stream_capturing(),
        "random numbers": list(torch.rand(1, device="cuda").shape),
        "eager": _serve(engine, EAGER),
        "memory": _measure_memory(),
    }
    _capture(engine, state)
    found["captured again"] = _serve(engine)
    return found


def _run_out_of_memory(engine: Engine) -> list[Any]:
    """At each gather of rows in turn; when it is the last one's turn, none is left to fail."""
    found: list[Any] = []
    for at in range(1, 20):
        batch = serving.schedule(engine, "1100 tokens")
        gathers = Counter[str]()

        def run_out(name: str, *_: Any, at: int = at, gathers: Counter[str] = gathers) -> None:
            gathers[name] += 1
            if name == "index_select" and gathers[name] == at:
                torch.empty(200 << 30, dtype=torch.uint8, device="cuda")

        with replaced(operations.current, accesses=run_out):
            cost, _ = serving.serve(engine, batch, EAGER)
        if gathers["index_select"] < at:
            break
        found.append([cost["outcome"], cost["failure"]])
    return found


def fail_in_each_way(engine: Engine) -> Answer:
    """Each failure in turn, at the size of ``engine``'s model."""
    state = serving.state_of(engine)
    found: Answer = {"as started": _serve(engine)}
    lifecycle.drop_tail(state, lifecycle.NOT_YET)
    found["without the tail"] = _measure_memory()
    found["captured"] = [_capture(engine, state) for _ in range(4)]
    found["captured four times"] = _serve(engine)
    for what in IN_A_CAPTURE:
        found[what] = _fail_in_a_capture(engine, state, what)
    found["out of memory"] = _run_out_of_memory(engine)
    found["refused"] = state.unsupported
    found["after it"] = _serve(engine)
    engine.runner.init_decode_cuda_graph()  # SGLang captures its decode steps anew
    found["after a recapture"] = _serve(engine)
    return found
