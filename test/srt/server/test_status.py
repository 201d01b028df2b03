"""``status``: its output on running servers, and where there is none."""

from __future__ import annotations

import json
import logging
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer
from typing import Any

import pytest
from pytest_httpserver import HTTPServer

from harness.ask import generate, tokens
from harness.documented import sample
from harness.server import Server
from harness.typed_secrets import MARK, VARIABLES, places
from sglang_gemma4_yoco import __version__
from sglang_gemma4_yoco.commands import status
from sglang_gemma4_yoco.commands.https import API_KEY
from sglang_gemma4_yoco.commands.main import main
from sglang_gemma4_yoco.commands.status import ENTRY, NO_ENTRY
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.metrics import make_label

Captured = pytest.CaptureFixture[str]
# It would write each request to stderr.
logging.getLogger("werkzeug").setLevel(logging.ERROR)


def report(capsys: Captured, *arguments: str) -> tuple[int, list[str], list[str]]:
    """Return the exit status, and the lines of stdout and of stderr."""
    code = main(["status", *arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


def test_a_server_that_is_active(on_server: Server, capsys: Captured) -> None:
    generate(on_server, tokens(100, seed=1))
    code, out, err = report(capsys, on_server.url + "/")
    assert (code, err) == (0, [])
    [shown] = json.loads("\n".join(out[:-1]))
    [state] = on_server.states()
    assert shown == state[ENTRY]
    counted = r"The fast path is active: \d+\.\d% of prefills cut, \d+\.\d% of rows skipped\."
    assert re.fullmatch(counted, out[-1])
    code, [line], _ = report(capsys, "--json", on_server.url)
    document = json.loads(line)
    assert (code, document["active"], document["reason"]) == (0, True, None)
    assert document["schedulers"] == [state[ENTRY]]
    assert (shown["version"], shown["active"]) == (__version__, True)
    assert shown["rows"]["skipped"] >= 99


def test_the_sample_in_the_documents(capsys: Captured) -> None:
    """The sample is the output on a server with these entries."""
    shown = sample("status")
    entries = json.loads(shown.rpartition("\n")[0])
    with http(200, {"internal_states": [{ENTRY: entry} for entry in entries]}) as url:
        code, out, err = report(capsys, url)
    assert (code, err) == (0, [])
    assert "\n".join(out) == shown


@pytest.mark.parametrize(
    ("counted", "exits", "said"),
    [
        ([({}, {}), ({}, {})], 0, ": no prefill yet."),
        ([({"PROBES": 5}, {"computed": 5})], 0, ": no prefill yet."),
        (
            [({"PROBES": 5, "failed": 1}, {})],
            4,
            ", but none of 1 prefills was cut, 1 failed: most are failed (docs/slower.md).",
        ),
        (
            [
                ({"active_eager": 2, "failed": 1}, {"computed": 30, "skipped": 50}),
                ({"exit_intermediate_chunk": 1, "PROBES": 4}, {"computed": 0, "skipped": 20}),
            ],
            4,
            ": 75.0% of prefills cut, 70.0% of rows skipped, 1 failed.",
        ),
        (
            [({"unseen": 1, "lora": 3}, {"computed": 9, "skipped": 0}), ({"unseen": 1}, {})],
            4,
            ", but none of 5 prefills was cut: most are lora (docs/slower.md).",
        ),
    ],
    ids=["nothing served", "probes", "a failure beside probes", "two schedulers", "nothing cut"],
)
def test_how_much_is_cut(
    counted: list[tuple[dict[str, int], dict[str, int]]],
    exits: int,
    said: str,
    capsys: Captured,
) -> None:
    probes = make_label(eligibility.NOTHING_TO_SKIP)
    states = []
    for outcomes, rows in counted:
        forwards = {outcome.replace("PROBES", probes): n for outcome, n in outcomes.items()}
        states.append({ENTRY: {"active": True, "forwards": forwards, "rows": rows}})
    with http(200, {"internal_states": states}) as url:
        code, out, err = report(capsys, url)
    assert (code, err) == (exits, [])
    assert out[-1] == f"The fast path is active{said}"


def test_an_audit_that_differs(capsys: Captured) -> None:
    entry = {"active": True, "forwards": {"active_eager": 1}, "audits": {"agrees": 2, "differs": 1}}
    with http(200, {"internal_states": [{ENTRY: {**entry, "rows": {"skipped": 3}}}]}) as url:
        code, out, _ = report(capsys, url)
    assert code == 4
    assert out[-1].endswith("100.0% of rows skipped, 1 audits differed.")


def test_several_servers(capsys: Captured) -> None:
    """The worst one determines the exit status; each has its lines, or its JSON document."""
    uncut = {"active": True, "forwards": {"lora": 1}, "rows": {"computed": 9}}
    off = {"active": False, "reason": "LoRA"}
    with (
        http(200, ACTIVE) as active,
        http(200, {"internal_states": [{ENTRY: uncut}]}) as faulty,
        http(200, {"internal_states": [{ENTRY: off}]}) as inactive,
    ):
        down = active + "1"
        for worst, urls in (
            (0, [active, active]),
            (4, [faulty, active]),
            (1, [active, inactive, faulty]),
            (3, [down, inactive]),
        ):
            code, out, _ = report(capsys, *urls)
            assert code == worst
            assert [line for line in out if line.startswith("==")] == [f"== {url}" for url in urls]
            code, out, err = report(capsys, "--json", *urls)
            assert (code, err) == (worst, [])
            documents = [json.loads(line) for line in out]
            assert [document["url"] for document in documents] == urls
            assert worst in [document["exit_status"] for document in documents]
    assert (documents[0]["active"], documents[0]["schedulers"]) == (None, [])
    assert documents[0]["reason"].startswith(f"{down}: no answer")


def test_a_server_that_is_switched_off(off_server: Server, capsys: Captured) -> None:
    """It has no entry; the other possible reasons for that are listed."""
    code, out, err = report(capsys, off_server.url)
    assert (code, err) == (1, [])
    assert out[-1] == f"The server does not say whether the fast path is active: {NO_ENTRY}"
    code, [line], _ = report(capsys, "--json", off_server.url)
    document = json.loads(line)
    assert (code, document["active"], document["reason"]) == (1, None, NO_ENTRY)
    assert document["schedulers"] == [None]


# ---------------------------------------------------------------- other servers


@contextmanager
def http(code: int, document: Any, certificate: Path | None = None) -> Iterator[str]:
    """Yield the URL of an HTTP server with this answer: 200 if the key is ``right``.

    With a certificate, the server speaks https; it is one for localhost.
    """
    context = None
    place = "http://127.0.0.1"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        place = "https://localhost"
    right = {"Authorization": "Bearer right"}
    with HTTPServer("127.0.0.1", ssl_context=context) as server:
        server.expect_request("/server_info", headers=right).respond_with_json(document)
        server.expect_request("/server_info").respond_with_json(document, code)
        yield f"{place}:{server.port}"


ACTIVE = {"internal_states": [{ENTRY: {"active": True}}]}


def refusal(capsys: Captured, *arguments: str) -> str:
    code, out, err = report(capsys, *arguments)
    assert (code, out) == (3, [])
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
    "answer",
    [
        b"hello admin@host\r\n",
        # The first frame of HTTP/2, as from a gRPC server.
        b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nadmin@host\x1b\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: ftp://admin@host/\r\n\r\n",
        b"",
    ],
    ids=["text", "gRPC", "no chunk", "redirected", "nothing"],
)
def test_a_peer_that_does_not_speak_http(answer: bytes, capsys: Captured) -> None:
    """Its bytes are not in the message, which is one line with the address."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.wfile.write(answer)

    with TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        line = refusal(capsys, url.replace("://", "://user:password@"))
        thread.join()
    assert line.startswith(f"error: {url}: no answer (it ")
    assert line.endswith(": expected http://HOST:PORT, or https:// if it has a certificate")
    assert line.isprintable()
    assert not re.search("admin|host/|password", line)


@pytest.mark.parametrize("url", ["http://", "http://localhost:port", "ftp://a"])
def test_an_invalid_url(capsys: Captured, url: str) -> None:
    line = refusal(capsys, url)
    assert line.startswith(f"error: {url}: no answer (")
    assert "expected http://HOST:PORT" in line


def test_a_key_is_asked_for_and_given(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    with http(401, ACTIVE) as url:
        assert f"set {API_KEY}, or use --api-key" in refusal(capsys, url)
        assert report(capsys, url, "--api-key", "right")[0] == 0
        monkeypatch.setenv(API_KEY, "right")
        assert report(capsys, url)[0] == 0
        assert "rejects this API key" in refusal(capsys, url, "--api-key", "wrong")


def test_no_proxy_stands_between_a_machine_and_itself(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with http(200, ACTIVE) as url:
        assert report(capsys, url)[0] == 0


# ---------------------------------------------------------------- https


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a self-signed certificate for localhost, and its key."""
    whole = tmp_path_factory.mktemp("https") / "whole.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    command += " -addext subjectAltName=DNS:localhost -keyout whole.pem -out whole.pem"
    subprocess.run(command.split(), cwd=whole.parent, check=True, capture_output=True)
    return whole


@pytest.fixture(autouse=True)
def no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's certificates."""
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(variable, raising=False)


def of_https(line: str) -> str:
    """Return the line; assert that it has no exceptions and no names of Python."""
    assert not re.search(r"Error|Exception|Errno|HTTPS?Connection|\.c:|Max retries|<", line)
    return line


def test_a_certificate_that_is_trusted(
    certificate: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option or a variable names it; the server is local too, where no proxy is used."""
    with http(200, ACTIVE, certificate) as url:
        assert report(capsys, url, "--cacert", str(certificate))[0] == 0
        for variable in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            monkeypatch.setenv(variable, str(certificate))
            assert report(capsys, url)[0] == 0
            # The option takes precedence.
            monkeypatch.setenv(variable, "/no/such/file")
            assert report(capsys, url, "--cacert", str(certificate))[0] == 0
            monkeypatch.delenv(variable)


def test_any_certificate(
    certificate: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no warning, for any host name and any value of a variable."""
    with http(200, ACTIVE, certificate) as url:
        for address in (url, url.replace("localhost", "127.0.0.1")):
            code, out, err = report(capsys, address, "--insecure")
            assert (code, err) == (0, [])
            assert out[-1] == "The fast path is active: no prefill yet."
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/no/such/file")
        assert report(capsys, url, "--insecure")[0] == 0


def test_a_certificate_that_is_not_trusted(certificate: Path, capsys: Captured) -> None:
    with http(200, ACTIVE, certificate) as url:
        line = of_https(refusal(capsys, url))
        assert line.startswith(f"error: {url}: its certificate is not trusted (self-signed cert")
        assert "--cacert FILE" in line
        assert "--insecure" in line
        other = url.replace("localhost", "127.0.0.1")
        line = of_https(refusal(capsys, other, "--cacert", str(certificate)))
        assert "certificate is not valid for '127.0.0.1'" in line
        assert "a host name that it covers" in line


def test_https_is_spoken_where_http_is_not(certificate: Path, capsys: Captured) -> None:
    """The wrong scheme either way, or no server: the error says what to expect."""
    remedy = ": expected http://HOST:PORT, or https:// if it has a certificate"
    with http(200, ACTIVE, certificate) as url, http(200, ACTIVE) as other:
        asked = [url.replace("https", "http"), other.replace("http", "https")]
        for one in asked:
            line = of_https(refusal(capsys, one))
            assert line.startswith(f"error: {one}: no answer (")
            assert line.endswith(remedy)
    for one in asked:
        line = of_https(refusal(capsys, one))
        assert line.startswith(f"error: {one}: no answer (Connection refused): is the server ready")


# ---------------------------------------------------------------- secrets


def test_no_secret_of_a_server_is_shown(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server quotes the keys that it was asked with, at an address with a password."""
    for variable, value in VARIABLES.items():
        monkeypatch.setenv(variable, value)
    entry = {"active": False, "reason": f"{MARK} is set", "more": {"keys": [VARIABLES[API_KEY]]}}
    with http(200, {"version": MARK, "internal_states": [{ENTRY: entry}]}) as url:
        address = url.replace("://", f"://user:{MARK}@")
        bare = address.removeprefix("http://")
        for how in (
            [address, "--api-key", MARK],
            [address, "--api-k", f"a {MARK}", "--json"],
            [bare, "--json", "--api-key", MARK],
        ):
            code, out, err = report(capsys, *how)
            assert (code, err) == (1, [])
            printed = "\n".join(out)
            assert not list(places(out=printed, err="", folder=tmp_path))
            assert "... is set" in printed
            if "--json" in how:
                assert json.loads(printed)["url"] == url


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        ([{"active": True}, {"active": True}], (True, None)),
        ([{"active": True}, {"active": False, "reason": "LoRA"}], (False, "LoRA")),
        ([{"active": True}, None], (None, NO_ENTRY)),
        ([None, {"active": False, "reason": "LoRA"}], (False, "LoRA")),
        ([], (None, NO_ENTRY)),
    ],
)
def test_all_schedulers_count(
    states: list[dict[str, Any] | None], verdict: tuple[bool | None, str | None]
) -> None:
    assert status.verdict(states) == verdict
