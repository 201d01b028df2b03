"""SGLang's offline engine, started twice in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.ask import GREEDY, prompts_of
from harness.server import CHUNK, Server
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.commands import status

PROGRAM = """
import json, sglang

if __name__ == "__main__":
    found = []
    for _ in range(2):
        engine = sglang.Engine(**{arguments})
        replies = engine.generate(input_ids={prompts}, sampling_params={sampling})
        states = engine.get_server_info()["internal_states"]
        found.append([[reply["output_ids"] for reply in replies], states[0]["{entry}"]])
        engine.shutdown()
    with open("found.json", "w") as file:
        json.dump(found, file)
"""


@pytest.mark.release
def test_two_engines(tiny_checkpoint: Path, tmp_path: Path, off_server: Server) -> None:
    """Each loads the plugin, is on the fast path, and gives the stock server's answers."""
    prompts = prompts_of(70, 9, CHUNK + 30)
    arguments = {
        "model_path": str(tiny_checkpoint),
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 4096,
        "chunked_prefill_size": CHUNK,
    }
    code = PROGRAM.format(arguments=arguments, prompts=prompts, sampling=GREEDY, entry=status.ENTRY)
    script = tmp_path / "engines.py"
    script.write_text(code)
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True)
    stock = off_server.generate(input_ids=prompts, sampling_params=GREEDY)
    wanted = [reply["output_ids"] for reply in stock]
    for answers, entry in json.loads((tmp_path / "found.json").read_text()):
        assert not counters.CUT.isdisjoint(entry["forwards"]), entry
        assert answers == wanted
