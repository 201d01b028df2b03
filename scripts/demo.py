#!/usr/bin/env python3
"""Does SGLang answer sooner with this package, and does it give the same answers?

``python3 scripts/demo.py`` needs Python 3.10 or later and 12 GB of disk, nothing else. It

1. makes a virtual environment with SGLang and this package (about 10 GB, once),
2. makes a small random Gemma 4 with E2B's proportions (unless ``--model`` names a real one),
3. serves it twice with the unchanged ``python -m sglang.launch_server``: stock
   (``SGLANG_GEMMA4_YOCO=0``) and with fast prefill (``SGLANG_GEMMA4_YOCO=1``),
4. asks both the same questions, one request at a time, and compares tokens and log-probabilities,
5. measures the time to first token of prompts that no server has seen before.

Without a GPU the two servers stand side by side and take turns, so that a busy machine disturbs
both alike. On a GPU two servers of one model may not fit, so they run one after the other there.

Output, for people::

    answers, whether they agree, and a table of times

and, as the last line of stdout, for programs, one JSON document::

    {"model": str, "device": str, "sglang": str, "prompt_tokens": int, "active": bool,
     "answers_equal": bool | null, "max_logprob_diff": float | null, "ttft_off_s": float | null,
     "ttft_on_s": float | null, "ratio": float | null, "repeats": int}

``active`` is read from the servers' logs: true if the fast path ran in the one server and not in
the other. If it is false nothing was measured, and what was not measured is null.

Exit status: 0 if it was active and the answers agree; 1 if not; 2 if the demo could not run (one
message on stderr, no JSON). Answers agree if all tokens are equal and all log-probabilities within
1e-3. That is asked of float32, which is what runs on a CPU; on a GPU, in bfloat16, other kernels
round differently, so there a difference is told and is no failure.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import math
import os
import random
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from environment import (
    REFERENCE,
    REPO,
    SGLANG_VERSION,
    SetupError,
    gpu_name,
    heading,
    prepare_environment,
    probe,
    run_logged,
    say,
    tail,
)

SWITCH = "SGLANG_GEMMA4_YOCO"
LOG_MARK = "Gemma 4 fast prefill"
ACTIVE_MARK = f"{LOG_MARK} is active: "
LOGPROB_TOLERANCE = 1e-3
ANSWER_TOKENS = 12
QUESTIONS = (
    "What is the capital of France?",
    "Name three prime numbers and say why they are prime.",
    "A train leaves at noon and travels 240 km at 80 km/h. "
    "Then it waits for half an hour and returns at 120 km/h. When is it back?",
)

# ---------------------------------------------------------------- the environment


def bootstrap(args: argparse.Namespace, argv: Sequence[str]) -> NoReturn:
    """Continue inside the demo's own virtual environment."""
    heading("Virtual environment")
    log: Path = args.work_dir / "install.log"
    log.write_text("")
    python, device = prepare_environment(
        args.venv, log, sglang_version=args.sglang_version, device=args.device
    )
    say(f"Complete: {python.parent.parent}")
    command = [str(python), str(Path(__file__).resolve()), *argv, "--no-venv", "--device", device]
    os.execv(command[0], command)


def check_environment(args: argparse.Namespace) -> tuple[str, str]:
    """Return SGLang's version and the device's name, or say what this interpreter lacks."""
    found = probe(sys.executable)
    missing = [] if found["sglang"] else ["sglang"]
    if not found["plugin"]:
        missing.append(f"this package (pip install {REPO})")
    name = None if args.device == "cpu" else gpu_name(sys.executable) if found["sglang"] else None
    if args.device == "cuda" and name is None and found["sglang"]:
        raise SetupError("PyTorch sees no GPU: check the driver with nvidia-smi, or --device cpu.")
    if name is None and not found["reference"]:
        missing.append(f"the CPU platform (pip install {REFERENCE})")
    if missing:
        raise SetupError(
            f"{sys.executable} lacks {', '.join(missing)}. Install that, or run without --no-venv."
        )
    say(f"SGLang {found['sglang']}, device {name or 'cpu'}, plugin {found['plugin_path']}")
    return str(found["sglang"]), name or "cpu"


# ---------------------------------------------------------------- the model


def make_checkpoint(preset: str, work_dir: Path, log: Path) -> Path:
    """Write a random checkpoint, or find the one that an earlier run wrote."""
    maker = REFERENCE / "sglang_gemma4_reference" / "checkpoint.py"
    digest = hashlib.sha256(maker.read_bytes()).hexdigest()[:8]
    path = work_dir / f"{preset}-{digest}"
    if path.exists():
        say(f"Random checkpoint of an earlier run: {path}")
        return path
    say(f"Making a random checkpoint, {preset}: {path}")
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    # By path: on a GPU machine the reference distribution is not installed, as it is a platform.
    env = os.environ | {"PYTHONPATH": str(REFERENCE)}
    command = [sys.executable, "-m", "sglang_gemma4_reference.checkpoint", preset]
    try:
        if not run_logged([*command, partial], log, env):
            raise SetupError("the checkpoint could not be made; its log says why.", log)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def find_model(model: str) -> str:
    """Check a local path; leave the name of a model on the Hugging Face hub to SGLang."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise SetupError(f"--model {model} has no config.json: name a checkpoint's directory.")
        return str(path.resolve())
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise SetupError(
            f"--model {model}: there is no such directory. Name a directory with a checkpoint or "
            "a model on the Hugging Face hub (google/gemma-4-E2B-it), or leave --model out."
        )
    return model


@dataclass(frozen=True)
class Prompts:
    """What the servers are asked, as token ids."""

    questions: list[list[int]]
    words: list[int]
    """Token ids that random prompts are made of: no special tokens, no image placeholders."""

    @classmethod
    def of(cls, model: str) -> Prompts:
        """Prepare the prompts with the model's own tokenizer and chat template."""
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as failure:
            raise SetupError(
                f"--model {model}: no tokenizer could be loaded ({failure}). For a gated model "
                "accept its terms on its page, then `hf auth login` or set HF_TOKEN."
            ) from failure
        questions = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_dict=False,
            )
            for question in QUESTIONS
        ]
        vocabulary = len(tokenizer)
        # The middle of the vocabulary: Gemma keeps its special tokens at both ends.
        return cls(questions, list(range(vocabulary // 2, vocabulary * 9 // 10)))

    def random(self, length: int, seed: int) -> list[int]:
        """A prompt that shares no prefix with that of another seed."""
        return random.Random(seed).choices(self.words, k=length)


# ---------------------------------------------------------------- the servers


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and their log-probabilities."""

    text: str
    ids: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, reply: dict[str, Any]) -> Answer:
        """Read SGLang's reply to /generate."""
        pairs = reply["meta_info"]["output_token_logprobs"]
        # JSON has no NaN: it arrives as null.
        logprobs = [math.nan if pair[0] is None else pair[0] for pair in pairs]
        return cls(reply["text"], [pair[1] for pair in pairs], logprobs)


@dataclass
class Server:
    """One ``sglang.launch_server`` with the plugin switched on or off, and what it was found to do.

    It leads a process group of its own, which is ended as a whole.
    """

    fast: bool
    command: list[str]
    port: int
    log: Path
    answers: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Times to first token."""
    _process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """How the tables call it."""
        return f"{SWITCH}=1 (fast prefill)" if self.fast else f"{SWITCH}=0 (stock)"

    @property
    def pid(self) -> int:
        """Of its first process, while it runs."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    @property
    def log_lines(self) -> list[str]:
        """What the plugin said in this server's log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if LOG_MARK in line]

    @property
    def active(self) -> bool:
        """Whether a prefill took the fast path, by the log."""
        return any(ACTIVE_MARK in line for line in self.log_lines)

    @contextmanager
    def started(self, env: dict[str, str]) -> Iterator[None]:
        """Start the server; end all of its processes on every way out."""
        env = env | {SWITCH: str(int(self.fast)), "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                self.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Away from the checkout, which would hide the installed package.
                cwd=self.log.parent,
                start_new_session=True,
            )
        try:
            yield
        finally:
            self._stop(self._process)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop it
        try:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
        finally:
            signal.signal(signal.SIGINT, previous)

    def wait_until_ready(self, timeout: float) -> None:
        """Return when the server answers requests."""
        began = told = time.monotonic()
        while True:
            self._check_alive()
            try:
                with self._open("/health", None, timeout=30):
                    return
            except (OSError, http.client.HTTPException):  # not listening yet, or still loading
                time.sleep(0.5)
            now = time.monotonic()
            if now - began > timeout:
                raise SetupError(
                    f"{self.name} was not ready after {timeout:.0f} s: give it longer with "
                    "--start-timeout.",
                    self.log,
                )
            if now - told > 30:
                told = now
                say(f"   still starting after {now - began:.0f} s")

    def _check_alive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise SetupError(
                f"{self.name} ended with status {self._process.returncode}. Its log says why: out "
                "of memory asks for a smaller model or --servers in-turn, an unknown model for "
                "another --model, a gated one for `hf auth login`.",
                self.log,
            )

    def _open(self, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        # No proxy, whatever the environment says: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(request, timeout=timeout)

    def _generate(self, ids: list[int], tokens: int, *, stream: bool) -> Iterator[dict[str, Any]]:
        """Yield the reply's parts as they arrive: one, or one per token."""
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens},
            "return_logprob": True,
            "stream": stream,
        }
        try:
            with self._open("/generate", body, timeout=1800) as response:
                for line in response:
                    text = line.decode().removeprefix("data: ").strip()
                    if text and text != "[DONE]":
                        reply = json.loads(text)
                        if "error" in reply:
                            raise SetupError(f"{self.name} refused a request: {reply['error']}")
                        yield reply
        except urllib.error.HTTPError as refusal:
            raise SetupError(
                f"{self.name} refused a prompt of {len(ids)} tokens: "
                f"{refusal.read().decode(errors='replace')}\n"
                "If it is too long, ask for fewer with --prompt-tokens."
            ) from refusal
        except (OSError, http.client.HTTPException) as failure:
            raise SetupError(
                f"{self.name} broke off a request ({failure!r}); its log says why.", self.log
            ) from failure

    def ask(self, ids: list[int]) -> Answer:
        """Generate greedily, and remember the answer."""
        (reply,) = self._generate(ids, ANSWER_TOKENS, stream=False)
        answer = Answer.of(reply)
        self.answers.append(answer)
        return answer

    def first_token(self, ids: list[int]) -> tuple[float, Answer]:
        """Stream one token; return the seconds from the request to its arrival, and the token."""
        began = time.perf_counter()
        parts = self._generate(ids, 1, stream=True)
        reply = next(parts)
        seconds = time.perf_counter() - began
        for _ in parts:  # one request at a time: the next waits for the end of this one
            pass
        cached = reply["meta_info"]["cached_tokens"]
        if cached:
            raise SetupError(
                f"{self.name} took {cached} of {len(ids)} tokens from a prefix cache, so its time "
                "says nothing: leave the cache off in --server-args."
            )
        return seconds, Answer.of(reply)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all of its processes have ended
        os.killpg(pid, number)


def choose_ports(first: int | None) -> tuple[int, int]:
    """Two ports: those asked for, if they are free, or any."""
    # Any: below 55,536, as SGLang 0.5.14 reserves the port that is 10,000 above a server's.
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
                raise SetupError(
                    f"port {port} cannot be used ({failure}): choose another with --port, or leave "
                    "it out to take any two that are free."
                ) from failure
            ports.append(port)
            if len(ports) == 2:
                return ports[0], ports[1]
    raise SetupError("this machine has no two free ports between 20,000 and 55,000")


def available_memory() -> int:
    """Bytes of memory that processes could still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def busy_share(seconds: float = 2.0) -> float:
    """How much of this machine's CPU time is in use, from 0 to 1."""

    def idle_and_all() -> tuple[int, int]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)

    idle, total = idle_and_all()
    time.sleep(seconds)
    idle_then, total_then = idle_and_all()
    return 1 - (idle_then - idle) / max(1, total_then - total)


def fit_together(model: str) -> bool:
    """Whether two servers of ``model`` fit into this machine's memory (a CPU's, in float32)."""
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    # 4 GiB: three processes with PyTorch in each, and the KV cache.
    return weights > 0 and 2 * (4 * 2**30 + 2 * weights) < available_memory()


# ---------------------------------------------------------------- the measurement


@dataclass(frozen=True)
class Times:
    """Some times in seconds, summed up."""

    median: float
    p20: float
    p80: float
    fastest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Sum up at least one time."""
        points = seconds if len(seconds) > 1 else [*seconds, *seconds]
        p20, _, _, p80 = statistics.quantiles(points, n=5, method="inclusive")
        return cls(statistics.median(seconds), p20, p80, min(seconds))


def measure(servers: Sequence[Server], prompts: Prompts, length: int, repeats: int) -> None:
    """Ask and time running servers, in turns, one request at a time."""
    for server in servers:
        say(f"Asking {server.name}")
        for ids in prompts.questions:
            server.ask(ids)
        check_switch(server)
        server.first_token(prompts.random(length, seed=-1))  # a first time is always slower
    busy = busy_share()
    if busy > 0.2:
        say(f"   {busy:.0%} of the CPUs is busy with other work: expect slow and scattered times")
    for repeat in range(repeats):
        ids = prompts.random(length, seed=repeat)
        spent = []
        # Who goes first alternates, or the same server would always meet the warmer caches.
        for server in servers if repeat % 2 == 0 else list(reversed(servers)):
            seconds, answer = server.first_token(ids)
            server.seconds.append(seconds)
            server.answers.append(answer)
            spent.append(f"{'fast' if server.fast else 'stock'} {seconds:.3f} s")
        say(f"   prompt {repeat + 1} of {repeats}: {', '.join(sorted(spent, reverse=True))}")


class WrongPathError(Exception):
    """A server did not do what its switch says."""


def check_switch(server: Server) -> None:
    """Raise unless the server's log shows what its switch promises."""
    if server.active == server.fast:
        return
    said = "\n".join(f"  | {line}" for line in server.log_lines) or "  | (nothing)"
    raise WrongPathError(
        f"{server.name}: the fast path was {'NOT ' if server.fast else ''}active.\n"
        f"The plugin's lines in {server.log}:\n{said}"
    )


def compare(stock: Sequence[Answer], fast: Sequence[Answer]) -> tuple[bool, float]:
    """Whether all tokens are equal, and the largest distance of two log-probabilities.

    Log-probabilities are compared as long as the tokens before them are the same.
    """
    equal, distance = True, 0.0
    for one, other in zip(stock, fast, strict=True):
        equal = equal and one.ids == other.ids
        for i, (mine, yours) in enumerate(zip(one.ids, other.ids, strict=False)):
            if mine != yours:
                break
            apart = abs(one.logprobs[i] - other.logprobs[i])
            # max() would drop a NaN, which is the worst distance of all.
            distance = max(distance, apart if math.isfinite(apart) else math.inf)
    return equal, distance


def show_answers(stock: Server, fast: Server) -> None:
    """Print the answers to the questions."""
    pairs = zip(QUESTIONS, stock.answers, fast.answers, strict=False)
    for question, one, other in pairs:
        say(f"Q: {question}")
        if one.ids == other.ids:
            say(f"   both:  {one.text!r}")
        else:
            say(f"   stock: {one.text!r}")
            say(f"   fast:  {other.text!r}")


def show_times(stock: Server, fast: Server, length: int) -> tuple[float, float]:
    """Print the table of times; return the two medians."""
    columns = ("median", "p20", "p80", "fastest")
    say("".join([f"{'':38}", *(f"{column:>10}" for column in columns)]))
    rows = [(server, Times.of(server.seconds)) for server in (stock, fast)]
    for server, times in rows:
        cells = (times.median, times.p20, times.p80, times.fastest)
        say("".join([f"{server.name:38}", *(f"{cell:>8.3f} s" for cell in cells)]))
    off, on = (times.median for _, times in rows)
    say(f"prompt tokens: {length}; prompts: {len(stock.seconds)}; stock / fast: {off / on:.2f}")
    return off, on


def show_evidence(servers: Sequence[Server]) -> None:
    """Print what the plugin said in the servers' logs."""
    for server in servers:
        say(f"{server.name}, {server.log}:")
        for line in server.log_lines or ["(no line about fast prefill)"]:
            say(f"  | {line}")


# ---------------------------------------------------------------- the whole


def build_servers(
    args: argparse.Namespace, model: str, device: str, logs: Path
) -> tuple[Server, Server]:
    """The stock server and the fast one, not started."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    # A prefix cache could answer a prompt without computing it.
    command += ["--device", "cpu" if device == "cpu" else "cuda", "--disable-radix-cache"]
    if device == "cpu":
        # An idle scheduler spins, and would take a core from the server that is measured.
        command += ["--sleep-on-idle"]
    command += shlex.split(args.server_args)
    stock, fast = (
        Server(
            fast=fast,
            command=[*command, "--host", "127.0.0.1", "--port", str(port)],
            port=port,
            log=logs / f"server-{'on' if fast else 'off'}.log",
        )
        for fast, port in zip((False, True), choose_ports(args.port), strict=True)
    )
    return stock, fast


def run_servers(
    args: argparse.Namespace, model: str, device: str, stock: Server, fast: Server
) -> None:
    """Start, ask, time and stop both servers, side by side or one after the other."""
    env = dict(os.environ)
    if device == "cpu":
        env["SGLANG_PLATFORM"] = "gemma4_cpu"
    together = args.servers == "together" or (
        args.servers == "auto" and device == "cpu" and fit_together(model)
    )
    say("Both servers at once." if together else "One server after the other.")
    prompts = None
    # Alone, the fast one goes first: if it is not active there is nothing to measure.
    for group in [[stock, fast]] if together else [[fast], [stock]]:
        with ExitStack() as stack:
            began = time.monotonic()
            for server in group:
                say(f"Starting {server.name} on port {server.port}")
                stack.enter_context(server.started(env))
            prompts = prompts or Prompts.of(model)
            for server in group:
                server.wait_until_ready(args.start_timeout)
            say(f"   ready after {time.monotonic() - began:.0f} s")
            measure(group, prompts, args.prompt_tokens, args.repeats)
            for server in group:
                check_switch(server)


def demo(args: argparse.Namespace) -> int:
    """Run the demo inside a complete environment; return the exit status."""
    heading("Environment")
    sglang, device = check_environment(args)
    logs: Path = args.work_dir / "logs" / time.strftime("%Y%m%d-%H%M%S")
    logs.mkdir(parents=True, exist_ok=True)
    say(f"Logs: {logs}")
    heading("Model")
    if args.model is None:
        model = str(make_checkpoint(args.preset, args.work_dir, logs / "checkpoint.log"))
    else:
        model = find_model(args.model)
        say(model)
    heading("Servers")
    result: dict[str, Any] = {
        "model": args.model or args.preset,
        "device": device,
        "sglang": sglang,
        "prompt_tokens": args.prompt_tokens,
        "active": False,
        "answers_equal": None,
        "max_logprob_diff": None,
        "ttft_off_s": None,
        "ttft_on_s": None,
        "ratio": None,
        "repeats": args.repeats,
    }
    stock, fast = build_servers(args, model, device, logs)
    try:
        run_servers(args, model, device, stock, fast)
    except WrongPathError as wrong:
        heading("FAST PREFILL DID NOT DO WHAT THE SWITCH SAYS: NOTHING WAS MEASURED")
        say(str(wrong))
        say(json.dumps(result))
        return 1
    agree = report(args, device, stock, fast, result)
    say(json.dumps(result))
    return 0 if agree else 1


def report(
    args: argparse.Namespace, device: str, stock: Server, fast: Server, result: dict[str, Any]
) -> bool:
    """Print what was found and put it into ``result``; whether the answers agree as they must."""
    heading("Was it active?")
    show_evidence([stock, fast])
    heading("Answers")
    if args.model is None:
        say("The weights are random, so the words mean nothing; that they are equal is the point.")
    show_answers(stock, fast)
    equal, distance = compare(stock.answers, fast.answers)
    agree = equal and distance <= LOGPROB_TOLERANCE
    say(
        f"{len(stock.answers)} answers (the first tokens after the timed prompts are among them): "
        f"tokens {'equal' if equal else 'NOT equal'}, "
        f"log-probabilities at most {distance:.2g} apart"
    )
    if device == "cpu" and not agree:
        say(f"THE ANSWERS DO NOT AGREE: float32 promises {LOGPROB_TOLERANCE:g}.")
    elif not agree:
        say("In bfloat16 other kernels round differently: tokens may differ where two are close.")
    heading("Time to first token")
    off, on = show_times(stock, fast, args.prompt_tokens)
    say()
    result |= {
        "active": True,
        "answers_equal": equal,
        "max_logprob_diff": distance if math.isfinite(distance) else None,
        "ttft_off_s": round(off, 6),
        "ttft_on_s": round(on, 6),
        "ratio": round(off / on, 4),
    }
    return agree or device != "cpu"


def positive(text: str) -> int:
    """An argparse type: an integer above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above zero")
    return number


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what is served and measured")
    what.add_argument(
        "--model",
        help="a checkpoint's directory or a model on the Hugging Face hub, such as "
        "google/gemma-4-E2B-it on a GPU (default: a small random one)",
    )
    what.add_argument(
        "--preset", default="E2B_MINI", help="which random checkpoint (default: %(default)s)"
    )
    what.add_argument(
        "--prompt-tokens",
        type=positive,
        default=2048,
        metavar="N",
        help="length of the timed prompts (default: %(default)s)",
    )
    what.add_argument(
        "--repeats",
        type=positive,
        default=5,
        metavar="N",
        help="timed prompts per server (default: %(default)s)",
    )
    how = parser.add_argument_group("how it is served")
    how.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: the GPU if PyTorch sees one",
    )
    how.add_argument(
        "--servers",
        choices=("auto", "together", "in-turn"),
        default="auto",
        help="side by side or one after the other (default: together on a CPU with the memory)",
    )
    how.add_argument(
        "--server-args",
        default="",
        metavar="'...'",
        help="more arguments for both servers, such as --server-args='--mem-fraction-static 0.6'",
    )
    how.add_argument(
        "--port",
        type=positive,
        help="serve on this port and the next (default: any two free ones)",
    )
    how.add_argument(
        "--start-timeout",
        type=positive,
        default=1800,
        metavar="SECONDS",
        help="how long a server may take to start, downloads included (default: %(default)s)",
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--venv",
        type=Path,
        default=REPO / ".venv",
        metavar="PATH",
        help="the virtual environment to make or reuse (default: %(default)s)",
    )
    where.add_argument(
        "--no-venv",
        action="store_true",
        help="use this interpreter's environment as it is; it must have everything",
    )
    where.add_argument(
        "--sglang-version",
        default=SGLANG_VERSION,
        metavar="VERSION",
        help="what to install (default: %(default)s)",
    )
    where.add_argument(
        "--work-dir",
        type=Path,
        default=REPO / ".demo",
        metavar="PATH",
        help="where logs and the random checkpoint go (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    args.venv = args.venv.expanduser().absolute()
    args.work_dir = args.work_dir.expanduser().absolute()
    return args


def main(argv: Sequence[str]) -> int:
    """Run the part of the demo that belongs to this interpreter."""
    args = parse(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _: sys.exit(128 + signum))
    try:
        if not sys.platform.startswith("linux") or sys.version_info < (3, 10):
            raise SetupError("SGLang runs on Linux, with Python 3.10 or later.")
        make_work_dir(args.work_dir)
        if not args.no_venv:
            bootstrap(args, argv)
        return demo(args)
    except SetupError as failure:
        if failure.log is not None:
            print(tail(failure.log), file=sys.stderr)
        print(f"error: {failure}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; all servers are stopped", file=sys.stderr)
        return 130


def make_work_dir(path: Path) -> None:
    """Make the directory for logs and checkpoint, and keep it out of version control."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".gitignore").write_text("*\n")
    except OSError as failure:
        raise SetupError(f"{path} cannot be written ({failure}): choose --work-dir.") from failure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
