"""Rehearses what one question needs, and writes the answer as JSON.

    cd test; python -m rehearsal.ask model /tmp/model.json

``questions.json`` has the questions. Nothing here judges an answer; the tests do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rehearsal import device

device.load_runtime()
os.environ["SGLANG_PLUGINS"] = "gemma4_yoco"
sys.path.append(str(device.HERE.parent / "srt"))  # the tests' harness

from rehearsal import (  # noqa: E402 - after the runtime and the environment
    breakages,
    engine,
    failures,
    operations,
    scheduler,
    serving,
    torch_calls,
    values,
)

OF_AN_ENGINE = {
    "breakages": breakages.break_each,
    "failures": failures.fail_in_each_way,
    "torch": torch_calls.make_each,
    "values": values.compare_each,
}


def answer(question: str, folder: Path) -> dict[str, Any]:
    """Batches in each of the question's ways, and its parts."""
    asked = engine.QUESTIONS[question]
    os.environ.update(asked.get("environment", {}))
    with operations.computed(floats=asked.get("weights", False)):
        if asked.get("loop"):
            return scheduler.find_races(folder, question)
        served = engine.build(folder, question)
        state = serving.state_of(served)
        found: dict[str, Any] = {"refused": state.refused, "facts": dict(state.facts)}
        batches = asked.get("batches", serving.BATCHES)
        found["costs"] = serving.serve_all(served, asked.get("ways", []), batches)
        for part in asked.get("parts", []):
            found[part] = OF_AN_ENGINE[part](served)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=sorted(engine.QUESTIONS))
    parser.add_argument("answer", type=Path, help="the file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = answer(args.question, Path(folder))
    args.answer.write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
