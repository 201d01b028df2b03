"""The plugin's log lines under each logging configuration of SGLang's.

Every case is a new process that does what each process of a server does first. Then SGLang's own
function configures its logging, and an engine starts and serves.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from harness import forked

SERVE = """
import os
from types import SimpleNamespace
from unittest import mock
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.managers import scheduler
scheduler.configure_logger(SimpleNamespace(log_level="info"))
scheduler.logger.info("a line of SGLang's")
from harness.forwards import ENGINE, TWO_PROMPTS
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_yoco.core.forward import EagerForward
engine = Engine(os.environ["MODEL"], **ENGINE)
for switch in "11001":
    with switched(switch):
        engine.forward(engine.schedule(TWO_PROMPTS))
with mock.patch.object(EagerForward, "fast", side_effect=MemoryError("no room")):
    engine.forward(engine.schedule(TWO_PROMPTS))
"""

LINES = (
    "a line of SGLang's",
    "YOCO fast prefill .* is on: ",
    "YOCO fast prefill is active: ",
    "YOCO fast prefill falls back to stock: ",
    "YOCO fast prefill failed, the stock forward serves the batch: MemoryError",
    "MemoryError: no room",  # the end of its traceback
)


FILES = {
    "sglang": {"class": "logging.FileHandler", "filename": "sglang.log"},
    "root": {"class": "logging.FileHandler", "filename": "root.log"},
}
TO_SGLANG = {"level": "INFO", "handlers": ["sglang"]}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "output": {},
    "sglang": {"loggers": {"sglang": {**TO_SGLANG, "propagate": False}}},
    "sglang root": {"loggers": {"sglang.srt": TO_SGLANG}, "root": {"handlers": ["root"]}},
}


@pytest.mark.parametrize("files", CONFIGURATIONS)
def test_each_line_appears_once_where_sglangs_do(
    tiny_checkpoint: Path, tmp_path: Path, files: str
) -> None:
    """In the output by default; else in the files of a logger's handler, and of the root's."""
    config, output = tmp_path / "logging.json", tmp_path / "output.log"
    env = {**os.environ, "MODEL": str(tiny_checkpoint)}
    if CONFIGURATIONS[files]:
        env["SGLANG_LOGGING_CONFIG_PATH"] = str(config)
        config.write_text(json.dumps({"version": 1, "handlers": FILES, **CONFIGURATIONS[files]}))
    process = forked.Program(["-c", SERVE], cwd=tmp_path, env=env, log=output)
    assert process.wait(300) == 0, output.read_text()
    for path in tmp_path.glob("*.log"):
        found = [len(re.findall(line, path.read_text())) for line in LINES]
        assert found == [path.stem in files.split()] * len(LINES), path.read_text()
