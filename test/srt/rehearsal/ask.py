"""Rehearsal of one question, whose answer is written as JSON.

    PYTHONPATH=test/srt python -m rehearsal.ask model /tmp/model.json

``questions.json`` has the questions. Nothing here judges an answer; the tests do.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from rehearsal import device
from rehearsal.device import Answer

device.load_runtime()
os.environ["SGLANG_PLUGINS"] = "gemma4_yoco"

from harness.forwards import state_of  # noqa: E402 - after the runtime and the environment
from rehearsal import breakages, engine, failures, operations, scheduler, serving  # noqa: E402
from sglang_gemma4_reference.engine import Engine  # noqa: E402

STARTS = {"a capture of prefills that fails": failures.failing_prefill_capture}
OF_AN_ENGINE = {
    "breakages": breakages.break_each,
    "device": failures.examine_device,
    "failures": failures.fail_in_each_way,
}


def answer(question: str, folder: Path) -> Answer:
    """Return the results of batches in each of the question's ways, and of its parts."""
    asked = engine.QUESTIONS[question]
    os.environ.update(asked.get("environment", {}))
    with operations.computed(floats=False):
        if asked.get("loop"):
            return scheduler.find_races(folder, question)
        arguments = engine.write_checkpoint(folder, question)
        with STARTS.get(asked.get("start", ""), nullcontext)():
            served = Engine(**arguments)
        state = state_of(served)
        found: Answer = {"refused": state.off_because, "facts": vars(state.report)}
        batches = asked.get("batches", serving.BATCHES)
        found["costs"] = serving.serve_all(served, asked.get("ways", []), batches)
        for part in asked.get("parts", []):
            found[part] = OF_AN_ENGINE[part](served)
    return found


if __name__ == "__main__":
    _, asked, file = sys.argv
    with tempfile.TemporaryDirectory() as folder:
        found = answer(asked, Path(folder))
    Path(file).write_text(json.dumps(found, indent=1, default=str))
