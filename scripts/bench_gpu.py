#!/usr/bin/env python3
"""Measure what fast prefill gains and costs on this GPU, and where the time goes.

Measures Gemma 4 E2B or E4B at its real dimensions with random weights, so it needs neither a
network nor a checkpoint; in bf16, with Triton attention and the unchanged SGLang. Each part answers
one question and can run alone, in any order. "off" is ``SGLANG_GEMMA4_YOCO=0``, "on" is ``1``; they
alternate, and a part reports nothing unless the fast path was active in "on" and inactive in "off".
``run_tests.py --gpu`` tests the answers.

Two parts serve the model to ``sglang.benchmark.serving`` (``bench/bench_latency.py``):

    load      30 prompts of 7000 tokens in and 10 out, all at once
    latency   prompts of up to 8192 tokens arrive at random while others decode 150

Two time single prefills (``bench/bench_prefill.py``):

    prefill   16 to 32768 tokens against the ceiling, and the host's work in them
    replayed  16 to 8192 tokens that SGLang replays from CUDA graphs, with the package and without

One profiles single prefills, and needs CUPTI on a GPU:

    profile   host and device time of a prefill, and its kernels

Output contract: each part prints what its script prints, and writes ``benchmark/results/
gpu_PART_MODEL_DEVICE.json`` after each measurement. ``scripts/tables.py --write`` makes
tables of these files. Exit status: 0 if all parts were measured; 1 if one was not.

    python scripts/bench_gpu.py --preset E2B
    python scripts/bench_gpu.py --preset E4B --part prefill profile
    python scripts/bench_gpu.py --preset E2B_TINY --device cpu    # the script itself, without a GPU

Needs an environment with SGLang, this package and ``test/reference``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import heading, new_parser
from scripts.environment import REPO
from scripts.result_files import RESULTS, device_name, write_result
from sglang_gemma4_yoco.commands.console import say

#: The parts: their commands, and the arguments that make them small, for a trial run.
COMMANDS = {
    "load": (
        "bench/bench_latency.py --rates inf --mixed off --requests 30 --prompt 7000 --answer 10"
        " --exact --chunk 8192",
        "--requests 3 --prompt 60 --answer 3 --repeats 1",
    ),
    "latency": (
        "bench/bench_latency.py --rates 2 4 8 --concurrency 32 --requests 64 --prompt 8192"
        " --answer 150 --repeats 1 --chunk 8192",
        "--rates 4 --mixed off --requests 3 --prompt 70 --answer 6",
    ),
    "prefill": (
        "bench/bench_prefill.py --graphs tail --batch-sizes 1"
        " --lengths 16 32 64 128 256 512 1024 2048 8192 32768",
        "--lengths 40 --repeats 1",
    ),
    "replayed": (
        "bench/bench_prefill.py --graphs prefills --batch-sizes 1 --repeats 9 --min-skipped-rows 1"
        " --lengths 16 32 64 128 256 512 1024 2048 4096 8192",
        "--lengths 40 --repeats 1",
    ),
    "profile": ("bench_gpu.py --measure profile --lengths 16 128 512 2048 8192", "--lengths 40"),
}
WAYS = ("off", "on")


def profile(engine: Any, batch: Any, way: str) -> dict[str, Any]:
    """Return the breakdown of one prefill's time.

    Host time and end-to-end time are measured without the profiler, which slows the host down; the
    device's times in one forward with it.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    from scripts.bench.bench_prefill import served
    from sglang_gemma4_yoco.compat.server import wait_for_device

    activities, device = [ProfilerActivity.CPU], engine.runner.device
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    host, whole = [], []
    with served(engine, way):
        for _ in range(6):
            wait_for_device(device)
            began = time.perf_counter()
            engine.forward(batch)
            host.append(time.perf_counter() - began)
            wait_for_device(device)
            whole.append(time.perf_counter() - began)
        with profiler(activities=activities) as trace:
            engine.forward(batch)
            wait_for_device(device)
    return {
        "host_ms": statistics.median(host[1:]) * 1e3,  # the first one warms up
        "whole_ms": statistics.median(whole[1:]) * 1e3,
        **device_time(trace.events(), device),
    }


def device_time(events: Sequence[Any], device: str) -> dict[str, Any]:
    """Return the device's busy and idle time in milliseconds, and its ten largest kernels.

    It is idle when nothing is queued, so it waits for the host. On a CPU the innermost operations
    count as kernels.
    """
    busy, began, until = 0.0, float("inf"), float("-inf")
    totals: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in sorted(events, key=lambda event: event.time_range.start):
        # A named range of the host also appears on the device's time line, but is no work.
        is_work = not event.is_user_annotation and not event.cpu_children
        if event.device_type.name != device.upper() or not is_work:
            continue
        start, end = event.time_range.start, event.time_range.end
        busy += max(0.0, end - max(start, until))
        began, until = min(began, start), max(until, end)
        totals[event.name] += (end - start) / 1e3
        calls[event.name] += 1
    largest = sorted(totals, key=lambda name: totals[name], reverse=True)[:10]
    return {
        "device_busy_ms": busy / 1e3,
        "device_idle_ms": (until - began - busy) / 1e3,
        "kernels": sum(calls.values()),
        "largest": [[name[:120], calls[name], totals[name]] for name in largest],
    }


def measure_profile(args: argparse.Namespace) -> int:
    """Profile prefills, alternating off and on; return the exit status."""
    from scripts.bench import bench_prefill
    from sglang_gemma4_yoco import counters

    device = bench_prefill.choose_device(args.device)
    with tempfile.TemporaryDirectory() as directory:
        engine = bench_prefill.build_engine(
            args.preset, device, Path(directory), max(args.lengths), graphs=True
        )
        bench_prefill.capture(engine)
        document = bench_prefill.describe(args.preset, engine) | {"points": []}
        for length in args.lengths:
            load = bench_prefill.Load(length, batch_size=1)
            requests = bench_prefill.prompts(load, engine.text_model.config.vocab_size)
            path, _ = bench_prefill.path_taken(engine, engine.schedule(requests), load)
            if path not in (counters.TAIL_EAGER, counters.TAIL_CAPTURED):
                raise bench_prefill.NotActiveError(f"{length} tokens: {path}")
            point: dict[str, Any] = {"length": length}
            for way in WAYS:
                point[way] = profile(engine, engine.schedule(requests), way)
            document["points"].append(point)
            line = write_result(args.json, document)
            say(f"{length} tokens: off {point['off']}, on {point['on']}")
    print(line)
    return 0


def command_of(part: str, args: argparse.Namespace, device: str) -> list[str]:
    """Return the command that measures a part in a separate process, alone on the GPU."""
    card = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    preset = args.preset.lower().replace("_", "-")
    name = f"gpu_{part}_{preset}_{card}.json"
    path = os.path.relpath(args.results / name, REPO)
    command, smaller = COMMANDS[part]
    script, *options = shlex.split(command)
    if args.preset.endswith("TINY"):
        options += shlex.split(smaller)
    options += ["--preset", args.preset, "--device", device, "--json", path]
    return [sys.executable, f"scripts/{script}", *options]


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line; see ``--help``."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--preset", default="E2B", help="E2B, E4B, or a smaller random model")
    add("--part", nargs="+", choices=COMMANDS, default=[*COMMANDS], help="what to measure")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run")
    add("--results", type=Path, default=RESULTS, help="the folder of the result files")
    add("--measure", choices=["profile"], help=argparse.SUPPRESS)  # a part, in its own process
    add("--lengths", type=int, nargs="+", help=argparse.SUPPRESS)
    add("--json", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure; return the exit status."""
    args = parse_arguments()
    if args.measure:
        return measure_profile(args)
    from scripts.bench.bench_prefill import choose_device

    device = choose_device(args.device)
    missing = []
    for part in args.part:
        heading(part)
        command = command_of(part, args, device)
        say(f"$ {shlex.join(command)}")
        if subprocess.run(command, cwd=REPO, check=False).returncode:
            missing.append(part)
    if missing:
        say(f"not measured: {', '.join(missing)}", sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    raise SystemExit(main())
