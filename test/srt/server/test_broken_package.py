"""A server finds out by itself, before it serves, that its package is broken.

Each server imports a copy of the package that differs in one respect.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import sglang_gemma4_yoco
from harness.ask import generate, tokens
from harness.layer_rows import assert_all_stock
from harness.server import Server, python_path, running
from sglang_gemma4_yoco.checking import start as check
from sglang_gemma4_yoco.commands.main import main
from sglang_gemma4_yoco.loading import metrics

PACKAGE = Path(sglang_gemma4_yoco.__file__).parent
NARROW = """
def _narrow(tail):
    stock = tail.forward_decode
    def forward_decode(q, k, v, layer, *args, **kwargs):
        narrow = copy(layer)
        narrow.sliding_window_size -= layer.sliding_window_size > 0
        return stock(q, k, v, narrow, *args, **kwargs)
    tail.forward_decode = forward_decode
    return tail
"""
# What is wrong -> in this file, these become those.
BREAKS: dict[str, tuple[str, dict[str, str]]] = {
    "the tail's window is one key short": (
        "loading/start.py",
        {
            "import logging\n": "import logging\nfrom copy import copy\n",
            "tail = compat.build_attn_backend(runner)\n": (
                "tail = _narrow(compat.build_attn_backend(runner))\n"
            ),
            "def of(model": f"{NARROW}\n\ndef of(model",
        },
    ),
    "the tail gives no numbers": (
        "core/cut.py",
        {"plan.tail.index, rows)": "plan.tail.index, rows * float('nan'))"},
    ),
}


@contextmanager
def server_of(name: str, checkpoint: Path, directory: Path) -> Iterator[Server]:
    """A server with a package that is broken in this way."""
    file, changes = BREAKS[name]
    broken = directory / "path" / PACKAGE.name
    shutil.copytree(PACKAGE, broken, ignore=shutil.ignore_patterns("__pycache__"))
    source = (broken / file).read_text()
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (broken / file).write_text(source)
    with running(
        checkpoint, directory, switch=None, env={"PYTHONPATH": python_path(broken.parent)}
    ) as server:
        yield server


USUAL = "the tail's window is one key short"  # what most tolerances would hide


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.release] * (name != USUAL)) for name in BREAKS],
)
def test_it_is_found_out(name: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    with server_of(name, tiny_checkpoint, tmp_path) as server:
        prompt, mark = tokens(90, seed=1), server.mark()
        generate(server, prompt)
        assert_all_stock(server.prefills(since=mark))
        [state] = [s[metrics.ENTRY] for s in server.get("/server_info")["internal_states"]]
        assert (state["active"], state["reason"]) == (False, check.FAILED)
        largest = state["check"]["largest_difference"]
        assert largest == "infinite" or largest > 10 * state["check"]["allowed"]
        assert (largest == "infinite") is (name == "the tail gives no numbers")
        assert main(["status", server.url]) == 1
        [line] = server.log_lines("is off for this server")
        assert "its self-check at start failed; checked layer by layer: " in line
        assert server.log_lines("fast prefill is active") == []
        assert server.log_lines(" is on: ") == []
