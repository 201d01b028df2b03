"""``bench/eval_quality.py`` with two servers of a random checkpoint: plumbing, no accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.server import Pair
from scripts.bench import eval_quality


def evaluate(
    servers: Pair, capsys: pytest.CaptureFixture[str], name: str, questions: int, *more: str
) -> dict[str, Any]:
    """Return the result of one set of questions, which both servers answer alike."""
    on, off = servers
    mark = on.mark()
    arguments = ["--on", on.url, "--off", off.url, "--max-tokens", "6", "--sets", name, *more]
    status = eval_quality.main(arguments)
    output = capsys.readouterr()
    assert status == 0, output.err
    # The fast server did take the fast path.
    assert any(prefill.rows[-1] < prefill.rows[0] for prefill in on.prefills(since=mark))
    found: dict[str, Any] = json.loads(output.out.splitlines()[-1])[name]
    assert found["questions"] == questions
    assert found["identical"] == 1.0
    assert found["accuracy_off"] == found["accuracy_on"]
    return found


@pytest.mark.release
@pytest.mark.parametrize("chat", [[], ["--chat"]], ids=["completions", "chat"])
def test_gsm8k(
    servers: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path, chat: list[str]
) -> None:
    questions = tmp_path / "questions.jsonl"
    with questions.open("w") as file:
        for n in range(8):
            question = f"Tom has {n} apples and buys {n + 1} more. How many?"
            print(json.dumps({"question": question, "answer": f"#### {2 * n + 1}"}), file=file)
    more = ["--questions", str(questions), "--limit", "4", *chat]
    found = evaluate(servers, capsys, "gsm8k", 4, *more)
    assert found["accuracy_off"].keys() == {"strict-match", "flexible-extract"}


@pytest.mark.release
def test_colours(servers: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(servers, capsys, "colours", 30)
