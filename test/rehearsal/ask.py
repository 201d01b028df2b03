"""Rehearses what one question needs, and writes the answer as JSON.

    cd test; python -m rehearsal.ask model /tmp/model.json

Nothing here judges an answer; the tests do.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rehearsal import device

device.load_runtime()
os.environ["SGLANG_PLUGINS"] = "gemma4_yoco"

from rehearsal import (  # noqa: E402 - after the runtime and the environment
    batches_served,
    breakages,
    engine,
    failures,
    operations,
    scheduler,
    values,
)
from rehearsal.batches_served import BATCHES, CAPTURED, EAGER, STOCK  # noqa: E402
from sglang_gemma4_yoco.core.state import get_attached_state  # noqa: E402

Answer = dict[str, Any]
#: Of SGLang's captured prefills.
EXITS: Answer = {
    "cuda_graph_backend_prefill": "breakable",
    "cuda_graph_bs_prefill": [64, 128],
    "max_running_requests": 8,
}
EXIT_BATCHES = ("40 tokens", "three", "beside decode steps", "chunk", "257 tokens")


def _state() -> Answer:
    state = get_attached_state()
    assert state is not None
    return {"refused": state.unsupported, "facts": state.report}


def ask_model(folder: Path, shape: Any = engine.E2B, **arguments: Any) -> Answer:
    """Every kind of batch, at full size."""
    with operations.computed(floats=False):
        served = engine.build(folder, shape, **arguments)
        answer = _state()
        answer["costs"] = batches_served.serve_all(served, (STOCK, CAPTURED, EAGER))
        answer["without waits"] = batches_served.serve_refusing_waits(served)
    return answer


def ask_exits(folder: Path) -> Answer:
    """Exits from captured prefills; and host code broken on purpose."""
    os.environ["SGLANG_GEMMA4_YOCO_SELF_CHECK"] = "0"  # it compares floats, which are arbitrary
    with operations.computed(floats=False):
        served = engine.build(folder, engine.E2B_SHORT, **EXITS)
        answer = _state()
        prompts = {name: BATCHES[name] for name in EXIT_BATCHES}
        answer["costs"] = batches_served.serve_all(served, (STOCK, CAPTURED), prompts)
        logging.disable(logging.CRITICAL)  # each breakage is logged, as it should be
        answer["breakages"] = breakages.find_all(served)
    return answer


def ask_races(folder: Path) -> Answer:
    """The scheduler's loop, with overlap."""
    with operations.computed(floats=False) as mode:
        return scheduler.find_races(folder, mode)


def ask_races_without_overlap(folder: Path) -> Answer:
    """The other loop."""
    with operations.computed(floats=False) as mode:
        return scheduler.find_races(folder, mode, disable_overlap_schedule=True)


def ask_e4b(folder: Path) -> Answer:
    """The other model, at full size."""
    return ask_model(folder, engine.E4B)


def ask_sm_100(folder: Path) -> Answer:
    """A B200's architecture."""
    os.environ["REHEARSAL_SM"] = "100"
    return ask_model(folder)


def ask_without_graphs(folder: Path) -> Answer:
    """A server that captures nothing."""
    return ask_model(folder, engine.E2B_SHORT, disable_cuda_graph=True)


def ask_failures(folder: Path) -> Answer:
    """Captures that fail, memory that runs out, recaptures."""
    with operations.computed(floats=False):
        served = engine.build(folder, engine.E2B)
        return _state() | failures.find_all(served)


def ask_values(folder: Path) -> Answer:
    """Small widths, with all values computed."""
    with operations.computed(floats=True):
        served = engine.build(folder, values.SHAPE, weights=True, **EXITS)
        return _state() | {"batches": values.compare(served)}


QUESTIONS: dict[str, Callable[[Path], Answer]] = {
    "model": ask_model,
    "exits": ask_exits,
    "races": ask_races,
    "races_without_overlap": ask_races_without_overlap,
    "e4b": ask_e4b,
    "sm_100": ask_sm_100,
    "without_graphs": ask_without_graphs,
    "failures": ask_failures,
    "values": ask_values,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=sorted(QUESTIONS))
    parser.add_argument("answer", type=Path, help="the file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        answer = QUESTIONS[args.question](Path(folder))
    args.answer.write_text(json.dumps(answer, indent=1, default=str))


if __name__ == "__main__":
    main()
