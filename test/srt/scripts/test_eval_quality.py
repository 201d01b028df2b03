"""``bench/eval_quality.py`` with two servers of a random checkpoint: plumbing, no accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench import eval_quality
from sglang_gemma4_yoco import counters


@pytest.mark.release
@pytest.mark.parametrize("chat", [[], ["--chat"]], ids=["completions", "chat"])
def test_gsm8k(
    tiny_checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    chat: list[str],
) -> None:
    questions = tmp_path / "questions.jsonl"
    with questions.open("w") as file:
        for n in range(8):
            question = f"Tom has {n} apples and buys {n + 1} more. How many?"
            print(json.dumps({"question": question, "answer": f"#### {2 * n + 1}"}), file=file)
    monkeypatch.setenv("SGLANG_PLATFORM", "gemma4_cpu")
    arguments = ["--model", str(tiny_checkpoint), "--questions", str(questions), "--limit", "4"]
    flags = ["--", "--device", "cpu", "--dtype", "float32"]
    status = eval_quality.main([*arguments, "--max-tokens", "6", *chat, *flags])
    output = capsys.readouterr()
    assert status == 0, output.err
    document = json.loads(output.out.splitlines()[-1])
    assert document["prefills"][counters.TAIL_EAGER]
    found = document["gsm8k"]
    assert found["questions"] == 4
    assert found["identical"] == 1.0
    assert found["accuracy_off"] == found["accuracy_on"]
    assert found["accuracy_off"].keys() == {"strict-match", "flexible-extract"}
