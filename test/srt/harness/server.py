"""A real SGLang server in a subprocess, on the CPU reference platform."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import requests

from demo import choose_ports
from sglang_gemma4_reference import row_trace, tail_failures
from sglang_gemma4_reference.row_trace import Prefill

SWITCH = "SGLANG_GEMMA4_YOCO"
CHUNK = 128  # tokens per prefill forward

_ARGUMENTS = (
    *("--device", "cpu"),
    *("--dtype", "float32"),
    *("--max-total-tokens", "8192"),
    *("--chunked-prefill-size", str(CHUNK)),
    "--enable-mixed-chunk",  # decode steps and prefill in one forward
    "--sleep-on-idle",  # an idle scheduler would otherwise keep a core busy
)
_START_TIMEOUT = 600.0
_REQUEST_TIMEOUT = 300.0
_TAIL = 40  # log lines worth showing


class Server:
    """One running server: its HTTP API, its log, and what its layers computed.

    Attributes:
        checkpoint: what it serves.
        failures: the file that says how often its tail is to fail (``tail_failures``).
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        checkpoint: Path,
        port: int,
        log: Path,
        trace: Path,
        failures: Path,
    ) -> None:
        self.process = process
        self.checkpoint = checkpoint
        self.failures = failures
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._trace = trace
        self._http = requests.Session()
        self._http.trust_env = False  # no proxy stands between a machine and itself
        self._start_up = 0  # length of the log when the server was ready

    def log(self) -> str:
        """Everything that all processes of the server have printed so far."""
        return self._log.read_text("utf-8", errors="replace")

    def log_since_ready(self) -> str:
        """The log without the start: some releases show there what they failed to import."""
        return self.log()[self._start_up :]

    def log_lines(self, text: str) -> list[str]:
        """The log's lines that contain ``text``."""
        return [line for line in self.log().splitlines() if text in line]

    def prefills(self, since: int = 0) -> list[Prefill]:
        """The prefill forwards so far, without the first ``since``."""
        return row_trace.read(self._trace)[since:]

    def mark(self) -> int:
        """How many prefill forwards there were so far, for ``prefills(since=...)``."""
        return len(self.prefills())

    def post(self, path: str, body: dict[str, Any]) -> requests.Response:
        """POST ``body`` as JSON; fail with the server's own words unless it answers 200."""
        response = self._http.post(self.url + path, json=body, timeout=_REQUEST_TIMEOUT)
        assert response.ok, f"{path}: {response.status_code} {response.text}"
        return response

    def generate(self, **body: Any) -> Any:
        """/generate's JSON answer."""
        return self.post("/generate", body).json()

    def chat(self, **body: Any) -> Any:
        """/v1/chat/completions' JSON answer, or with ``stream=True`` the list of its chunks."""
        response = self.post("/v1/chat/completions", {"model": "default", **body})
        if not body.get("stream"):
            return response.json()
        events = [line[len("data: ") :] for line in response.text.splitlines() if line]
        assert events[-1] == "[DONE]", f"the stream breaks off: {events[-1]}"
        return [json.loads(event) for event in events[:-1]]

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self.post("/flush_cache", {})

    def wait_until_ready(self, timeout: float = _START_TIMEOUT) -> None:
        """Return when /health answers 200; raise with the tail of the log when it never will."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server exited with {self.process.returncode}:\n{self._log_tail()}"
                )
            try:
                if self._http.get(f"{self.url}/health", timeout=30).ok:
                    self._start_up = len(self.log())
                    return
            except requests.ConnectionError:
                pass
            time.sleep(0.2)
        raise TimeoutError(f"no healthy server within {timeout:.0f} s:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-_TAIL:])


def _kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, and see them gone."""
    try:
        root = psutil.Process(pid)
        processes = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=30)


@contextmanager
def started(
    checkpoint: Path, directory: Path, *, switch: str | None, arguments: Sequence[str] = ()
) -> Iterator[Server]:
    """A server of ``checkpoint`` that is on its way up; dead, with all its children, after it.

    Args:
        checkpoint: what to serve.
        directory: where its log and row trace go; made if need be.
        switch: value of ``SGLANG_GEMMA4_YOCO``; None leaves it unset.
        arguments: further ones for the command line.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log, trace, failures = (directory / name for name in ("server.log", "rows.jsonl", "failures"))
    environment = {name: value for name, value in os.environ.items() if name != SWITCH}
    environment |= {
        "SGLANG_PLATFORM": "gemma4_cpu",
        row_trace.VARIABLE: str(trace),
        tail_failures.VARIABLE: str(failures),
        # Its one-token requests would show up in the row trace.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "HF_HUB_OFFLINE": "1",
    }
    if switch is not None:
        environment[SWITCH] = switch
    port, _ = choose_ports(None)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)]
    command += ["--port", str(port), *_ARGUMENTS, *arguments]
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches pytest alone, which then kills the server.
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Server(process, checkpoint, port, log, trace, failures)
    finally:
        _kill_tree(process.pid)
        process.wait()


@contextmanager
def running(
    checkpoint: Path, directory: Path, *, switch: str | None, arguments: Sequence[str] = ()
) -> Iterator[Server]:
    """``started``, and ready to serve."""
    with started(checkpoint, directory, switch=switch, arguments=arguments) as server:
        server.wait_until_ready()
        yield server


@contextmanager
def pair(checkpoint: Path, directory: Path, *arguments: str) -> Iterator[tuple[Server, Server]]:
    """Two servers with the same arguments: the fast path on (by default), and switched off."""
    with ExitStack() as stack:
        # Starting is mostly importing, so they start side by side.
        on, off = (
            stack.enter_context(
                started(checkpoint, directory / name, switch=switch, arguments=arguments)
            )
            for name, switch in (("on", None), ("off", "0"))
        )
        on.wait_until_ready()
        off.wait_until_ready()
        yield on, off
