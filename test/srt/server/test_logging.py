"""The plugin's lines are where SGLang's are, however an operator has configured SGLang's logging.

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

_SECONDS = 300  # for a process that imports SGLang, on a busy machine too

SERVE = """
import os
from types import SimpleNamespace
from unittest import mock
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.managers import scheduler
scheduler.configure_logger(SimpleNamespace(log_level="info"), prefix=" TP0")
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
    "Gemma 4 fast prefill .* is on: ",
    "Gemma 4 fast prefill is active: ",
    "Gemma 4 fast prefill falls back to stock: ",
    "Gemma 4 fast prefill failed, the stock forward serves the batch: MemoryError",
    "MemoryError: no room",  # the end of its traceback
)


def served(checkpoint: Path, directory: Path, logging: dict[str, Any] | None) -> dict[str, str]:
    """What is in each file after a process with this configuration: its output, and the log's."""
    env = {**os.environ, "MODEL": str(checkpoint)}
    if logging is not None:
        config = directory / "logging.json"
        config.write_text(json.dumps({"version": 1, **logging}))
        env["SGLANG_LOGGING_CONFIG_PATH"] = str(config)
    output = directory / "output.log"
    process = forked.Program(["-c", SERVE], cwd=directory, env=env, log=output)
    assert process.wait(_SECONDS) == 0, output.read_text()[-2000:]
    return {path.stem: path.read_text() for path in directory.glob("*.log")}


HANDLERS: dict[str, Any] = {}
for _name in ("sglang", "root"):
    HANDLERS[_name] = {"class": "logging.FileHandler", "filename": f"{_name}.log"}
TO_SGLANG = {"level": "INFO", "handlers": ["sglang"]}
TO_ROOT = {"level": "INFO", "handlers": ["root"]}
ON_SGLANG = {"handlers": HANDLERS, "loggers": {"sglang": {**TO_SGLANG, "propagate": False}}}
ON_BOTH = {"handlers": HANDLERS, "loggers": {"sglang.srt": TO_SGLANG}, "root": TO_ROOT}


@pytest.mark.parametrize(
    ("logging", "files"),
    [
        pytest.param(None, {"output"}, id="SGLang's default"),
        pytest.param(ON_SGLANG, {"sglang"}, id="a handler on sglang"),
        pytest.param(ON_BOTH, {"sglang", "root"}, id="handlers on sglang.srt and root"),
    ],
)
def test_each_line_is_once_where_sglangs_are(
    tiny_checkpoint: Path, tmp_path: Path, logging: dict[str, Any] | None, files: set[str]
) -> None:
    for name, text in served(tiny_checkpoint, tmp_path, logging).items():
        found = [len(re.findall(f"{line}.*\n", text)) for line in LINES]
        assert found == [int(name in files)] * len(LINES), (name, text[-2000:])
        if logging is None:  # they have SGLang's format
            assert len(re.findall(r"^\[.* TP0\] (a line|Gemma 4)", text, re.MULTILINE)) >= 5
