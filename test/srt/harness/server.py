"""A real SGLang server in a subprocess, on the CPU reference platform."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sglang_gemma4_yoco
from harness import forked
from sglang_gemma4_reference import row_trace, tail_failures
from sglang_gemma4_reference.row_trace import Prefill
from sglang_gemma4_yoco import metrics, settings
from sglang_gemma4_yoco.commands.console import CommandError
from sglang_gemma4_yoco.commands.verify import servers

SWITCH = "SGLANG_GEMMA4_YOCO"
CHUNK = 128  # tokens per prefill forward
#: For a server's environment: the threshold is the default rule.
DEFAULT_THRESHOLD = {settings.name_of("min_skipped_rows"): None}

#: What a server replays with ``CAPTURED_GRAPHS`` and ``CAPTURED_ARGUMENTS``: its decode steps, and
#: the tails of batches with these row counts.
CAPTURED_ROWS = (1, 2, 4)
CAPTURED_GRAPHS = {
    "GEMMA4_CPU_GRAPHS": "decode",
    "SGLANG_GEMMA4_YOCO_GRAPH_ROWS": str(CAPTURED_ROWS[-1]),
}
CAPTURED_ARGUMENTS = ("--cuda-graph-bs-decode", *map(str, CAPTURED_ROWS))
#: With ``EXIT_GRAPHS`` and ``EXIT_ARGUMENTS`` also its prefills, for these numbers of rows.
EXIT_BUCKETS = (32, 64, CHUNK)
EXIT_GRAPHS = {
    **CAPTURED_GRAPHS,
    "GEMMA4_CPU_GRAPHS": "decode,prefill",
    settings.name_of("prefill_graphs"): "1",
}
EXIT_ARGUMENTS = (*CAPTURED_ARGUMENTS, "--cuda-graph-bs-prefill", *map(str, EXIT_BUCKETS))
#: The observers put hooks on the model, which the package would refuse.
_TRUST = settings.name_of("trust")
_OBSERVERS = (row_trace.__name__, tail_failures.__name__)
_ARGUMENTS = (
    *("--device", "cpu"),
    *("--dtype", "float32"),
    *("--max-total-tokens", "8192"),
    *("--chunked-prefill-size", str(CHUNK)),
    "--enable-mixed-chunk",  # decode steps and prefill in one forward
    "--sleep-on-idle",  # an idle scheduler would otherwise keep a core busy
)
_START_TIMEOUT = 540.0  # below the limit of a test, so that the log is shown
_STARTS = 3  # a free port may be taken before the server opens it
_PORT_TAKEN = ("address already in use", "port is already in use", " is not available in ")
_TAIL = 40  # log lines worth showing

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    what: str,
    seconds: float,
    explain: Callable[[], str] = lambda: "",
) -> T:
    """Return the first true value of ``condition()``.

    Args:
        condition: called about every 20 ms; an exception ends the waiting.
        what: the description of the condition, for the error.
        seconds: the timeout.
        explain: returns more text for the error.

    Raises:
        TimeoutError: the condition was not true in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s\n{explain()}")
        time.sleep(0.02)


class ServerDiedError(CommandError):
    """The server's first process has ended; the message has the end of its log."""


class Server(servers.Server):
    """A server as the commands start it, with the rows that its layers computed.

    Attributes:
        checkpoint: the checkpoint that it serves.
        failures: the file that sets how often its tail fails (``tail_failures``).
    """

    TIMEOUT = 300.0

    def __init__(
        self,
        checkpoint: Path,
        directory: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        spawned: bool = False,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(
            environment.get(SWITCH) != "0",
            ["--model-path", str(checkpoint), *_ARGUMENTS, *arguments],
            servers.find_free_ports(1)[0],
            directory / "server.log",
        )
        self.checkpoint = checkpoint
        self.failures = directory / "failures"
        self._trace = row_trace.Trace(directory / "rows.jsonl")
        self.env = {
            **environment,
            row_trace.VARIABLE: str(self._trace.path),
            tail_failures.VARIABLE: str(self.failures),
            _TRUST: ",".join([*filter(None, [environment.get(_TRUST)]), *_OBSERVERS]),
        }
        self._is_forked = not spawned and forked.as_this_process(self.env)
        self._starts = 0
        self._start_up = 0  # length of the log when the server was ready

    # -- life cycle --------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server, on another port than before."""
        if self._starts:  # the log of the start before is kept
            self.log_file.rename(self.log_file.with_suffix(f".{self._starts}.log"))
            self.port = servers.find_free_ports(1)[0]
        self._starts += 1
        if not self._is_forked:
            super().start()
            return
        where: Any = {"cwd": self.log_file.parent, "env": self.env, "log": self.log_file}
        self.process = forked.Program(self.command(), **where)

    def wait_until_ready(self, timeout: float = _START_TIMEOUT) -> None:
        """Return when /health answers 200.

        Raises:
            ServerDiedError: it has ended, and not because its port was taken.
            TimeoutError: it takes too long.
        """
        self.wait_until(self.is_healthy, "a healthy server", timeout)
        self._start_up = len(self.log())
        no_request = "a batch fell back before any request was sent"
        assert self.log_lines("falls back to stock: ") == [], no_request

    def wait_until(self, condition: Callable[[], T], what: str, seconds: float = TIMEOUT) -> T:
        """Call ``wait_until`` while the server lives; the log's end explains failures."""

        def alive() -> T:
            self._check_alive()
            return condition()

        return wait_until(alive, what, seconds, self._log_tail)

    def _check_alive(self) -> None:
        if self.process.poll() is None:
            return
        log = self.log().lower()
        if self._starts < _STARTS and any(words in log for words in _PORT_TAKEN):
            self.stop()
            self.start()
            return
        raise ServerDiedError(f"server exited with {self.process.returncode}:\n{self._log_tail()}")

    # -- log and forwards -------------------------------------------------------------------

    def log_lines(self, text: str) -> list[str]:
        """Return the log's lines that contain ``text``."""
        return [line for line in self.log().splitlines() if text in line]

    def log_since_ready(self) -> str:
        """Return the log without the start, where some releases report failed imports."""
        return self.log()[self._start_up :]

    def _log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-_TAIL:])

    def prefills(self, since: int = 0) -> list[Prefill]:
        """Return the prefill forwards so far, without the first ``since``."""
        return self._trace.prefills()[since:]

    def verifications(self) -> list[Prefill]:
        """Return the forwards so far that verified drafts."""
        return self._trace.verifications()

    def mark(self) -> int:
        """Return the number of prefill forwards so far, for ``prefills(since=...)``."""
        return len(self._trace.prefills())

    def wait_for_prefills(self, count: int, since: int) -> None:
        """Return once ``count`` prefill forwards ran after a mark."""
        self.wait_until(lambda: self.mark() >= since + count, f"{count} prefill forwards")

    # -- requests ---------------------------------------------------------------------------

    def resolved(self, argument: str) -> Any:
        """Return the scheduler's value of a server argument, which may differ from the given one.

        Assert that it is the same in all model processes.
        """
        first, *others = (s[argument] for s in self.get("/server_info")["internal_states"])
        for other in others:
            assert other == first, (argument, first, others)
        return first

    def reports(self) -> list[dict[str, Any]]:
        """Return what each scheduler says of the fast path in /server_info."""
        return [state[metrics.SERVER_INFO_ENTRY] for state in self.states()]

    def load(self) -> dict[str, int]:
        """Return how many requests are ``running`` and ``waiting``, by the scheduler's count."""
        found = {"running": 0, "waiting": 0}
        for load in self.get("/v1/loads")["loads"]:
            for name in found:
                found[name] += load[f"num_{name}_reqs"]
        return found

    def chat(self, **body: Any) -> Any:
        """Return /v1/chat/completions' JSON answer, or its list of chunks with ``stream=True``."""
        response = self.post("/v1/chat/completions", {"model": "default", **body})
        if not body.get("stream"):
            return response.json()
        lines = filter(None, response.text.splitlines())
        events = [line.removeprefix("data: ") for line in lines]
        assert events[-1] == "[DONE]", f"the stream breaks off: {events[-1]}"
        return [json.loads(event) for event in events[:-1]]


#: The fast path is on, and off.
Pair = tuple[Server, Server]


@contextmanager
def started(
    checkpoint: Path,
    directory: Path,
    *,
    switch: str | None,
    arguments: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    spawned: bool = False,
) -> Iterator[Server]:
    """Start a server of ``checkpoint``; it and all its children are dead after the block.

    Args:
        checkpoint: the checkpoint to serve.
        directory: the folder for its log and row trace; made if need be.
        switch: value of ``SGLANG_GEMMA4_YOCO``; None leaves it unset.
        arguments: further ones for the command line.
        env: variables that differ from this process's; None removes one.
        spawned: start its processes as a user's server does, which takes longer; see ``forked``.
    """
    changed = {
        "SGLANG_PLATFORM": "gemma4_cpu",
        # Its one-token requests would show up in the row trace.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "HF_HUB_OFFLINE": "1",
        SWITCH: switch,
        **(env or {}),
    }
    environment = dict(os.environ)
    for name, value in changed.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    server = Server(checkpoint, directory, arguments, environment, spawned=spawned)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def running(checkpoint: Path, directory: Path, **how: Any) -> Iterator[Server]:
    """Start a server, and wait until it is ready to serve."""
    with started(checkpoint, directory, **how) as server:
        server.wait_until_ready()
        yield server


@contextmanager
def pair(
    checkpoint: Path,
    directory: Path,
    *arguments: str,
    env: Mapping[str, str | None] | None = None,
    captured: bool = False,
    spawned: bool = False,
) -> Iterator[Pair]:
    """Run two servers with the same arguments: the fast path on (by default), and switched off.

    Args:
        spawned: as of ``started``; ``PYTHONPATH`` in ``env`` needs it.
        captured: the fast one replays its decode steps, and the tails of its prefills.
    """
    on: dict[str, Any] = {"arguments": arguments, "env": env or {}, "spawned": spawned}
    off = dict(on)
    if captured:
        on["arguments"] = [*arguments, *CAPTURED_ARGUMENTS]
        on["env"] = {**on["env"], **CAPTURED_GRAPHS}
    with (  # starting is mostly importing, so they start side by side
        started(checkpoint, directory / "on", switch=None, **on) as fast,
        started(checkpoint, directory / "off", switch="0", **off) as stock,
    ):
        fast.wait_until_ready()
        stock.wait_until_ready()
        yield fast, stock


def python_path(directory: Path) -> str:
    """Return a PYTHONPATH with ``directory`` in front."""
    return os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])


def changed_package(directory: Path, file: str, changes: Mapping[str, str]) -> str:
    """Return a PYTHONPATH with a copy of the package in which text of one file is changed."""
    package = Path(sglang_gemma4_yoco.__file__).parent
    copy = directory / package.name
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = (copy / file).read_text()
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (copy / file).write_text(source)
    return python_path(directory)


def stand_in_for_sglang(directory: Path, program: str) -> Path:
    """Make a folder for PYTHONPATH in which ``sglang.launch_server`` is this program."""
    package = directory / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(textwrap.dedent(program))
    return directory
