#!/usr/bin/env python3
"""Measure what fast prefill gains and costs on this GPU, and where the time goes.

It measures Gemma 4 E2B or E4B in bf16, with Triton attention and the unchanged SGLang. Weights are
random, at the real dimensions, so it needs neither a network nor a checkpoint. Each part answers
one question and can run alone, in any order. "off" is ``SGLANG_GEMMA4_YOCO=0``, "on" is ``1``; they
alternate, and a part reports nothing unless the fast path was active in "on" and inactive in "off".
``run_tests.py --gpu`` tests the answers.

The parts, the most valuable first, and within a part the most valuable lengths first:

    replayed  single prefills of 16 to 8192 tokens (``bench/bench_prefill.py``), with and without
              the package, each replayed from SGLang's CUDA graphs and not
    latency   prompts of up to 8192 tokens arrive at random while others decode 150
              (``bench/bench_latency.py``)
    load      30 prompts of 7000 tokens in and 10 out, all at once (the same script)
    prefill   single prefills of 16 to 32768 tokens against the ceiling, and the host's work in them
    profile   host and device time of a prefill, and its kernels; needs CUPTI on a GPU

``--minutes`` is a budget for all parts. The script skips a part that is not expected to fit into
the rest, and ends one that runs out of time, which keeps what it has written. With several models,
each part measures all of them before the next part.

Output contract: each part prints what its script prints, and writes ``benchmark/results/
gpu_PART_MODEL_DEVICE.json`` after each measurement. ``scripts/tables.py --write`` makes
tables of these files. The last line names the parts that were not, or not wholly, measured. Exit
status: 0 if there are none, else 1.

    python scripts/bench_gpu.py --preset E2B E4B --minutes 15
    python scripts/bench_gpu.py --preset E4B --part prefill profile
    python scripts/bench_gpu.py --preset E2B_TINY --device cpu    # the script itself, without a GPU

Needs an environment with SGLang, this package and ``test/reference``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import heading, new_parser
from scripts.environment import REPO, SetupError
from scripts.result_files import RESULTS, device_name
from sglang_gemma4_yoco.commands.console import say

#: The parts: the minutes that they take (an estimate), their commands, and the arguments that make
#: them small, for a trial run. Some lengths are between the buckets of SGLang's prefill graphs.
COMMANDS = {
    "replayed": (
        3,
        "bench/bench_prefill.py --graphs prefills --batch-sizes 1 --repeats 9 --min-skipped-rows 1"
        " --lengths 512 1024 2048 256 128 300 700 1500 64 4096 8192 16 32",
        "--lengths 40 --repeats 1",
    ),
    "latency": (
        4,
        "bench/bench_latency.py --rates 4 8 2 --mixed off --concurrency 32 --requests 64"
        " --prompt 8192 --answer 150 --repeats 1 --chunk 8192",
        "--rates 4 --requests 3 --prompt 70 --answer 6",
    ),
    "load": (
        3,
        "bench/bench_latency.py --rates inf --mixed off --requests 30 --prompt 7000 --answer 10"
        " --exact --chunk 8192",
        "--requests 3 --prompt 60 --answer 3 --repeats 1",
    ),
    "prefill": (
        3,
        "bench/bench_prefill.py --graphs tail --batch-sizes 1"
        " --lengths 8192 2048 512 1024 128 32768 300 1500 4096 256 64 16",
        "--lengths 40 --repeats 1",
    ),
    "profile": (
        2,
        "bench/bench_prefill.py --graphs tail --batch-sizes 1 --repeats 3"
        " --profile off on --lengths 512 2048 8192 128 16",
        "--lengths 40",
    ),
}


def command_of(part: str, model: str, args: argparse.Namespace, device: str) -> list[str]:
    """Return the command that measures a part in a separate process, alone on the GPU."""
    card = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    preset = model.lower().replace("_", "-")
    name = f"gpu_{part}_{preset}_{card}.json"
    path = os.path.relpath(args.results / name, REPO)
    _, command, smaller = COMMANDS[part]
    script, *options = shlex.split(command)
    if model.endswith("TINY"):
        options += shlex.split(smaller)
    options += ["--preset", model, "--device", device, "--json", path]
    return [sys.executable, f"scripts/{script}", *options]


def main() -> int:
    """Measure; return the exit status."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--preset", nargs="+", default=["E2B"], help="E2B, E4B, or smaller random models")
    add("--minutes", type=float, default=60, help="budget for all parts")
    add("--part", nargs="+", choices=COMMANDS, default=[*COMMANDS], help="what to measure")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run")
    add("--results", type=Path, default=RESULTS, help="the folder of the result files")
    args = parser.parse_args()
    from scripts.bench.bench_prefill import choose_device

    device = choose_device(args.device)
    missing, until = [], time.monotonic() + 60 * args.minutes
    for part, model in product(args.part, args.preset):
        name, minutes = f"{part} of {model}", COMMANDS[part][0]
        heading(name)
        command, left = command_of(part, model, args, device), until - time.monotonic()
        say(f"$ {shlex.join(command)}")
        try:
            if left < 60 * minutes:
                raise SetupError(
                    f"skipped: it takes about {minutes} minutes, {left:.0f} s are left"
                )
            subprocess.run(command, cwd=REPO, check=True, timeout=left)
        except (SetupError, subprocess.SubprocessError) as failure:
            say(str(failure), sys.stderr)
            missing.append(name)
    if missing:
        say(f"not measured, or not wholly: {', '.join(missing)}", sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    raise SystemExit(main())
