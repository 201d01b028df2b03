#!/usr/bin/env python3
"""Measure latency under load: time to first token and between tokens, stock and fast.

Serves one model twice, stock and fast, and sends both the same random prompts alternately, with
SGLang's own ``sglang.benchmark.serving``: at random times (``--rates``, in requests per second), or
all at once (``--rates inf``). For each rate, with mixed chunks off and on, it reports the mean and
percentiles of time to first token and between tokens over all runs. The model is a small random
one on the CPU platform, in float32; with ``--device cuda`` it has dummy weights, in bfloat16. Flags
after ``--`` go to both servers.

    python scripts/bench/bench_latency.py --rates 0.1 0.2 0.35 --repeats 3
    python scripts/bench/bench_latency.py --device cuda --preset E2B --rates inf \\
        --requests 30 --prompt 7000 --answer 10 --exact

Output contract: a line for each run on stdout; the last line is one JSON document. Exit status: 0
if everything was measured and the fast path was active on one server only, else 2.
docs/operating.md has the two commands for your own server.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import failed, make_checkpoint, make_log_dir, new_parser
from scripts.environment import REPO, SetupError
from scripts.result_files import begin_result, write_result
from sglang_gemma4_yoco.commands.console import say
from sglang_gemma4_yoco.commands.verify.verify import parse_positive

if TYPE_CHECKING:
    from sglang_gemma4_yoco.commands.verify.servers import Server

PERCENTILES = (50, 95, 99)


def send(server: Server, rate: float, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run ``sglang.benchmark.serving`` once; return the document that it writes, with details."""
    output = server.log_file.with_suffix(f".{rate}.{seed}.jsonl")
    log = output.with_suffix(".log")
    ratio = 0.5
    if args.exact:
        ratio = 1.0
    values: dict[str, Any] = {
        "backend": "sglang",
        "base-url": server.url,
        "model": args.checkpoint,
        "seed": seed,
        "dataset-name": "random-ids",
        "num-prompts": args.requests,
        "request-rate": rate,
        "random-input-len": args.prompt,
        "random-output-len": args.answer,
        "random-range-ratio": ratio,
        "output-file": output,
    }
    if args.concurrency is not None:
        values["max-concurrency"] = args.concurrency
    command = [sys.executable, "-m", "sglang.benchmark.serving"]
    command += [f"--{name}={value}" for name, value in values.items()]
    command += ["--tokenize-prompt", "--flush-cache", "--disable-tqdm", "--output-details"]
    env = os.environ | {"NO_PROXY": "127.0.0.1,localhost"}
    with log.open("w") as printed:
        done = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, env=env)
    if done.returncode or not output.exists():
        raise SetupError(f"sglang.benchmark.serving failed; see its log, {log}")
    document: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    if any(document["errors"]) or document["completed"] != args.requests:
        raise SetupError(f"only {document['completed']} requests were answered; see {output}")
    return document


def summed_up(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the times of all requests of some runs, in milliseconds, and figures of each run."""
    first = list(chain.from_iterable(run["ttfts"] for run in runs))
    of_requests = chain.from_iterable(run["itls"] for run in runs)
    between = list(chain.from_iterable(of_requests))
    return {
        "ttft_ms": summarise_times(first),
        "itl_ms": summarise_times(between),
        "seconds": [run["duration"] for run in runs],
    }


def summarise_times(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return mean and ``PERCENTILES`` in milliseconds, or None if no token was seen.

    ``sglang.benchmark.serving`` recognises a token by its text. With dummy weights all of them may
    be special tokens, which have none: then the times are 0.
    """
    import numpy as np

    if not any(seconds):
        return None
    found = {"mean": 1e3 * statistics.fmean(seconds)}
    for percentile in PERCENTILES:
        found[str(percentile)] = 1e3 * float(np.percentile(seconds, percentile))
    return found


def describe_run(run: dict[str, Any]) -> str:
    """Return the times of one run, as one line."""
    found = summed_up([run])
    told = f"{run['duration']:.2f} s"
    for kind in ("ttft_ms", "itl_ms"):
        if times := found[kind]:
            told += f"; {kind}: median {times['50']:.0f}, p95 {times['95']:.0f}"
    return told


def measure(args: argparse.Namespace, folder: Path, mixed: str) -> list[dict[str, Any]]:
    """Measure stock and fast at each rate; return the results."""
    from sglang_gemma4_yoco.commands.verify.servers import check_switch, make_pair, run_servers

    folder.mkdir()
    flags = ["--model-path", str(args.checkpoint), f"--chunked-prefill-size={args.chunk}"]
    if args.device == "cuda":
        flags += ["--load-format=dummy", "--dtype=bfloat16", "--attention-backend=triton"]
    else:
        flags.append("--dtype=float32")
    if mixed == "on":
        flags.append("--enable-mixed-chunk")
    flags += args.flags
    both = make_pair(flags, folder, device=args.device)
    groups, points = [list(both)], []
    if args.device == "cuda":
        # Each takes its share of what is free when it starts: half, then nearly all the rest.
        groups = [[server] for server in both]
        for server, share in zip(both, (0.45, 0.85), strict=True):
            server.arguments.insert(0, f"--mem-fraction-static={share}")
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(run_servers(group, 600))
        for rate in args.rates:
            runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
            for seed, server in product(range(args.repeats), both):
                runs[server.fast].append(send(server, rate, seed, args))
                which = f"mixed chunks {mixed}, {rate} requests/s, {server.name}, run {seed}"
                say(f"{which}: {describe_run(runs[server.fast][-1])}")
            off, on = summed_up(runs[False]), summed_up(runs[True])
            points.append({"mixed": mixed, "rate": rate, "off": off, "on": on})
        for server in both:
            check_switch(server, f"{args.requests} requests")
    return points


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line; see ``--help``."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    number: dict[str, Any] = {"type": parse_positive, "metavar": "N"}
    add("--preset", default="E2B_MINI", help="random model, such as E2B_MINI")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to serve")
    add("--rates", type=float, nargs="+", default=[0.1, 0.2, 0.35], help="requests per second")
    add("--mixed", nargs="+", choices=("off", "on"), default=["off", "on"], help="mixed chunks")
    add("--requests", default=16, help="requests of a run", **number)
    add("--concurrency", help="the most requests at a time", **number)
    add("--repeats", default=3, help="runs of each server at each rate", **number)
    add("--prompt", default=512, help="tokens of the longest prompt, twice the shortest", **number)
    add("--answer", default=32, help="tokens of the longest answer, twice the shortest", **number)
    add("--exact", action="store_true", help="all prompts and answers have the maximum length")
    add("--chunk", default=256, help="tokens of a chunk", **number)
    add("--work-dir", type=Path, default=REPO / ".demo", help="for logs and checkpoints")
    add("--json", type=Path, help="write the JSON document to this file too")
    add("flags", nargs="*", metavar="-- FLAG", help="more flags for both servers")
    args = parser.parse_args()
    if args.answer == 1:
        parser.error("--answer 1: an answer of one token has no time between tokens")
    return args


def main() -> int:
    """Run, print, and return the exit status."""
    args = parse_arguments()
    from sglang_gemma4_yoco.commands.verify.servers import WrongPathError

    dtype = "bfloat16"
    if args.device == "cpu":
        os.environ["SGLANG_PLATFORM"], dtype = "gemma4_cpu", "float32"
    document = begin_result(args.preset, args.device, dtype) | {"points": []}
    for name in ("requests", "concurrency", "repeats", "prompt", "answer", "exact", "chunk"):
        document[name] = getattr(args, name)
    try:
        folder = make_log_dir(args.work_dir)
        weights = args.device == "cpu"
        args.checkpoint = make_checkpoint(args.preset, folder.parents[1], weights=weights)
        for mixed in args.mixed:
            document["points"] += measure(args, folder / f"mixed-{mixed}", mixed)
            line = write_result(args.json, document)
    except (SetupError, WrongPathError, OSError, ImportError) as failure:
        return failed(failure)
    print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
