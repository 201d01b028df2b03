"""The tests' own servers: failed starts are retried or reported, and the row trace is read.

The server here is a program of a few lines that is found where SGLang's would be.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from harness.server import (
    Server,
    ServerDiedError,
    python_path,
    stand_in_for_sglang,
    started,
)
from sglang_gemma4_reference.row_trace import Prefill, Trace, append_to

SERVER = """
    import http.server, os, pathlib, sys
    port = int(sys.argv[sys.argv.index("--port") + 1])
    starts = pathlib.Path("starts")
    starts.write_text(f"{starts.read_text() if starts.exists() else ''}{port} ")
    if len(starts.read_text().split()) <= int(os.environ["FAILING_STARTS"]):
        sys.exit("[Errno 98] error while attempting to bind: address already in use")
    if "--broken" in sys.argv:
        sys.exit("no such model")
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def start(directory: Path, failing_starts: int, *arguments: str) -> AbstractContextManager[Server]:
    """A server that is the program above; its first starts fail for a taken port."""
    path = python_path(stand_in_for_sglang(directory / "path", SERVER))
    env = {"PYTHONPATH": path, "FAILING_STARTS": str(failing_starts)}
    how: Any = {"switch": None, "arguments": arguments, "env": env, "spawned": True}
    return started(directory, directory / "server", **how)


def test_a_taken_port_is_another_start(tmp_path: Path) -> None:
    with start(tmp_path, 2) as server:
        server.wait_until_ready()
        ports = (tmp_path / "server" / "starts").read_text().split()
        assert len(ports) == 3
        assert server.url.endswith(f":{ports[-1]}")
        assert server.process.poll() is None
    assert server.process.poll() is not None


@pytest.mark.parametrize(
    ("failing_starts", "arguments", "starts", "error"),
    [(9, [], 3, "address already in use"), (0, ["--broken"], 1, "exited with 1:\nno such model")],
    ids=["the port is always taken", "another error"],
)
def test_a_server_that_ends_is_an_error_that_shows_its_log(
    tmp_path: Path, failing_starts: int, arguments: list[str], starts: int, error: str
) -> None:
    with (
        start(tmp_path, failing_starts, *arguments) as server,
        pytest.raises(ServerDiedError, match=error),
    ):
        server.wait_until_ready()
    assert len((tmp_path / "server" / "starts").read_text().split()) == starts


def test_trace_is_read_on_as_it_grows(tmp_path: Path) -> None:
    """Also while its last line is being written."""
    trace, append = Trace(tmp_path / "rows"), append_to(tmp_path / "rows")
    first, second = (Prefill("EXTEND", [n], [0], [n, 1], ends_prompt=False) for n in (5, 6))
    assert trace.prefills() == []
    append(first)
    assert trace.prefills() == [first]
    append(second)
    line = trace.path.read_bytes()
    trace.path.write_bytes(line[:-20])
    assert trace.prefills() == [first]
    trace.path.write_bytes(line)
    assert trace.prefills() == [first, second] == Trace(trace.path).prefills()
