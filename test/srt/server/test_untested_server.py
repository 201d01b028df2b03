"""A server of an SGLang after the last tested release, simulated by a copy of the package.

Single forwards: ``forward/test_untested_release``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.ask import generate, tokens
from harness.layer_rows import assert_all_stock
from harness.server import CAPTURED_ARGUMENTS, CAPTURED_GRAPHS, changed_package, running
from sglang_gemma4_yoco import compat, settings
from sglang_gemma4_yoco.admission import arguments
from sglang_gemma4_yoco.commands.main import main

LAST = f'"{compat.release.FIRST_WITH_EXITS}", "'
UNTESTED = settings.name_of("untested")


def test_a_server_of_an_untested_release(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default it is stock: one line says why, as do /server_info and ``status``."""
    changes = {f"{LAST}{compat.release.LAST_TESTED}": f"{LAST}0.5.0"}
    path = changed_package(tmp_path / "path", "compat/release.py", changes)
    env = {**CAPTURED_GRAPHS, "PYTHONPATH": path, UNTESTED: None}
    how = {"arguments": CAPTURED_ARGUMENTS, "env": env}
    with running(tiny_checkpoint, tmp_path, switch=None, **how) as server:
        mark = server.mark()
        generate(server, tokens(90, seed=1))
        prefills = server.prefills(since=mark)
        [state], status = server.reports(), main(["status", server.url])
        said = capsys.readouterr().out
        lines = server.log_lines(f"SGLang {compat.release.INSTALLED} ")
    assert_all_stock(prefills)
    assert (status, state["active"]) == (1, False)
    assert f"{UNTESTED}=1 turns fast prefill on if its self-check passes" in state["reason"]
    assert arguments.UNTESTED_RELEASE in state["forwards"]
    assert said.endswith(f"NOT active: {state['reason']}\n")
    [line] = lines
    assert line.endswith(f"falls back to stock for this server: {state['reason']}")
