#!/usr/bin/env python3
"""Do those who are decoding wait longer when others' prefills are fast?

Serves a small random Gemma 4 on the CPU platform twice, in float32, with the fast path off and on,
and sends both the same requests with SGLang's own ``sglang.bench_serving``, in turns: prompts of
random ids arrive at random times while earlier requests decode. For each rate of requests, with
mixed chunks off and on, the times to first token and between tokens of all turns are put together.

Output contract: a table for people on stdout; the last line is one JSON document. Exit status: 0 if
everything was measured and the fast path was active on the one server and not on the other, 2 if
not.

    python scripts/bench/bench_latency.py --rates 0.2 0.35 --repeats 3

Needs an environment with SGLang, this package and ``test/reference``; ``scripts/demo.py`` makes
one. docs/operating.md has the two commands for a server of one's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import (
    REPO,
    SetupError,
    command_line,
    failed,
    make_checkpoint,
    make_log_dir,
    origin,
    say,
    write_whole,
)
from generated import markdown
from sglang_gemma4_yoco.commands.console import CommandError
from sglang_gemma4_yoco.commands.servers import (
    Server,
    WrongPathError,
    check_switch,
    pair,
    running,
)

PERCENTILES = (50, 95, 99)
_MIXED = "--enable-mixed-chunk"


def send(server: Server, rate: float, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run of ``sglang.bench_serving``: the document that it writes, with details."""
    output = server.log_file.with_suffix(f".{rate}.{seed}.jsonl")
    log = output.with_suffix(".log")
    command = [
        *(sys.executable, "-m", "sglang.bench_serving"),
        *("--backend", "sglang", "--base-url", server.url, "--model", str(args.checkpoint)),
        *("--dataset-name", "random-ids", "--random-range-ratio", "0.5", "--seed", str(seed)),
        *("--random-input-len", str(args.prompt), "--random-output-len", str(args.answer)),
        *("--num-prompts", str(args.requests), "--request-rate", str(rate)),
        *("--tokenize-prompt", "--flush-cache", "--disable-tqdm"),
        *("--output-details", "--output-file", str(output)),
    ]
    with log.open("w") as printed:
        done = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT)
    if done.returncode or not output.exists():
        raise SetupError("sglang.bench_serving failed; its log says why.", log)
    document: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    if wrong := sum(map(bool, document["errors"])):
        raise SetupError(f"{wrong} requests failed; see {output}")
    return document


def summed_up(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Percentiles over all requests of some runs, in milliseconds; tokens per second."""
    import numpy as np

    first = [1e3 * seconds for run in runs for seconds in run["ttfts"]]
    between = [1e3 * t for run in runs for t in chain.from_iterable(run["itls"])]
    return {
        "ttft_ms": dict(zip(PERCENTILES, np.percentile(first, PERCENTILES).tolist(), strict=True)),
        "itl_ms": dict(zip(PERCENTILES, np.percentile(between, PERCENTILES).tolist(), strict=True)),
        "tokens": len(between),
        "output_throughput": [run["output_throughput"] for run in runs],
    }


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Each rate, with mixed chunks off and on: what stock does, and what fast."""
    points = []
    for mixed in args.mixed:
        flags = ["--model-path", str(args.checkpoint), "--dtype", "float32"]
        flags += ["--chunked-prefill-size", str(args.chunk), *([_MIXED] if mixed == "on" else ())]
        logs = folder / f"mixed-{mixed}"
        logs.mkdir()
        both = pair(flags, logs, device="cpu")
        for server in both:
            server.env |= {"SGLANG_PLATFORM": "gemma4_cpu"}
        with running(both, 600):
            for rate in args.rates:
                runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
                for seed, server in product(range(args.repeats), both):
                    runs[server.fast].append(send(server, rate, seed, args))
                    say(f"   mixed chunks {mixed}, {rate} requests/s, {server.name}, run {seed}")
                off, on = summed_up(runs[False]), summed_up(runs[True])
                points.append({"mixed": mixed, "rate": rate, "off": off, "on": on})
            for server in both:
                check_switch(server, f"{args.requests} requests")
    return points


def show(points: Sequence[dict[str, Any]]) -> str:
    """The table: off / on of each percentile."""
    heads = ["mixed chunks", "requests/s"]
    heads += [f"{what}, p{p}" for what in ("first token", "between tokens") for p in PERCENTILES]
    rows = []
    for point in points:
        row = [point["mixed"], point["rate"]]
        for key, p in product(("ttft_ms", "itl_ms"), PERCENTILES):
            row.append(" / ".join(f"{point[way][key][p]:.0f}" for way in ("off", "on")))
        rows.append(row)
    return markdown(heads, rows, numbers=len(heads) - 1)


def main() -> int:
    """Run, print, and return the exit status."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--preset", default="E2B_MINI", help="which random checkpoint")
    add("--rates", type=float, nargs="+", default=[0.2, 0.35], help="requests per second")
    add("--mixed", nargs="+", choices=("off", "on"), default=["off", "on"], help="mixed chunks")
    add("--requests", type=int, default=16, help="of a run")
    add("--repeats", type=int, default=3, help="runs of each server at each rate")
    add("--prompt", type=int, default=512, help="tokens of the longest prompt; half: the shortest")
    add("--answer", type=int, default=32, help="tokens of the longest answer; half: the shortest")
    add("--chunk", type=int, default=256, help="tokens of a chunk")
    add("--work-dir", type=Path, default=REPO / ".demo", help="for logs and checkpoints")
    add("--json", type=Path, help="write the JSON document to this file too")
    args = parser.parse_args()
    args.work_dir = args.work_dir.expanduser().absolute()
    try:
        folder = make_log_dir(args.work_dir)
        args.checkpoint = make_checkpoint(args.preset, args.work_dir, folder / "checkpoint.log")
        points = measure(args, folder)
    except (SetupError, CommandError, WrongPathError, OSError, ImportError) as failure:
        return failed(failure)
    say(show(points))
    about = {"model": args.preset, "device": f"cpu ({os.cpu_count()})", "dtype": "float32"}
    sizes = {name: getattr(args, name) for name in ("requests", "repeats", "prompt", "answer")}
    line = json.dumps(
        {**origin(), **about, "sglang": version("sglang"), **sizes, "chunk": args.chunk}
        | {"points": points}
    )
    if args.json is not None:
        write_whole(args.json, line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
