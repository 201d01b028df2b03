"""Unchanged SGLang servers, stock and fast: started, asked, seen to do what their switch says.

Every server leads a process group of its own, which is ended as a whole on every way out.
Standard library only, so that a script can import it wherever Python runs.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_gemma4_yoco import report
from sglang_gemma4_yoco.commands.console import CommandError, say
from sglang_gemma4_yoco.settings import SWITCH

LOG_MARK = "Gemma 4 fast prefill"
ACTIVE_MARK = f"{LOG_MARK} is active: "
_WHY_NOT = ("steps aside", "is NOT installed")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command; while servers are being stopped they are waited out."""
# What loading/metrics.py adds to a scheduler's state; that module imports all of SGLang.
_STATE = "gemma4_yoco"
_REQUEST_TIMEOUT = 1800.0  # seconds
_BY_CHANCE = 2  # first tokens that a random prompt may share with one that was asked before it


class WrongPathError(Exception):
    """A server did not do what its switch says."""


@dataclass
class Server:
    """One ``sglang.launch_server`` with the switch on or off.

    Attributes:
        fast: what ``SGLANG_GEMMA4_YOCO`` is for it.
        command: starts it.
        port: on 127.0.0.1, the one that ``command`` names.
        log: everything that its processes print.
    """

    fast: bool
    command: list[str]
    port: int
    log: Path
    _process: subprocess.Popen[bytes] | None = None
    _before: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """How tables and messages call it."""
        return f"{SWITCH}=1 (fast prefill)" if self.fast else f"{SWITCH}=0 (stock)"

    @property
    def pid(self) -> int:
        """Of its first process, while it runs."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    # -- its life ----------------------------------------------------------------------------

    @contextmanager
    def started(self, env: Mapping[str, str]) -> Iterator[None]:
        """Start the server; end all of its processes on every way out."""
        env = {**env, SWITCH: str(int(self.fast)), "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                self.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Away from a checkout, which would hide the installed package.
                cwd=self.log.parent,
                start_new_session=True,
            )
        try:
            yield
        finally:
            self._stop(self._process)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
        try:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait_until_ready(self, timeout: float) -> None:
        """Return when the server answers requests.

        Raises:
            CommandError: it has ended, or is not ready after ``timeout`` seconds.
        """
        began = told = time.monotonic()
        while True:
            self._check_alive()
            try:
                with self._open("/health", None, timeout=30):
                    break
            except (OSError, http.client.HTTPException):  # not listening yet, or still loading
                time.sleep(0.5)
            now = time.monotonic()
            if now - began > timeout:
                raise CommandError(
                    f"{self.name} was not ready after {timeout:.0f} s: give it longer with "
                    "--start-timeout.",
                    self.log,
                )
            if now - told > 30:
                told = now
                say(f"   still starting after {now - began:.0f} s")
        # SGLang's own request at start is a prefill too, and proves nothing of those that follow.
        self._before = self._counted()

    def _check_alive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise CommandError(
                f"{self.name} ended with status {self._process.returncode}. Its log says why: out "
                "of memory asks for a smaller model or --servers in-turn, an unknown model for "
                "another one, a gated one for `hf auth login`.",
                self.log,
            )

    # -- asking it ---------------------------------------------------------------------------

    def _open(self, path: str, body: Any, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        # No proxy, whatever the environment says: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(request, timeout=timeout)

    def get(self, path: str) -> Any:
        """GET a JSON document; None where this release of SGLang has none there."""
        try:
            with self._open(path, None, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError:
            return None
        except (OSError, http.client.HTTPException) as failure:
            raise self._broke_off(failure) from failure

    def forget_prefixes(self) -> None:
        """Empty the prefix cache. SGLang refuses that while requests run."""
        for _ in range(100):
            try:
                with self._open("/flush_cache", {}, timeout=60):
                    return
            except urllib.error.HTTPError:  # the last request is still being put away
                time.sleep(0.1)
            except (OSError, http.client.HTTPException) as failure:
                raise self._broke_off(failure) from failure
        raise CommandError(f"{self.name} does not empty its prefix cache.", self.log)

    def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """SGLang's answer to one request to /generate.

        Raises:
            CommandError: the server refused it, or is gone.
        """
        (reply,) = self._parts({**body, "stream": False})
        return reply

    def first_token(self, ids: list[int]) -> tuple[float, dict[str, Any]]:
        """Stream one greedy token; the seconds from the request to its arrival, and the reply.

        Raises:
            CommandError: the server refused it, or a part of it that counts came from the prefix
                cache.
        """
        sampling = {"temperature": 0, "max_new_tokens": 1}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        began = time.perf_counter()
        parts = self._parts({**body, "stream": True})
        reply = next(parts)
        seconds = time.perf_counter() - began
        for _ in parts:  # one request at a time: the next waits for the end of this one
            pass
        cached = reply["meta_info"]["cached_tokens"]
        if cached > max(_BY_CHANCE, len(ids) // 32):
            raise CommandError(
                f"{self.name} took {cached} of {len(ids)} tokens from a prefix cache, so its time "
                "says nothing: turn the cache off with SGLang's --disable-radix-cache."
            )
        return seconds, reply

    def _parts(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The reply's parts as they arrive: one, or one per token."""
        try:
            with self._open("/generate", body, timeout=_REQUEST_TIMEOUT) as response:
                for line in response:
                    text = line.decode().removeprefix("data: ").strip()
                    if text and text != "[DONE]":
                        reply = json.loads(text)
                        if "error" in reply:
                            raise CommandError(f"{self.name} refused a request: {reply['error']}")
                        yield reply
        except urllib.error.HTTPError as refusal:
            said = " ".join(refusal.read().decode(errors="replace").split())
            raise CommandError(
                f"{self.name} refused a prompt of {_length(body)}: {said} "
                "(if it is too long, ask for fewer with --prompt-tokens)"
            ) from refusal
        except (OSError, http.client.HTTPException) as failure:
            raise self._broke_off(failure) from failure

    def _broke_off(self, failure: Exception) -> CommandError:
        return CommandError(
            f"{self.name} broke off a request ({failure!r}); its log says why.", self.log
        )

    # -- what it has done --------------------------------------------------------------------

    @property
    def log_lines(self) -> list[str]:
        """What the plugin said in this server's log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if LOG_MARK in line]

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
            for line in self.log_lines
            if any(words in line for words in _WHY_NOT)
        ]
        return list(dict.fromkeys([reason for reason in said if reason] + lines))


def check_switch(server: Server) -> Counter[str]:
    """What became of a running server's prefills since it was ready.

    Raises:
        WrongPathError: its fast path was active and its switch says no, or the other way round.
            That is read from the server's own counters, and of a stock one from its log as well.
    """
    forwards = server.forwards()
    active = not report.CUT.isdisjoint(forwards)
    if not server.fast:
        active = active or any(ACTIVE_MARK in line for line in server.log_lines)
    if active == server.fast:
        return forwards
    reasons = "; ".join(server.reasons() or forwards) or "it gives no reason"
    said = "\n".join(f"  | {line}" for line in server.log_lines) or "  | (nothing)"
    raise WrongPathError(
        f"{server.name}: the fast path was {'NOT ' if server.fast else ''}active"
        f"{f' ({reasons})' if server.fast else ''}.\n"
        f"Its prefills: {dict(forwards)}\n"
        f"The plugin's lines in {server.log}:\n{said}"
    )


def _length(body: Mapping[str, Any]) -> str:
    if "input_ids" in body:
        return f"{len(body['input_ids'])} tokens"
    return f"{len(body.get('text', ''))} characters"


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


def available_memory() -> int:
    """Bytes of memory that processes could still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def fit_together(model: str) -> bool:
    """Whether two servers of ``model`` fit into this machine's memory (a CPU's, in float32)."""
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    # 4 GiB: three processes with PyTorch in each, and the KV cache.
    return weights > 0 and 2 * (4 * 2**30 + 2 * weights) < available_memory()


def busy_share(seconds: float = 2.0) -> float:
    """How much of this machine's CPU time is in use, from 0 to 1."""

    def idle_and_all() -> tuple[int, int]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)

    idle, total = idle_and_all()
    time.sleep(seconds)
    idle_then, total_then = idle_and_all()
    return 1 - (idle_then - idle) / max(1, total_then - total)
