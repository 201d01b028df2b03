"""What tests of servers stand on: waiting that ends, starts that are tried again, the row trace.

The server here is a program of a few lines that is found where SGLang's would be.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from server import (
    ServerDiedError,
    python_path,
    running,
    stand_in_for_sglang,
    started,
    wait_until,
)
from sglang_gemma4_reference.row_trace import Prefill, Trace, append_to


def test_waiting_ends_with_the_first_true_value() -> None:
    values = iter([0, "", 7, 8])
    assert wait_until(lambda: next(values), "a value", 60) == 7


def test_waiting_in_vain_says_for_what() -> None:
    with pytest.raises(TimeoutError, match="a miracle: not within 0 s\nthe log"):
        wait_until(lambda: False, "a miracle", 0, lambda: "the log")


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


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which ``sglang.launch_server`` is the program above."""
    return {"PYTHONPATH": python_path(stand_in_for_sglang(tmp_path / "path", SERVER))}


def test_a_taken_port_is_another_start(tmp_path: Path, environment: dict[str, str]) -> None:
    environment["FAILING_STARTS"] = "2"
    with running(
        tmp_path, tmp_path / "server", switch=None, env=environment, spawned=True
    ) as server:
        ports = (tmp_path / "server" / "starts").read_text().split()
        assert len(ports) == 3
        assert server.url.endswith(f":{ports[-1]}")
        assert server.process.poll() is None
    assert server.process.poll() is not None


def test_a_port_that_is_always_taken_is_an_error(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    environment["FAILING_STARTS"] = "9"
    with (
        started(
            tmp_path, tmp_path / "server", switch=None, env=environment, spawned=True
        ) as server,
        pytest.raises(ServerDiedError, match="address already in use"),
    ):
        server.wait_until_ready()


def test_a_server_that_ends_is_an_error_that_shows_its_log(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    environment["FAILING_STARTS"] = "0"
    with (
        started(
            tmp_path,
            tmp_path / "server",
            switch=None,
            arguments=["--broken"],
            env=environment,
            spawned=True,
        ) as server,
        pytest.raises(ServerDiedError, match="exited with 1:\nno such model"),
    ):
        server.wait_until_ready()
    assert len((tmp_path / "server" / "starts").read_text().split()) == 1


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
