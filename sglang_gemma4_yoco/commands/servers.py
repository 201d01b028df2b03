"""Unchanged SGLang servers, stock and fast: started, asked, seen to do what their switch says.

Every server leads a process group of its own, which is ended as a whole on every way out.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.commands.console import CommandError, say
from sglang_gemma4_yoco.settings import SWITCH

if TYPE_CHECKING:
    import requests

PROGRAM = "sglang.launch_server"
LOG_MARK = "Gemma 4 fast prefill"
ACTIVE_MARK = f"{LOG_MARK} is active: "
_WHY_NOT = ("steps aside", "is NOT installed")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command; while servers are being stopped they are waited out."""
# What loading/metrics.py adds to a scheduler's state; that module imports all of SGLang.
_STATE = "gemma4_yoco"
_BY_CHANCE = 2  # first tokens that a random prompt may share with one that was asked before it


class WrongPathError(Exception):
    """A server did not do what its switch says."""


class Server:
    """One ``sglang.launch_server`` on this machine, with the switch on or off.

    Attributes:
        fast: what ``SGLANG_GEMMA4_YOCO`` is for it.
        arguments: for its command line, without host and port.
        port: on 127.0.0.1.
        log_file: what all of its processes print into; it runs in that folder.
        env: its environment.
        process: its first process, a ``Popen``, from the latest start on.
    """

    PATIENCE = 15.0  # seconds that its processes have to end by themselves
    TIMEOUT = 1800.0  # seconds that an answer may take
    process: Any

    def __init__(
        self,
        fast: bool,
        arguments: Sequence[str],
        port: int,
        log_file: Path,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self.fast = fast
        self.arguments = list(arguments)
        self.port = port
        self.log_file = log_file
        self.env = {**env, SWITCH: str(int(fast)), "PYTHONUNBUFFERED": "1"}
        self._before: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """How tables and messages call it."""
        return f"{SWITCH}=1 (fast prefill)" if self.fast else f"{SWITCH}=0 (stock)"

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    # -- its life ----------------------------------------------------------------------------

    @contextmanager
    def started(self) -> Iterator[None]:
        """Start the server; end all of its processes on every way out."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def command(self) -> list[str]:
        """What Python runs."""
        return ["-m", PROGRAM, *self.arguments, "--host", "127.0.0.1", "--port", str(self.port)]

    def start(self) -> None:
        """Start it; ``started`` sees to its end as well."""
        with self.log_file.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *self.command()],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Away from a checkout, which would hide the installed package.
                cwd=self.log_file.parent,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End all of its processes."""
        before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
        try:
            _signal_group(self.process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=self.PATIENCE)
            _signal_group(self.process.pid, signal.SIGKILL)
            self.process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def is_healthy(self) -> bool:
        """Whether it answers; not while it still loads."""
        try:
            return self._http.get(f"{self.url}/health", timeout=30).ok
        except OSError:  # requests' own errors are of this kind; not listening yet
            return False

    def wait_until_ready(self, timeout: float) -> None:
        """Return when the server answers requests.

        Raises:
            CommandError: it has ended, or is not ready after ``timeout`` seconds.
        """
        began = told = time.monotonic()
        while not self.is_healthy():
            self._check_alive()
            now = time.monotonic()
            if now - began > timeout:
                raise CommandError(
                    f"{self.name} was not ready after {timeout:.0f} s: give it longer with "
                    "--start-timeout.",
                    self.log_file,
                )
            if now - told > 30:
                told = now
                say(f"   still starting after {now - began:.0f} s")
            time.sleep(0.5)
        # SGLang's own request at start is a prefill too, and proves nothing of those that follow.
        self._before = self._counted()

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            raise CommandError(
                f"{self.name} ended with status {self.process.returncode}. Its log says why: out "
                "of memory asks for a smaller model or --servers in-turn, an unknown model for "
                "another one, a gated one for `hf auth login`.",
                self.log_file,
            )

    # -- asking it ---------------------------------------------------------------------------

    @cached_property
    def _http(self) -> requests.Session:
        import requests  # comes with SGLang, which other commands can do without

        session = requests.Session()
        session.trust_env = False  # no proxy stands between a machine and itself
        session.headers["Connection"] = "close"  # one that waits may be closed as it is used again
        return session

    def _ask(self, method: str, path: str, body: Any = None, **how: Any) -> requests.Response:
        how = {"timeout": self.TIMEOUT, **how}
        try:
            return self._http.request(method, self.url + path, json=body, **how)
        except OSError as failure:
            raise self._broke_off(failure) from failure

    def _broke_off(self, failure: Exception) -> CommandError:
        return CommandError(
            f"{self.name} broke off a request ({failure!r}); its log says why.", self.log_file
        )

    def get(self, path: str) -> Any:
        """GET a JSON document; None where this release of SGLang has none there."""
        reply = self._ask("GET", path, timeout=60)
        return reply.json() if reply.ok else None

    def post(self, path: str, body: Mapping[str, Any], **how: Any) -> requests.Response:
        """POST ``body`` as JSON.

        Raises:
            CommandError: the server refused it, in its own words, or is gone.
        """
        reply = self._ask("POST", path, body, **how)
        if not reply.ok:
            raise CommandError(
                f"{self.name} refused {_told(path, body)}: {' '.join(reply.text.split())}"
                + " (if it is too long, ask for fewer with --prompt-tokens)" * (path == "/generate")
            )
        return reply

    def forget_prefixes(self) -> None:
        """Empty the prefix cache. SGLang refuses that while requests run."""
        for _ in range(100):
            if self._ask("POST", "/flush_cache", {}, timeout=60).ok:
                return
            time.sleep(0.1)  # the last request is still being put away
        raise CommandError(f"{self.name} does not empty its prefix cache.", self.log_file)

    def generate(self, **body: Any) -> Any:
        """SGLang's answer to one request to /generate, or to a batch of them."""
        return self.post("/generate", body).json()

    def first_token(self, ids: list[int]) -> tuple[float, dict[str, Any]]:
        """Stream one greedy token; the seconds from the request to its arrival, and the reply.

        Raises:
            CommandError: the server refused it, or a part of it that counts came from the prefix
                cache.
        """
        sampling = {"temperature": 0, "max_new_tokens": 1}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        began = time.perf_counter()
        try:
            with self.post("/generate", {**body, "stream": True}, stream=True) as response:
                parts = filter(None, response.iter_lines())
                reply = json.loads(next(parts).removeprefix(b"data: "))
                seconds = time.perf_counter() - began
                for _ in parts:  # one request at a time: the next waits for the end of this one
                    pass
        except OSError as failure:
            raise self._broke_off(failure) from failure
        if "error" in reply:
            raise CommandError(f"{self.name} refused a request: {reply['error']}")
        cached = reply["meta_info"]["cached_tokens"]
        if cached > max(_BY_CHANCE, len(ids) // 32):
            raise CommandError(
                f"{self.name} took {cached} of {len(ids)} tokens from a prefix cache, so its time "
                "says nothing: turn the cache off with SGLang's --disable-radix-cache."
            )
        return seconds, reply

    # -- what it has said and done -----------------------------------------------------------

    def log(self) -> str:
        """Everything that all of its processes have printed so far."""
        return self.log_file.read_text("utf-8", errors="replace")

    def log_lines(self, text: str = LOG_MARK) -> list[str]:
        """The log's lines that contain ``text``: those of the plugin, if nothing else is asked."""
        return [line for line in self.log().splitlines() if text in line]

    def states(self) -> list[dict[str, Any]]:
        """What each scheduler says of itself, its resolved arguments among it."""
        found = (self.get("/server_info") or {}).get("internal_states", [])
        return [state for state in found if isinstance(state, dict)]

    def _counted(self) -> Counter[str]:
        """Prefill forwards so far by what became of them, of all schedulers."""
        counted: Counter[str] = Counter()
        for state in self.states():
            counted.update((state.get(_STATE) or {}).get("forwards", {}))
        return counted

    def forwards(self) -> Counter[str]:
        """Prefill forwards since the server was ready, by what became of them.

        The outcomes are those of docs/operating.md; there are none where the package is off.
        """
        return self._counted() - self._before

    def reasons(self) -> list[str]:
        """Why it is not active, as far as it says so."""
        said = [(state.get(_STATE) or {}).get("reason") for state in self.states()]
        lines = [
            line[line.index(LOG_MARK) :]
            for line in self.log_lines()
            if any(words in line for words in _WHY_NOT)
        ]
        return list(dict.fromkeys([reason for reason in said if reason] + lines))


def pair(
    arguments: Sequence[str],
    folder: Path,
    *,
    device: str,
    port: int | None = None,
    together: bool = True,
) -> tuple[Server, Server]:
    """The stock server and the fast one, not started.

    Args:
        arguments: for both; they count more than what is said here.
        folder: for their logs.
        device: ``cpu``, or whatever a GPU is called.
        port: of the first one, the next for the other; None for any two that are free.
        together: whether one GPU's memory is for both.
    """
    if device == "cpu":
        # An idle scheduler spins, and would take a core from the server that is measured.
        own = [["--device", "cpu", "--sleep-on-idle"]] * 2
    else:
        # Each takes its share of what is free when it starts: half, and then nearly all the rest.
        shares = [["--mem-fraction-static", share] for share in ("0.45", "0.85")]
        own = [["--device", "cuda", *(share if together else ())] for share in shares]
    stock, fast = (
        Server(on, [*mine, *arguments], port, folder / f"server-{'on' if on else 'off'}.log")
        for on, port, mine in zip((False, True), choose_ports(port), own, strict=True)
    )
    return stock, fast


@contextmanager
def running(
    servers: Sequence[Server], timeout: float, *, one_by_one: bool = False
) -> Iterator[None]:
    """These servers, ready; all of their processes are ended on every way out.

    Args:
        timeout: seconds that each may take to start.
        one_by_one: on a GPU the next one takes its share of what this one leaves.
    """
    with ExitStack() as stack:
        began = time.monotonic()
        for server in servers:
            say(f"Starting {server.name} on port {server.port}")
            stack.enter_context(server.started())
            if one_by_one:
                server.wait_until_ready(timeout)
        for server in servers:
            server.wait_until_ready(timeout)
        say(f"   ready after {time.monotonic() - began:.0f} s")
        yield


def check_switch(server: Server) -> Counter[str]:
    """What became of a running server's prefills since it was ready.

    Raises:
        WrongPathError: its fast path was active and its switch says no, or the other way round.
            That is read from the server's own counters, and of a stock one from its log as well.
    """
    forwards = server.forwards()
    active = not log.CUT.isdisjoint(forwards)
    if not server.fast:
        active = active or bool(server.log_lines(ACTIVE_MARK))
    if active == server.fast:
        return forwards
    reasons = "; ".join(server.reasons() or forwards) or "it gives no reason"
    said = "\n".join(f"  | {line}" for line in server.log_lines()) or "  | (nothing)"
    raise WrongPathError(
        f"{server.name}: the fast path was {'NOT ' if server.fast else ''}active"
        f"{f' ({reasons})' if server.fast else ''}.\n"
        f"Its prefills: {dict(forwards)}\n"
        f"The plugin's lines in {server.log_file}:\n{said}"
    )


def _told(path: str, body: Mapping[str, Any]) -> str:
    if "input_ids" in body:
        return f"a prompt of {len(body['input_ids'])} tokens"
    return f"a prompt of {len(body['text'])} characters" if "text" in body else path


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all of its processes have ended
        os.killpg(pid, number)


# ---------------------------------------------------------------- the machine


def choose_ports(first: int | None) -> tuple[int, int]:
    """Two ports: those asked for, if they are free, or any.

    Raises:
        CommandError: they are taken, or none is free.
    """
    any_ports = random.sample(range(20_000, 55_000), 1000)
    with ExitStack() as stack:
        ports: list[int] = []
        for port in any_ports if first is None else (first, first + 1):
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as failure:
                if first is None:
                    continue
                raise CommandError(
                    f"port {port} cannot be used ({failure}): choose another with --port, or leave "
                    "it out to take any two that are free."
                ) from failure
            ports.append(port)
            if len(ports) == 2:
                return ports[0], ports[1]
    raise CommandError("this machine has no two free ports between 20,000 and 55,000")


def fit_together(model: str) -> bool:
    """Whether two servers of ``model`` fit into this machine's memory (a CPU's, in float32)."""
    import psutil  # comes with SGLang, as requests do

    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    # 4 GiB: three processes with PyTorch in each, and the KV cache.
    return weights > 0 and 2 * (4 * 2**30 + 2 * weights) < psutil.virtual_memory().available


def busy_share(seconds: float = 2.0) -> float:
    """How much of this machine's CPU time is in use, from 0 to 1."""
    import psutil

    return float(psutil.cpu_percent(interval=seconds)) / 100
