"""What ``status`` prints of running servers, and of what is none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ask import generate, tokens
from server import Server, running
from sglang_gemma4_reference import tail_failures
from sglang_gemma4_yoco import __version__, log
from sglang_gemma4_yoco.commands import status
from sglang_gemma4_yoco.commands.main import main
from sglang_gemma4_yoco.commands.servers import API_KEY, ENTRY, NO_ENTRY
from sglang_gemma4_yoco.core import forward

Captured = pytest.CaptureFixture[str]


def report(capsys: Captured, *arguments: str) -> tuple[int, list[str], list[str]]:
    """Exit status, lines of stdout and of stderr."""
    code = main(["status", *arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


def test_a_server_that_is_active(on_server: Server, capsys: Captured) -> None:
    generate(on_server, tokens(100, seed=1))
    code, out, err = report(capsys, on_server.url + "/")
    assert (code, err) == (0, [])
    assert out[-1] == "The fast path is active."
    [shown] = json.loads("\n".join(out[:-1]))
    [state] = on_server.get("/server_info")["internal_states"]
    assert shown == state[ENTRY]
    code, [line], _ = report(capsys, "--json", on_server.url)
    document = json.loads(line)
    assert (code, document["active"], document["reason"]) == (0, True, None)
    assert document["schedulers"] == [state[ENTRY]]
    assert (shown["version"], shown["active"]) == (__version__, True)
    assert shown["rows"]["skipped"] >= 99


def test_a_server_that_is_switched_off(off_server: Server, capsys: Captured) -> None:
    """It has no entry: the likely reasons are listed."""
    code, out, err = report(capsys, off_server.url)
    assert (code, err) == (1, [])
    assert out[-1] == f"The fast path is NOT active: {NO_ENTRY}"
    assert "SGLANG_GEMMA4_YOCO=0" in out[-1]
    code, [line], _ = report(capsys, "--json", off_server.url)
    document = json.loads(line)
    assert (code, document["active"], document["reason"]) == (1, False, NO_ENTRY)
    assert document["schedulers"] == [None]


@pytest.mark.release
def test_a_server_that_gave_up_is_not_active(
    tiny_checkpoint: Path, tmp_path: Path, capsys: Captured
) -> None:
    """Nor is one active that has just lost the path for good, while it serves as before."""
    with running(tiny_checkpoint, tmp_path, switch=None) as server:
        assert report(capsys, server.url)[0] == 0
        server.failures.write_text("1")
        for number in range(forward.LIMIT):
            assert report(capsys, server.url)[0] == 0
            generate(server, tokens(40, seed=number))
        assert len(tail_failures.so_far(server.failures)) == forward.LIMIT
        code, out, err = report(capsys, server.url)
        assert (code, err) == (1, [])
        assert out[-1] == f"The fast path is NOT active: {forward.GIVEN_UP}"
        generate(server, tokens(40, seed=forward.LIMIT))
        code, out, _ = report(capsys, "--json", server.url)
        [state] = json.loads(out[-1])["schedulers"]
    assert code == 1
    assert (state["active"], state["reason"]) == (False, forward.GIVEN_UP)
    assert state["forwards"][log.FAILED] == forward.LIMIT
    assert state["forwards"]["server_refused"] == 1
    assert len(tail_failures.so_far(server.failures)) == forward.LIMIT


# ---------------------------------------------------------------- what is no such server


@contextmanager
def http(code: int, document: Any) -> Iterator[str]:
    """The URL of an HTTP server that answers this; 200 where the key is ``right``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers["Authorization"] == "Bearer right" else code)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ACTIVE = {"internal_states": [{ENTRY: {"active": True}}]}


def refusal(capsys: Captured, *arguments: str) -> str:
    code, out, err = report(capsys, *arguments)
    assert (code, out) == (2, [])
    [line] = err
    return line


def test_other_http_servers(capsys: Captured) -> None:
    for code, document in ((200, "text"), (200, None), (200, {"internal_states": 3}), (500, None)):
        with http(code, document) as url:
            line = refusal(capsys, url)
            assert line.startswith(f"error: {url}/server_info answers {code}, not as an SGLang")
            assert "give the server's own URL" in line
    assert refusal(capsys, url).startswith(f"error: {url}: no answer (")  # it has ended


@pytest.mark.parametrize(
    "url", ["localhost:30000", "127.0.0.1", "http://", "http://localhost:port", "ftp://a", ""]
)
def test_what_is_no_url(capsys: Captured, url: str) -> None:
    line = refusal(capsys, url)
    assert line.startswith(f"error: {url}: no answer (")
    assert line.endswith("expected http://HOST:PORT")


def test_a_key_is_asked_for_and_given(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    with http(401, ACTIVE) as url:
        assert f"put it into {API_KEY}, or use --api-key" in refusal(capsys, url)
        assert report(capsys, url, "--api-key", "right")[0] == 0
        monkeypatch.setenv(API_KEY, "right")
        assert report(capsys, url)[0] == 0
        assert "wants another key" in refusal(capsys, url, "--api-key", "wrong")


def test_no_proxy_stands_between_a_machine_and_itself(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with http(200, ACTIVE) as url:
        assert report(capsys, url)[0] == 0


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        ([{"active": True}, {"active": True}], (True, None)),
        ([{"active": True}, {"active": False, "reason": "LoRA"}], (False, "LoRA")),
        ([{"active": True}, None], (False, NO_ENTRY)),
        ([], (False, "the server names no scheduler")),
    ],
)
def test_all_schedulers_count(
    states: list[dict[str, Any] | None], verdict: tuple[bool, str | None]
) -> None:
    assert status.verdict(states) == verdict
