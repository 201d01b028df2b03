"""A broken copy of the package, which a server finds before it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.ask import generate, tokens
from harness.layer_rows import assert_all_stock
from harness.server import changed_package, running
from sglang_gemma4_yoco.checking import self_check as check
from sglang_gemma4_yoco.commands.main import main

pytestmark = pytest.mark.release

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
# Replacements in ``core/backend_pair.py``: the tail's window becomes one key short, which most
# tolerances would hide.
BUILT = "compat.attention.build_backend(runner, model.layers)"
CHANGES = {
    "import annotations\n": f"import annotations\nfrom copy import copy\n{NARROW}",
    BUILT: f"_narrow({BUILT})",
}


def test_it_is_found_out(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = {"PYTHONPATH": changed_package(tmp_path / "path", "core/backend_pair.py", CHANGES)}
    with running(tiny_checkpoint, tmp_path, switch=None, env=path) as server:
        prompt, mark = tokens(90, seed=1), server.mark()
        generate(server, prompt)
        assert_all_stock(server.prefills(since=mark))
        [state] = server.reports()
        assert (state["active"], state["reason"]) == (False, check.CHECK_FAILED.text)
        assert state["check"]["largest_difference"] > 10 * state["check"]["allowed"]
        assert main(["status", server.url]) == 1
        [line] = server.log_lines("is off for this server")
        assert "its self-check at start failed; error " in line
        assert server.log_lines("fast prefill is active") == []
        assert server.log_lines(" is on: ") == []
