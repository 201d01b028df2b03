"""Unchanged SGLang servers, stock and fast, each in a process group that is stopped as one."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.commands import https, status
from sglang_gemma4_yoco.commands.console import CommandError, Document, quote_end, say
from sglang_gemma4_yoco.commands.redact import redact
from sglang_gemma4_yoco.settings import SWITCH, name_of

if TYPE_CHECKING:
    import requests

# Run the arguments, and kill the process group at the end of stdin: when this process has ended,
# even by SIGKILL. All processes that the server has started are killed too.
_OWN_GROUP = 'exec 3<&0 </dev/null; (read -r _ <&3; kill -9 0) & exec "$@" 3<&-'
# By whether a server is the fast one.
_NAMES = {False: f"{SWITCH}=0 (stock)", True: f"{SWITCH}=1 (fast prefill)"}


class WrongPathError(Exception):
    """The fast path was active on the stock server, or not active on the fast one."""


class Server:
    """A local ``sglang.launch_server`` with the switch on (``fast``) or off, and its log file."""

    TIMEOUT = 1800.0  # seconds that an answer may take
    process: Any  # the first process of the latest start, a ``Popen``

    def __init__(self, fast: bool, arguments: Sequence[str], port: int, log_file: Path) -> None:
        self.fast = fast
        self.name = _NAMES[fast]
        self.arguments = list(arguments)
        self.port = port
        self.log_file = log_file
        self.env = {
            **os.environ,
            SWITCH: str(int(fast)),
            name_of("audit"): "0",  # audits answer with what stock computes
            "PYTHONUNBUFFERED": "1",
            # A checkout in this folder would hide the installed package.
            "PYTHONSAFEPATH": "1",
        }
        self.url = f"http://127.0.0.1:{port}"
        self._http = https.make_session(self.url)
        self._checked = Counter[str]()  # the prefills that ``take_forwards`` has returned

    def command(self) -> list[str]:
        """Return the arguments of the Python interpreter."""
        words = ["-m", "sglang.launch_server", *self.arguments]
        return [*words, "--host", "127.0.0.1", "--port", str(self.port)]

    def start(self) -> None:
        """Start it; ``stop`` ends it."""
        with self.log_file.open("wb") as output:
            self.log_file.chmod(0o600)  # while it runs, its log has keys
            self.process = subprocess.Popen(
                ["sh", "-c", _OWN_GROUP, "sh", sys.executable, *self.command()],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Kill all of its processes, as SGLang ends its own, and redact its log."""
        try:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        finally:
            with suppress(OSError):  # SGLang logs its arguments; the file may be gone
                self.log_file.write_text(redact(self.log()), "utf-8")

    def is_healthy(self) -> bool:
        """Return True if it answers, which it does not while it loads."""
        try:
            return self._http.get(f"{self.url}/health", timeout=30).ok
        except OSError:  # requests' own errors are OSErrors
            return False

    def wait_until_ready(self, timeout: float) -> None:
        """Return when it answers; raise CommandError if it ends, or after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not self.is_healthy():
            if self.process.poll() is not None:
                raise self._make_error(
                    f"ended with status {self.process.returncode}, see its log. If out of memory, "
                    "try verify's --in-turn; if gated, try `hf auth login`."
                )
            if time.monotonic() > deadline:
                raise self._make_error(f"was not ready after {timeout:.0f} s.")
            time.sleep(0.5)
        self.take_forwards()  # SGLang sends its own request when it starts

    def _make_error(self, how: str) -> CommandError:
        return CommandError(f"{self.name} {how}{quote_end(self.log_file)}")

    def _ask(self, method: str, path: str, body: Document | None = None) -> requests.Response:
        """Return the reply to a request; raise CommandError if the server refuses it or is gone."""
        try:
            reply = self._http.request(method, self.url + path, json=body, timeout=self.TIMEOUT)
        except OSError as failure:
            raise self._make_error(f"stopped responding: {failure!r}") from failure
        if not reply.ok:
            raise CommandError(
                f"{self.name} refused {path} ({reply.status_code}): {' '.join(reply.text.split())}"
            )
        return reply

    def get(self, path: str) -> Any:
        """GET a JSON document."""
        return self._ask("GET", path).json()

    def post(self, path: str, body: Document) -> requests.Response:
        """POST ``body`` as JSON."""
        return self._ask("POST", path, body)

    def generate(self, **body: object) -> Any:
        """Return SGLang's answer to one request to /generate, or a list of them to a batch."""
        return self.post("/generate", body).json()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache once no request runs; the last one may still be cleaned up."""
        self._ask("POST", "/flush_cache?timeout=30")

    def log(self) -> str:
        """Return everything that its processes have printed so far."""
        return self.log_file.read_text("utf-8", errors="replace")

    def states(self) -> list[Document]:
        """Return the internal state of each scheduler, including the resolved arguments."""
        states: list[Document] = self.get("/server_info")["internal_states"]
        return states

    def take_forwards(self) -> Counter[str]:
        """Return the prefill forwards of all schedulers since the last call, by outcome."""
        before = self._checked
        self._checked = Counter()
        for state in self.states():
            self._checked.update(state.get(status.ENTRY, {}).get("forwards"))
        return self._checked - before


def check_switch(
    server: Server, during: str = "its requests", *taken: Counter[str]
) -> Counter[str]:
    """Return the prefill forwards of a running server since the last check, by outcome.

    Args:
        during: the requests since then.
        taken: its forwards that were taken meanwhile.

    Raises:
        WrongPathError: the switch is on and no prefill was cut, or it is off and one was cut. The
            message names ``during``.
    """
    forwards = sum(taken, server.take_forwards())
    is_cut = not counters.CUT.isdisjoint(forwards)
    if is_cut == server.fast:
        return forwards
    found = "active"
    if server.fast:
        _, reason = status.verdict([state.get(status.ENTRY) for state in server.states()])
        found = f"NOT active ({reason or ', '.join(forwards) or 'it gives no reason'})"
    raise WrongPathError(
        f"{server.name}: the fast path was {found} during {during}. "
        f"Its prefills: {dict(forwards)}. Its log: {server.log_file}"
    )


def make_pair(arguments: Sequence[str], folder: Path, *, device: str) -> tuple[Server, Server]:
    """Return the stock server and the fast one, not started; ``arguments`` override defaults."""
    flags = ["--device", "cuda", *arguments]
    if device == "cpu":
        # An idle scheduler spins, and would take a core from the server that is measured.
        flags = ["--device", "cpu", "--sleep-on-idle", *arguments]
    off, on = find_free_ports(2)
    stock = Server(False, flags, off, folder / "server-off.log")
    return stock, Server(True, flags, on, folder / "server-on.log")


@contextmanager
def run_servers(servers: Sequence[Server], timeout: float) -> Iterator[None]:
    """Run these servers, ready within ``timeout`` seconds each; end them in any case."""
    with ExitStack() as stack:
        for server in servers:
            say(f"Starting {server.name} on port {server.port}")
            server.start()
            stack.callback(server.stop)
        for server in servers:
            server.wait_until_ready(timeout)
        yield


def find_free_ports(count: int) -> list[int]:
    """Return ``count`` free ports, outside of the range for outgoing connections."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            port = random.randrange(20_000, 32_000)
            with suppress(OSError):  # it is taken
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    return ports
