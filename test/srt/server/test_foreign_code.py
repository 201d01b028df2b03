"""Servers with third-party code that sees their rows: they run as stock, and ``status`` says why.

``forward/test_classes`` has the kinds of third-party code.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.ask import assert_same_answers, compare, one_by_one, prompts_of
from harness.doctor import doctor
from harness.layer_rows import assert_all_stock
from harness.other_plugins import AROUND, plugin
from harness.server import Server, pair, python_path, running
from sglang_gemma4_yoco import settings
from sglang_gemma4_yoco.commands.main import main

Captured = pytest.CaptureFixture[str]

# A third-party model, found by SGLANG_EXTERNAL_MODEL_PACKAGE under SGLang's name: it
# writes a score of every row to a file, and answers prompts that are longer than the check's from
# the mean of their last rows.
MY_MODELS = """
import json
import os
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.models import gemma4_mm

class RowReader(LogitsProcessor):
    def forward(self, input_ids, hidden_states, lm_head, batch, *others, **more):
        if batch.forward_mode.is_extend() and batch.rids is not None:
            with open(os.environ["MY_SCORES"], "a") as scores:
                print(json.dumps(hidden_states.sum(dim=-1).tolist()), file=scores)
        if batch.forward_mode.is_extend() and len(hidden_states) > 32:
            hidden_states = hidden_states.clone()
            hidden_states[-1] = hidden_states[-16:].mean(dim=0)
        return super().forward(input_ids, hidden_states, lm_head, batch, *others, **more)

class Gemma4ForConditionalGeneration(gemma4_mm.Gemma4ForConditionalGeneration):
    def __init__(self, config, *others, **more):
        super().__init__(config, *others, **more)
        self.logits_processor = RowReader(config.text_config)

EntryClass = Gemma4ForConditionalGeneration
"""
MODEL_REASON = (
    "the model is a my_models.gemma4.Gemma4ForConditionalGeneration, which may read rows that are "
    "not computed: see docs/help.md; SGLANG_GEMMA4_YOCO_TRUST=my_models.gemma4 accepts it"
)

LENGTHS = (70, 40, 3)


ask = one_by_one(*prompts_of(*LENGTHS))


def reason_of(server: Server, capsys: Captured) -> str:
    """Return the reason of ``status`` why the path is not active."""
    main(["status", server.url])
    out = capsys.readouterr().out.splitlines()
    return out[-1].removeprefix("The fast path is NOT active: ")


@pytest.mark.release
def test_a_model_that_reads_every_row(
    tiny_checkpoint: Path, tmp_path: Path, capsys: Captured
) -> None:
    """The model comes from a package given to SGLang; ``doctor`` gives the server's verdict."""
    package = tmp_path / "path" / "my_models"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "gemma4.py").write_text(MY_MODELS)
    env = {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": package.name,
        "PYTHONPATH": python_path(package.parent),
        "MY_SCORES": "scores.jsonl",  # in the directory of each server
    }
    with pair(tiny_checkpoint, tmp_path, env=env) as both:
        asked = compare(both, ask)
        shown = reason_of(both[0], capsys)
    assert_same_answers(asked)
    assert shown == MODEL_REASON
    scores = []
    for server in both:
        lines = server.log_file.with_name("scores.jsonl").read_text().splitlines()
        scores.append(lines[-len(LENGTHS) :])  # the warm-up comes first
    for length, on, off in zip(LENGTHS, *scores, strict=True):
        assert json.loads(on) == pytest.approx(json.loads(off), abs=1e-4)
        assert len(json.loads(on)) == length
    assert_all_stock(asked.prefills)
    [answer], _ = doctor(
        tmp_path, ("--json", "--model-path", str(tiny_checkpoint), "--", "--device", "cpu"), **env
    )
    assert (answer.status, answer.document["refusals"]) == (1, [MODEL_REASON])


@pytest.mark.release
def test_a_trusted_plugin_on_the_same_method(
    tiny_checkpoint: Path, tmp_path: Path, off_server: Server, capsys: Captured
) -> None:
    """It sees the forwards, which are cut."""
    env = {
        "PYTHONPATH": python_path(plugin(tmp_path / "plugin", "a_hook", AROUND)),
        settings.name_of("trust"): "a_hook",
    }
    with running(tiny_checkpoint, tmp_path / "server", switch=None, env=env) as server:
        both = compare((server, off_server), ask)
        assert reason_of(server, capsys).startswith("The fast path is active: ")
        assert server.log_lines("their hook saw a forward")
    assert [rows[-1] for rows in both.rows] == [1, 1, 1]
    assert_same_answers(both)
