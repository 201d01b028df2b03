"""``bench/eval_quality.py`` with two servers of a random checkpoint: plumbing, no accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.server import Pair
from scripts.bench import eval_quality


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
    on, off = servers
    mark = on.mark()
    arguments = ["--on", on.url, "--off", off.url, "--max-tokens", "6", "--limit", "4", *chat]
    status = eval_quality.main([*arguments, "--questions", str(questions)])
    output = capsys.readouterr()
    assert status == 0, output.err
    # The fast server did take the fast path.
    assert any(prefill.rows[-1] < prefill.rows[0] for prefill in on.prefills(since=mark))
    found = json.loads(output.out.splitlines()[-1])["gsm8k"]
    assert found["questions"] == 4
    assert found["identical"] == 1.0
    assert found["accuracy_off"] == found["accuracy_on"]
    assert found["accuracy_off"].keys() == {"strict-match", "flexible-extract"}
