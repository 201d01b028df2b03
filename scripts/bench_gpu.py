#!/usr/bin/env python3
"""What does fast prefill gain on this GPU, what does it cost, and where does the time go?

Gemma 4 E2B or E4B at its real dimensions with random weights, so neither a network nor a checkpoint
is needed; bf16, Triton attention, no prefix cache, decode graphs on, the unchanged SGLang server.
Eight parts, each of which can run alone:

    a  30 prompts of 7000 tokens in and 10 out: duration, time to first token, tokens per second
    b  8192 in and 150 out, 8 and 32 at a time: the same
    c  one prefill of 16 to 32768 tokens against the ceiling, and what the host does in it
       (``bench_prefill.py``)
    d  peak memory of a prefill
    e  inter-token latency of running requests while long prompts arrive
    f  a profile of one prefill of 16 to 8192 tokens: time of host and device, how long the device
       waited, how many kernels were launched, and the ten largest
    g  greedy tokens, and how far logits are apart
    h  prefills of 16 to 8192 tokens that SGLang replays from CUDA graphs: do they give the answers
       of the eager ones; then stock and the package, each eager and replayed, in turns, beside
       predicted times. SGLang cannot capture these prefills without the package, which repairs that

"off" is ``SGLANG_GEMMA4_YOCO=0``, "on" is ``1``; they take turns. ``sglang.benchmark.serving``
sends the loads. The servers' counters and the rows that the layers computed prove that "on" was on
and "off" was off; without that proof nothing is reported.

Output contract: tables for people on stdout, one JSON document in
``benchmark/results/gpu_DEVICE_MODEL_sglang-VERSION.json``, and its path as the last line. Every
measurement is written at once. A later run with the same commit and settings goes on where the
earlier one ended, so a part that did not fit into ``--minutes`` is finished by the same command;
the exit status is then 3.

    python scripts/bench_gpu.py --preset E2B                  # all parts
    python scripts/bench_gpu.py --preset E4B --parts c f
    python scripts/bench_gpu.py --preset tiny --device cpu    # the script itself, without a GPU

Needs an environment with SGLang, this package and ``test/reference``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import shlex
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

import bench_prefill
from bench_prefill import OFF_REPLAYED, ON_REPLAYED, NotActiveError, switched
from environment import (
    REPO,
    SetupError,
    command_line,
    commit,
    failed,
    heading,
    hide_servers_secrets,
    say,
    write_whole,
)
from sglang_gemma4_reference.engine import settings_changed
from sglang_gemma4_yoco.commands.compare import Times
from sglang_gemma4_yoco.commands.redact import redact_flags
from sglang_gemma4_yoco.commands.servers import (
    Server,
    WrongPathError,
    check_switch,
    pair,
    running,
)

WAYS = ("off", "on")
PRESETS = {"tiny": "E2B_TINY", "mini": "E2B_MINI", "e2b": "E2B", "e4b": "E4B"}
OUT_OF_TIME = 3
START_LIMIT = 420.0  # seconds


@dataclass(frozen=True)
class Requests:
    """A number of equal requests.

    Attributes:
        concurrency: how many of them are sent at a time; None for all.
    """

    prompts: int
    tokens_in: int
    tokens_out: int
    concurrency: int | None = None


@dataclass(frozen=True)
class Workload:
    """What the parts do; lengths are in tokens, and a field's comment names its parts."""

    published: Requests  # a
    concurrent: tuple[Requests, ...]  # b
    repeats: int  # a and b: how often each server gets the load
    lengths: tuple[int, ...]  # c
    prefill_repeats: int  # c: forwards per length and way
    memory: tuple[int, ...]  # d
    running: Requests  # e: the requests whose latency is measured
    arriving: int  # e: length of the prompts that arrive meanwhile
    interval: float  # e: seconds from one such prompt to the next
    profiled: tuple[int, ...]  # f
    answers: Requests  # g: prompts to continue greedily
    replayed: tuple[int, ...]  # h: lengths that SGLang captures, so that no row is padding
    replayed_repeats: int  # h: forwards per length and way
    pool: int  # tokens that the KV pool of each server must hold


FULL = Workload(
    published=Requests(30, 7000, 10),
    concurrent=(Requests(32, 8192, 150, 8), Requests(64, 8192, 150, 32)),
    repeats=3,
    lengths=(16, 32, 64, 128, 256, 512, 1024, 2048, 8192, 32768),
    prefill_repeats=7,
    memory=(512, 8192, 32768),
    running=Requests(8, 64, 600, 8),
    arriving=8192,
    interval=0.5,
    profiled=(16, 128, 512, 2048, 8192),
    answers=Requests(30, 2000, 10),
    replayed=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    replayed_repeats=9,
    pool=280_000,
)
# For a CPU and the smallest model: every line of the script runs, and no figure means anything.
TINY = Workload(
    published=Requests(3, 60, 3),
    concurrent=(Requests(3, 70, 3, 2),),
    repeats=1,
    lengths=(8, 40),
    prefill_repeats=1,
    memory=(40,),
    running=Requests(2, 8, 12, 2),
    arriving=60,
    interval=0.1,
    profiled=(40,),
    answers=Requests(2, 30, 3),
    replayed=(32, 40),
    replayed_repeats=1,
    pool=2048,
)


#: The ways of part h, in the order of their columns.
FOUR_WAYS = ("off", OFF_REPLAYED, "on", ON_REPLAYED)
#: Milliseconds to the logits of one prompt on an H100, by model, length and way: predictions, the
#: longer of two estimates. The host needs 0.35 ms for each eager layer and 2.65 ms around them,
#: 0.015 ms for each replayed segment, 0.10 ms for each attention between two of them, 0.3 ms to
#: fill SGLang's inputs and 0.3 ms to plan the tail. The device runs matrix products at 60 % of its
#: peak or at memory bandwidth, after what the host has done before it.
PREDICTED_MS = {
    model: {length: dict(zip(FOUR_WAYS, ms, strict=True)) for length, *ms in rows}
    for model, rows in {
        "E2B": (
            (32, 14.9, 7.0, 10.0, 6.9),
            (128, 14.9, 7.0, 10.0, 6.9),
            (512, 14.9, 9.7, 10.0, 7.2),
            (2048, 25.3, 25.9, 11.8, 12.6),
            (8192, 114.0, 114.0, 38.4, 39.5),
        ),
        "E4B": (
            (32, 17.5, 8.1, 13.5, 8.3),
            (128, 17.5, 8.6, 13.5, 8.6),
            (512, 17.5, 14.5, 13.5, 11.9),
            (2048, 43.7, 43.9, 27.3, 28.2),
            (8192, 186.0, 185.0, 101.7, 102.9),
        ),
    }.items()
}
# Of bf16: a wrong row, key or weight is off by far more.
LEAST_COSINE = 0.9999
LARGEST_CACHE_ERROR = 0.02


class OutOfTimeError(Exception):
    """``--minutes`` are over; what was measured is written."""


class Results:
    """The result file, rewritten after every measurement."""

    def __init__(self, path: Path, header: dict[str, Any], commit: str) -> None:
        self.path = path
        self._commit = commit
        self._document: dict[str, Any] = {"parts": {}}
        with suppress(FileNotFoundError):
            self._document = json.loads(path.read_text())
        self._document = {**header, "parts": self._document["parts"]}

    def steps(self, part: str) -> dict[str, Any]:
        """The measurements of one part, by name."""
        steps: dict[str, Any] = self._document["parts"][part]["steps"]
        return steps

    def begin(self, part: str, title: str, settings: dict[str, Any]) -> None:
        """Keep a part's measurements if they are of this commit and of these settings."""
        now = {
            "title": title,
            "commit": self._commit,
            "settings": json.loads(json.dumps(settings)),
            "command": hide_servers_secrets(["python", *sys.argv]),
        }
        before = self._document["parts"].get(part, {})
        same = all(before.get(key) == now[key] for key in ("commit", "settings"))
        self._document["parts"][part] = {
            **now,
            "steps": before["steps"] if same else {},
            "summary": None,
        }

    def add(self, part: str, step: str, measured: Any) -> None:
        """Write one measurement."""
        self._document["parts"][part]["steps"][step] = measured
        self._write()

    def finish(self, part: str, summary: Any) -> None:
        """Write what a complete part amounts to."""
        self._document["parts"][part]["summary"] = summary
        self._write()

    def _write(self) -> None:
        write_whole(self.path, json.dumps(self._document, indent=1) + "\n")


# ---------------------------------------------------------------- what the parts run on


class Machine:
    """The two servers or the one engine, started when first asked for; never both at once."""

    def __init__(self, args: argparse.Namespace, device: str, directory: Path) -> None:
        from sglang_gemma4_reference.checkpoint import PRESETS as SHAPES
        from sglang_gemma4_reference.checkpoint import write_checkpoint

        self.device = device
        self.workload = TINY if args.preset == "tiny" else FULL
        self._args = args
        self._directory = directory
        self.preset = PRESETS[args.preset]
        self._stack = ExitStack()
        self._servers: dict[str, Server] = {}
        self._engine: Any = None
        self._captured: tuple[int, ...] = ()
        #: Why SGLang cannot capture the prefills of part h, once it has failed.
        self.unrecordable: str | None = None
        self.checkpoint = directory / self.preset
        write_checkpoint(self.checkpoint, SHAPES[self.preset], weights=False)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def servers(self) -> dict[str, Server]:
        """Both servers, ready: ``off`` and ``on``."""
        if not self._servers:
            arguments = f"--model-path {self.checkpoint} --load-format dummy --disable-radix-cache"
            arguments += f" --attention-backend triton --max-total-tokens {self.workload.pool}"
            arguments += " --dtype bfloat16" if self.device == "cuda" else ""
            arguments += f" {self._args.server_args}"
            both = pair(shlex.split(arguments), self._directory, device=self.device)
            started = running(both, START_LIMIT, one_by_one=self.device == "cuda")
            self._stack.enter_context(started)
            self._servers = dict(zip(WAYS, both, strict=True))
        return self._servers

    def engine(self, captured: tuple[int, ...] = ()) -> Any:
        """The model on SGLang's ModelRunner in this process.

        Args:
            captured: lengths of the prefills that SGLang captures.
        """
        import torch

        if self._engine is None or self._captured != captured:
            self._stack.close()  # the servers' memory is needed, and that of the last engine
            self._servers, self._engine = {}, None
            gc.collect()
            torch.cuda.empty_cache()  # does nothing on a CPU
            work = self.workload
            longest = max(*work.lengths, *work.memory, *work.profiled, work.answers.tokens_in)
            rows = max(captured, default=longest)
            self._engine = bench_prefill.build_engine(
                self.preset, self.device, self._directory, rows, graphs=True, prefills=captured
            )
            self._captured = captured
            try:
                bench_prefill.capture(self._engine)
            except NotActiveError as eager:  # measured all the same; each point names its path
                say(str(eager))
        return self._engine


def one_prompt(length: int) -> bench_prefill.Load:
    """A prefill of one prompt."""
    return bench_prefill.Load(length, batch_size=1)


def random_prompt(engine: Any, length: int) -> Any:
    """A scheduled batch of one prompt."""
    vocabulary = engine.text_model.config.vocab_size
    return engine.schedule(bench_prefill.prompts(one_prompt(length), vocabulary))


def assert_path(engine: Any, batch: Any, length: int) -> None:
    """Raise ``NotActiveError`` unless a prefill of ``batch`` takes the fast path."""
    from sglang_gemma4_yoco import log

    path, _ = bench_prefill.path_taken(engine, batch, one_prompt(length))
    if path not in (log.TAIL_EAGER, log.TAIL_CAPTURED):
        raise NotActiveError(f"{length} tokens: {path}")


def in_turns(repeats: int) -> list[tuple[str, int]]:
    """(way, repeat) with off and on in turns; who goes first alternates."""
    return [
        (way, repeat)
        for repeat in range(repeats)
        for way in (WAYS if repeat % 2 == 0 else reversed(WAYS))
    ]


# ---------------------------------------------------------------- the parts

Step = Callable[[Machine], Any]


@dataclass(frozen=True)
class Part:
    """One question.

    Attributes:
        title: what it measures.
        settings: the fields of ``Workload`` that it uses.
        steps: its measurements, by name, in their order.
        summary: what they amount to.
        on_servers: whether it runs on the servers, or else on the engine.
    """

    title: str
    settings: tuple[str, ...]
    steps: Callable[[Workload], dict[str, Step]]
    summary: Callable[[dict[str, Any]], Any]
    on_servers: bool = False


def send(server: Server, load: Requests) -> dict[str, Any]:
    """Send a load by ``sglang.benchmark.serving``; return its own result."""
    from sglang.benchmark import serving

    details = server.log_file.with_suffix(".jsonl")
    command = "serving --backend sglang --host 127.0.0.1 --dataset-name random-ids"
    command += " --tokenize-prompt --random-range-ratio 1 --output-details --disable-tqdm"
    command += f" --port {server.port} --num-prompts {load.prompts} --output-file {details}"
    command += f" --random-input-len {load.tokens_in} --random-output-len {load.tokens_out}"
    if load.concurrency is not None:
        command += f" --max-concurrency {load.concurrency}"
    details.unlink(missing_ok=True)
    with mock.patch.object(sys, "argv", command.split()):
        serving.cli_main()
    result: dict[str, Any] = json.loads(details.read_text().splitlines()[-1])
    errors = [error for error in result["errors"] if error]
    if errors or result["completed"] != load.prompts:
        raise SetupError(
            f"{server.name}: {result['completed']} answers, {errors[:1]}", server.log_file
        )
    check_switch(server)
    return result


_KEPT = ("duration", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "total_throughput")


def load_steps(loads: str, work: Workload) -> dict[str, Step]:
    """Parts a and b: each of these loads to both servers in turns."""
    chosen = getattr(work, loads)
    return {
        f"{load.tokens_in}/{load.tokens_out} at {load.concurrency or 'once'}, {way} {n}": partial(
            one_load, way=way, load=load
        )
        for load in (chosen if isinstance(chosen, tuple) else [chosen])
        for way, n in in_turns(work.repeats)
    }


def one_load(machine: Machine, way: str, load: Requests) -> dict[str, Any]:
    """What one server makes of a load."""
    result = send(machine.servers()[way], load)
    return {"way": way, "load": asdict(load)} | {key: result[key] for key in _KEPT}


def summarise_loads(steps: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians over the repeats of each load, and their ratios."""
    by_load: dict[str, dict[str, list[Any]]] = defaultdict(lambda: {way: [] for way in WAYS})
    for step in steps.values():
        by_load[json.dumps(step["load"])][step["way"]].append(step)
    rows = []
    for load, found in by_load.items():
        off, on = (
            {key: statistics.median(step[key] for step in found[way]) for key in _KEPT}
            for way in WAYS
        )
        rows.append(
            {
                "load": json.loads(load),
                "off": off,
                "on": on,
                "duration_ratio": off["duration"] / on["duration"],
                "ttft_ratio": off["median_ttft_ms"] / on["median_ttft_ms"],
                "throughput_ratio": on["total_throughput"] / off["total_throughput"],
            }
        )
    return rows


def prefill_steps(work: Workload) -> dict[str, Step]:
    """Part c: one length each, off, on and front-only."""

    def step(machine: Machine, length: int) -> dict[str, Any]:
        measured = bench_prefill.measure(machine.engine(), one_prompt(length), work.prefill_repeats)
        return asdict(measured)

    return {f"{length} tokens": partial(step, length=length) for length in work.lengths}


def one_prefill(
    measure: Callable[[Machine, Any, Any], dict[str, Any]], lengths: str, work: Workload
) -> dict[str, Step]:
    """What ``measure`` finds about a prefill, with its engine and batch; a step per length and way.

    ``measure`` runs with the switch set, after the path was seen to be taken.
    """

    def step(machine: Machine, length: int, way: str) -> dict[str, Any]:
        engine = machine.engine()
        batch = random_prompt(engine, length)
        assert_path(engine, batch, length)
        with switched(way):
            return {"length": length, "way": way} | measure(machine, engine, batch)

    return {
        f"{length} tokens, {way}": partial(step, length=length, way=way)
        for length in getattr(work, lengths)
        for way in WAYS
    }


def peak_memory(machine: Machine, engine: Any, batch: Any) -> dict[str, int]:
    """Part d: memory that a second prefill takes at its peak beyond what is in use before it.

    0 on a CPU, where PyTorch does not count it.
    """
    import torch

    engine.forward(batch)
    if machine.device == "cpu":
        return {"peak_bytes": 0}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.forward(batch)
    torch.cuda.synchronize()
    return {"peak_bytes": torch.cuda.max_memory_allocated() - before}


def by_length(steps: dict[str, Any]) -> list[dict[str, Any]]:
    """Steps of one length and two ways, as one row per length."""
    rows: dict[int, dict[str, Any]] = {}
    for step in steps.values():
        row = rows.setdefault(step["length"], {"length": step["length"]})
        row[step["way"]] = {k: v for k, v in step.items() if k not in ("length", "way")}
    return list(rows.values())


def latency_steps(_: Workload) -> dict[str, Step]:
    """Part e: the running requests' latency without long prompts arriving, and with them."""
    return {
        f"{'long prompts arriving' if arriving else 'undisturbed'}, {way}": partial(
            latency, way=way, arriving=arriving
        )
        for arriving in (False, True)
        for way in WAYS
    }


def latency(machine: Machine, way: str, arriving: bool) -> dict[str, Any]:
    """Percentiles of the time from one token of a running request to its next."""
    import numpy

    server, work = machine.servers()[way], machine.workload
    with ExitStack() as span:
        sent = span.enter_context(arrivals(server, work)) if arriving else []
        result = send(server, work.running)
    itls = [seconds for request in result["itls"] for seconds in request]
    points = (50, 95, 99)
    return {
        "way": way,
        "arriving": arriving,
        "long_prompts": len(sent),
        **{f"p{p}_ms": float(numpy.percentile(itls, p)) * 1e3 for p in points},
        "duration": result["duration"],
    }


@contextmanager
def arrivals(server: Server, work: Workload) -> Iterator[list[Future[Any]]]:
    """Long prompts of one new token each, sent at fixed times whatever became of the others."""
    over, draw = threading.Event(), random.Random(0)
    sent: list[Future[Any]] = []
    sampling = {"temperature": 0, "max_new_tokens": 1}

    def keep_sending() -> None:
        while not (sent and over.wait(work.interval)):
            ids = [draw.randrange(300, 500) for _ in range(work.arriving)]
            sent.append(clients.submit(server.generate, input_ids=ids, sampling_params=sampling))

    with ThreadPoolExecutor(1000) as clients:
        sender = clients.submit(keep_sending)
        try:
            yield sent
        finally:
            over.set()
            sender.result()
    for answer in sent:
        answer.result()


def summarise_latency(steps: dict[str, Any]) -> list[dict[str, Any]]:
    """One row without and one with arriving prompts."""
    return [
        {
            "arriving": arriving,
            **{
                step["way"]: {k: step[k] for k in ("p50_ms", "p95_ms", "p99_ms", "long_prompts")}
                for step in steps.values()
                if step["arriving"] == arriving
            },
        }
        for arriving in (False, True)
    ]


def profile(machine: Machine, engine: Any, batch: Any) -> dict[str, Any]:
    """Part f: where the time of one prefill goes.

    Host and whole time are of forwards without the profiler, which slows the host down; the
    device's are of one forward with it.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    synchronize = bench_prefill.synchronizer(engine)
    host, whole = [], []
    for _ in range(6):
        synchronize()
        began = time.perf_counter()
        engine.forward(batch)
        host.append(time.perf_counter() - began)
        synchronize()
        whole.append(time.perf_counter() - began)
    activities = [ProfilerActivity.CPU]
    if machine.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profiler(activities=activities) as trace:
        engine.forward(batch)
        synchronize()
    return {
        # The first forward warms up.
        "host_ms": statistics.median(host[1:]) * 1e3,
        "whole_ms": statistics.median(whole[1:]) * 1e3,
        **device_time(kernels(trace, machine.device)),
    }


Kernel = tuple[str, float, float]  # its name, beginning and end in microseconds


def kernels(trace: Any, device: str) -> list[Kernel]:
    """What ran on the device; on a CPU the innermost operations stand in for kernels."""
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type.name == device.upper()
        and not (device == "cpu" and event.cpu_children)
        # A named range of the host is mirrored on the device's time line, and is no work.
        and not event.is_user_annotation
    ]


def device_time(ran: Sequence[Kernel]) -> dict[str, Any]:
    """Busy and idle time between the first kernel's begin and the last one's end.

    The device is idle when it has nothing queued: it waits for the host.

    >>> found = device_time([("gemm", 0, 30), ("norm", 20, 40), ("gemm", 60, 100)])
    >>> found["device_busy_ms"], found["device_idle_ms"], found["kernels"]
    (0.08, 0.02, 3)
    >>> found["largest"][0]
    {'kernel': 'gemm', 'calls': 2, 'ms': 0.07}
    """
    busy, until = 0.0, float("-inf")
    for _, begin, end in sorted(ran, key=lambda kernel: kernel[1]):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    span = until - min(begin for _, begin, _ in ran)
    totals: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in ran:
        totals[name].append(end - begin)
    largest = sorted(totals.items(), key=lambda item: -sum(item[1]))[:10]
    return {
        "device_busy_ms": busy / 1e3,
        "device_idle_ms": (span - busy) / 1e3,
        "kernels": len(ran),
        "largest": [
            {"kernel": name[:120], "calls": len(times), "ms": sum(times) / 1e3}
            for name, times in largest
        ],
    }


def answer_steps(work: Workload) -> dict[str, Step]:
    """Part g: one prompt each, both ways."""
    return {f"prompt {n}": partial(answers_to, number=n) for n in range(work.answers.prompts)}


def answers_to(machine: Machine, number: int) -> dict[str, Any]:
    """Tokens both ways, and how far the first one's logits are apart."""
    engine, work = machine.engine(), machine.workload.answers
    length = work.tokens_in + number  # not all of one length
    assert_path(engine, random_prompt(engine, length), length)
    tokens, logits = {}, {}
    for way in WAYS:
        batch = random_prompt(engine, length)
        with switched(way):
            tokens[way], logits[way] = greedy(engine, batch, work.tokens_out)
    bench_prefill.must_have_spread(logits["off"])
    differences = (logits["on"] - logits["off"]).abs()
    best = logits["off"].topk(2).values
    return {
        "length": length,
        "tokens": tokens,
        "mean_difference": float(differences.mean()),
        "p99_difference": float(differences.quantile(0.99)),
        "max_difference": float(differences.max()),
        "logit_spread": float(logits["off"].std()),
        "margin": float(best[0] - best[1]),
    }


def greedy(engine: Any, batch: Any, count: int) -> tuple[list[int], Any]:
    """``count`` greedy tokens, and the first one's logits in fp32 on the host."""
    output = engine.forward(batch).next_token_logits
    first = output[0].float().cpu()
    tokens = [int(output[0].argmax())]
    while len(tokens) < count:
        tokens.append(int(engine.decode(batch, tokens[-1:]).next_token_logits[0].argmax()))
    return tokens, first


def summarise_answers(steps: dict[str, Any]) -> dict[str, Any]:
    """Shares of equal answers, and the distribution of logit differences over the prompts."""
    rows = list(steps.values())
    return {
        "prompts": len(rows),
        "same_first_token": sum(r["tokens"]["on"][0] == r["tokens"]["off"][0] for r in rows),
        "same_answer": sum(r["tokens"]["on"] == r["tokens"]["off"] for r in rows),
        "tokens_each": len(rows[0]["tokens"]["on"]),
        "mean_difference": statistics.mean(r["mean_difference"] for r in rows),
        "p99_difference": statistics.median(r["p99_difference"] for r in rows),
        "max_difference": max(r["max_difference"] for r in rows),
        "logit_spread": statistics.mean(r["logit_spread"] for r in rows),
    }


def engine_with_prefill_graphs(machine: Machine) -> Any:
    """The engine whose prefills SGLang has captured.

    Raises:
        NotActiveError: it cannot capture them.
    """
    wanted = machine.workload.replayed
    if machine.unrecordable is not None:
        raise NotActiveError(machine.unrecordable)
    try:
        engine = machine.engine(wanted)
        missing = sorted(set(wanted).difference(bench_prefill.captured_rows(engine)))
        if missing:
            raise NotActiveError(f"none of {missing} tokens")
    except Exception as failure:
        machine.unrecordable = f"SGLang cannot capture prefills: {failure!r}"
        traceback.print_exc()
        raise NotActiveError(machine.unrecordable) from failure
    return engine


def replayed_steps(work: Workload) -> dict[str, Step]:
    """Part h: is it captured, is it right, how long does it take."""

    def step(
        machine: Machine, length: int, measure: Callable[[Any, Any, int], dict[str, Any]]
    ) -> dict[str, Any]:

        try:
            engine = engine_with_prefill_graphs(machine)
        except NotActiveError as failure:
            return {"length": length, "failed": str(failure)}
        batch = random_prompt(engine, length)
        with settings_changed(min_skipped_rows=1):  # from what length it pays is to be found out
            measured = measure(engine, batch, length)
        return {"length": length, "model": machine.preset} | measured

    times = partial(four_times, repeats=work.replayed_repeats)
    return {
        "prefill_graphs": prefill_graphs,
        **{
            f"{length} tokens, {what}": partial(step, length=length, measure=measure)
            for what, measure in (("answers", four_answers), ("times", times))
            for length in work.replayed
        },
    }


def prefill_graphs(machine: Machine) -> dict[str, Any]:
    """Whether SGLang starts with captured prefills at all, and what the package reports of them."""
    from sglang_gemma4_yoco.loading import start

    began = time.monotonic()
    try:
        engine = engine_with_prefill_graphs(machine)
    except NotActiveError as failure:
        return {"failed": str(failure)}
    facts = start.of(engine.text_model).facts
    return {
        "failed": None,
        "seconds": time.monotonic() - began,
        "rows": bench_prefill.captured_rows(engine),
        **{name: facts.get(name) for name in ("exits", "exits_check", "tail", "check")},
    }


@dataclass(frozen=True)
class Answer:
    """What one forward gave.

    Attributes:
        path: what the package reports of it.
        logits: [1, vocabulary], in double precision.
        cache: K and V of each layer with some, at the slots that were written.
    """

    path: str
    logits: Any
    cache: list[Any]

    @classmethod
    def of(cls, engine: Any, batch: Any, way: str) -> Answer:
        """Run it, over K and V that are poisoned."""
        from sglang_gemma4_yoco import log

        engine.poison(batch)
        log.forwards.clear()
        logits = bench_prefill.timed(engine, batch, way)[1].double()
        return cls(", ".join(log.forwards), logits, engine.written(batch))

    def beside(self, other: Answer) -> dict[str, Any]:
        """How far it is from another one, which counts as right."""
        import torch

        errors = [
            float((one.double() - wanted.double()).norm() / wanted.double().norm())
            for one, wanted in zip(self.cache, other.cache, strict=True)
        ]
        cosines = torch.nn.functional.cosine_similarity(self.logits, other.logits, dim=-1)
        found = {
            "cosine": float(cosines.min()),
            "max_difference": float((self.logits - other.logits).abs().max()),
            "cache_error": max(errors),
            "same_logits": torch.equal(self.logits, other.logits),
            "same_cache": all(map(torch.equal, self.cache, other.cache)),
        }
        # Comparisons with what is no number are false.
        right = found["cosine"] > LEAST_COSINE and found["cache_error"] <= LARGEST_CACHE_ERROR
        return found | {"right": right}


def four_answers(engine: Any, batch: Any, _: int) -> dict[str, Any]:
    """SGLang's replay beside its eager prefill; the package's beside both."""
    # The package's replay first, while the tail's inputs are still those of another batch.
    seen = {way: Answer.of(engine, batch, way) for way in reversed(FOUR_WAYS)}
    bench_prefill.must_have_spread(seen["off"].logits)
    return {
        "paths": {way: answer.path for way, answer in seen.items()},
        "stock replayed beside stock": seen[OFF_REPLAYED].beside(seen["off"]),
        "package replayed beside package": seen[ON_REPLAYED].beside(seen["on"]),
        # Up to the exit it is the same graph: the same K and V, bit for bit.
        "package replayed beside stock replayed": seen[ON_REPLAYED].beside(seen[OFF_REPLAYED]),
    }


def four_times(engine: Any, batch: Any, length: int, repeats: int) -> dict[str, Any]:
    """Seconds of each way, in turns, and what the host does in it.

    Raises:
        NotActiveError: a prefill did not take the way that was to be measured.
    """
    from sglang_gemma4_yoco import log

    for way in FOUR_WAYS:
        logits = bench_prefill.timed(engine, batch, way)[1]
    assert_path(engine, batch, length)
    path = bench_prefill.replayed(engine, batch, length, logits)[ON_REPLAYED].path
    if path != log.EXIT_CAPTURED:
        raise NotActiveError(f"{length} tokens, replayed: {path}")
    seconds, _ = bench_prefill.timed_in_turns(engine, batch, FOUR_WAYS, repeats)
    host = bench_prefill.measure_host(engine, batch, bench_prefill.HOST_REPEATS, FOUR_WAYS)
    return {
        "seconds": {way: asdict(Times.of(seconds[way])) for way in FOUR_WAYS},
        "host": {way: asdict(work) for way, work in host.items()},
    }


def summarise_replayed(steps: dict[str, Any]) -> dict[str, Any]:
    """Whether SGLang's replays hold, and one row per length beside its prediction."""
    answers = {step["length"]: step for step in steps.values() if "paths" in step}
    times = [step for step in steps.values() if "seconds" in step and "length" in step]
    return {
        "prefill_graphs": steps["prefill_graphs"],
        "stock_right": [n for n, a in answers.items() if a["stock replayed beside stock"]["right"]],
        "rows": [_replayed_row(step, answers[step["length"]]) for step in times],
    }


def _replayed_row(step: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    ms = {way: times["median"] * 1e3 for way, times in step["seconds"].items()}
    both = ms[ON_REPLAYED]
    return {
        "length": step["length"],
        "ms": ms,
        "predicted_ms": PREDICTED_MS.get(step["model"], {}).get(step["length"]),
        "faster_than": {way: ms[way] / both for way in ms if way != ON_REPLAYED},
        "right": {name: found["right"] for name, found in answers.items() if "beside" in name},
        "same_cache": answers["package replayed beside stock replayed"]["same_cache"],
        "paths": answers["paths"],
        # At least as fast as stock's graphs, and as the package without them but for a twentieth.
        "as_wanted": both <= ms[OFF_REPLAYED] and both <= 1.05 * ms["on"],
    }


PARTS = {
    "a": Part(
        "the published run",
        ("published", "repeats"),
        partial(load_steps, "published"),
        summarise_loads,
        on_servers=True,
    ),
    "b": Part(
        "many at a time",
        ("concurrent", "repeats"),
        partial(load_steps, "concurrent"),
        summarise_loads,
        on_servers=True,
    ),
    "e": Part(
        "inter-token latency while long prompts arrive",
        ("running", "arriving", "interval"),
        latency_steps,
        summarise_latency,
        on_servers=True,
    ),
    "c": Part(
        "one prefill against the ceiling",
        ("lengths", "prefill_repeats"),
        prefill_steps,
        lambda steps: list(steps.values()),
    ),
    "d": Part(
        "peak memory of a prefill",
        ("memory",),
        partial(one_prefill, peak_memory, "memory"),
        by_length,
    ),
    "f": Part(
        "profile of a prefill", ("profiled",), partial(one_prefill, profile, "profiled"), by_length
    ),
    "g": Part("on against off: tokens and logits", ("answers",), answer_steps, summarise_answers),
    # The last one: after a failed capture the device may be of no use.
    "h": Part(
        "prefills that SGLang replays",
        ("replayed", "replayed_repeats"),
        replayed_steps,
        summarise_replayed,
    ),
}


# ---------------------------------------------------------------- the whole


def run_part(key: str, machine: Machine, results: Results, deadline: float) -> None:
    """Measure what is missing of one part.

    Raises:
        OutOfTimeError: something still is.
    """
    part, work = PARTS[key], machine.workload
    heading(f"({key}) {part.title}")
    settings = {name: value for name, value in asdict(work).items() if name in part.settings}
    settings["server_args"] = None
    if part.on_servers:
        settings["server_args"] = redact_flags(shlex.split(machine._args.server_args))
    results.begin(key, part.title, settings)
    done = results.steps(key)
    for name, step in part.steps(work).items():
        if name in done:
            say(f"{name}: measured before")
            continue
        if time.monotonic() > deadline:
            raise OutOfTimeError(f"part {key}: {name} and what follows")
        began = time.monotonic()
        results.add(key, name, step(machine))
        say(f"{name}: {time.monotonic() - began:.1f} s")
    results.finish(key, part.summary(results.steps(key)))


def header(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """What was measured, and on what."""
    import torch
    import transformers

    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu ({os.cpu_count()})"
    return {
        "model": PRESETS[args.preset],
        "weights": "random",
        "device": name,
        "device_kind": device,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }


def file_name(facts: dict[str, Any]) -> str:
    """``gpu_DEVICE_MODEL_sglang-VERSION.json``.

    >>> file_name({"device": "NVIDIA H100 80GB", "model": "E2B", "sglang": "0.5.17"})
    'gpu_nvidia-h100-80gb_e2b_sglang-0.5.17.json'
    """
    device, model = (
        re.sub(r"[^a-z0-9]+", "-", facts[key].lower()).strip("-") for key in ("device", "model")
    )
    return f"gpu_{device}_{model}_sglang-{facts['sglang']}.json"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; see ``--help``."""
    parser = command_line(__doc__)
    parser.add_argument("--preset", type=str.lower, choices=PRESETS, default="e2b")
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no measurement after")
    parser.add_argument("--results", type=Path, default=REPO / "benchmark" / "results")
    parser.add_argument("--commit", help="what is measured, where git does not know it")
    parser.add_argument(
        "--server-args", default="", metavar="'...'", help="more arguments for both servers"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return 0 when all is measured, 3 when time ran out, 2 when something went wrong."""
    args = parse_arguments(argv)
    deadline = time.monotonic() + 60 * args.minutes
    device = bench_prefill.choose_device(args.device)
    # Requests to this machine must not go through a proxy.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    facts = header(args, device)
    results = Results(args.results / file_name(facts), facts, args.commit or commit())
    with (
        tempfile.TemporaryDirectory() as directory,
        Machine(args, device, Path(directory)) as machine,
    ):
        try:
            for key in (key for key in PARTS if key in args.parts):
                run_part(key, machine, results, deadline)
        except OutOfTimeError as left:
            print(f"out of time before {left}; the same command goes on there", file=sys.stderr)
            print(results.path)
            return OUT_OF_TIME
        except (SetupError, WrongPathError, NotActiveError) as failure:
            return failed(failure)
    print(results.path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
