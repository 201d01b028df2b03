#!/usr/bin/env python3
"""Measure latency under load, or capacity: time to first token and between tokens over HTTP.

It serves one model in several ways at once, and sends all of them the same requests, in turns, with
SGLang's own ``sglang.benchmark.serving``. The model is a small random one on the CPU platform, in
float32; with ``--device cuda`` it has dummy weights, in bfloat16, whose answers are special tokens,
so these are counted. Flags after ``--`` go to all servers. The ways:

    off      stock: SGLANG_GEMMA4_YOCO=0
    on       fast prefill: SGLANG_GEMMA4_YOCO=1
    graphs   SGLang's prefill graphs, nothing cut: SGLANG_GEMMA4_YOCO_PREFILL_GRAPHS=1 and
             SGLANG_GEMMA4_YOCO_MIN_SKIPPED_ROWS=1000000; on a GPU
    both     prefill graphs, left at the cut: SGLANG_GEMMA4_YOCO_PREFILL_GRAPHS=1; on a GPU

**Latency**: requests come at random times (``--rates``, in requests per second), or all at once
(``--rates inf``). For each rate it reports the mean and percentiles of TTFT and ITL over all runs.

**Capacity** (``--capacity N``): the highest rate at which the 95th percentile of TTFT is at most
three times that of the unloaded stock server, which gets 30 prompts one at a time. The limit is the
same for all ways, in milliseconds: users wait seconds, and a multiple of its own TTFT would be a
stricter limit for a faster server. Each server's own unloaded TTFT is in the result too. All
prompts share ``--shared`` tokens, which are cached; each run's ``--own`` tokens are new, except one
prompt's, which is also the benchmark's warm-up. At most N rates of each way are measured by
bisection, until the lowest rate above the limit is at most 1.1 times the highest within it; a run's
arrivals last ``--seconds``. A run that has not ended after twice as long and a minute is stopped,
and its rate is above the limit.

    python scripts/bench/bench_latency.py --rates 0.1 0.2 0.35 --repeats 3
    python scripts/bench/bench_latency.py --device cuda --preset E2B --rates inf \\
        --requests 30 --prompt 7000 --answer 10 --exact
    python scripts/bench/bench_latency.py --capacity 5 --own 16 384 --answer 8 --special
    python scripts/bench/bench_latency.py --device cuda --preset E2B --capacity 5 \\
        --shared 1500 --own 200 6000 --answer 128 --chunk 8192 --ways graphs both

Output contract: a line for each run on stdout; the last line is one JSON document, which ``--json``
writes after each rate. Exit status: 0 if everything was measured, and each server's prefills were
those of its way, else 2. A run without TTFT or ITL is an error, and no result is written.
docs/operating.md shows the commands for your own server.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import failed, make_checkpoint, make_log_dir, new_parser
from scripts.environment import REPO, SetupError
from scripts.result_files import begin_result, write_result
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.commands.console import say
from sglang_gemma4_yoco.commands.verify.verify import parse_positive
from sglang_gemma4_yoco.settings import name_of

if TYPE_CHECKING:
    from sglang_gemma4_yoco.commands.verify.servers import Server

PERCENTILES = (50, 95, 99)
GRAPHS = {name_of("prefill_graphs"): "1"}
#: The ways: environment variables besides the switch; are prefills cut; must SGLang's have exits.
WAYS = {
    "off": ({}, False, False),
    "on": ({}, True, False),
    "graphs": (GRAPHS | {name_of("min_skipped_rows"): "1000000"}, False, True),
    "both": (GRAPHS, True, True),
}
FACTOR = 3  # the limit of capacity, in multiples of the unloaded TTFT
UNLOADED = {"num-prompts": 30, "max-concurrency": 1}
WIDER = 1.5  # from a rate within the limit to the next one, until one is above it
CLOSE = 1.1  # between these two at the end
MOST = 1e6  # requests per second that no server answers


def choose_options(
    output: Path, rate: float, seed: int, args: argparse.Namespace, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the options of ``sglang.benchmark.serving``; ``options`` override them."""
    values = {
        "backend": "sglang",
        "model": args.checkpoint,
        "seed": seed,
        "num-prompts": args.requests,
        "request-rate": rate,
        "random-input-len": args.prompt,
        "random-output-len": args.answer,
        "random-range-ratio": 0.5,
        "dataset-name": "random-ids",
        "output-file": output,
    }
    if args.exact:
        values["random-range-ratio"] = 1.0
    if args.concurrency:
        values["max-concurrency"] = args.concurrency
    if args.special:  # dummy weights answer with special tokens, which have no text by default
        sampling = {"temperature": 0, "max_new_tokens": args.answer, "ignore_eos": True}
        body = {"sampling_params": sampling | {"skip_special_tokens": False}}
        values["extra-request-body"] = json.dumps(body)
    values |= options
    if args.capacity:
        from sglang_gemma4_reference.workload import shared_prefixes

        file, number = output.with_suffix(".prompts"), values["num-prompts"]
        file.write_text(shared_prefixes(number, seed=seed, shared=args.shared, own=args.own))
        values |= {"dataset-name": "custom", "dataset-path": file}
        values["sharegpt-output-len"] = args.answer
    return values


def send(
    server: Server, rate: float, seed: int, args: argparse.Namespace, **options: Any
) -> dict[str, Any]:
    """Run ``sglang.benchmark.serving`` once; return the document that it writes, with details.

    Args:
        options: of the benchmark, as ``choose_options`` has them.

    Raises:
        SetupError: it failed, not all requests were answered, or no token was seen.
        subprocess.TimeoutExpired: the server does not keep up with a rate of ``--capacity``.
    """
    output = server.log_file.with_suffix(f".{rate:.3f}.{seed}.jsonl")
    log = output.with_suffix(".log")
    values = choose_options(output, rate, seed, args, options)
    command = [sys.executable, "-m", "sglang.benchmark.serving", f"--base-url={server.url}"]
    command += [f"--{name}={value}" for name, value in values.items()]
    command += ["--disable-tqdm", "--output-details"]
    timeout = 2 * args.seconds + 60
    if not args.capacity:
        command += ["--tokenize-prompt", "--flush-cache"]
        timeout = None
    with log.open("w") as printed:
        done = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, timeout=timeout)
    if done.returncode or not output.exists():
        raise SetupError(f"sglang.benchmark.serving failed; see its log, {log}")
    document: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    if document["completed"] != values["num-prompts"]:
        raise SetupError(f"only {document['completed']} requests were answered; see {output}")
    say(f"{server.name}, {rate:.3f} requests/s, run {seed}: {summed_up([document])}")
    return document


def summed_up(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the times of all requests of some runs, in milliseconds, and figures of each run.

    Raises:
        SetupError: ``sglang.benchmark.serving`` saw no first token, or no token after it.
    """
    first = list(chain.from_iterable(run["ttfts"] for run in runs))
    of_requests = chain.from_iterable(run["itls"] for run in runs)
    between = list(chain.from_iterable(of_requests))
    if not all(first) or not between:
        raise SetupError(
            "sglang.benchmark.serving has seen no first token of an answer, or none after it: it "
            "recognises tokens by their text, and special tokens have none. Use --special, or "
            "weights that answer with text"
        )
    return {
        "ttft_ms": summarise_times(first),
        "itl_ms": summarise_times(between),
        "seconds": [run["duration"] for run in runs],
    }


def summarise_times(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean and ``PERCENTILES`` in milliseconds, to the microsecond."""
    import numpy as np

    found = {"mean": round(1e3 * statistics.fmean(seconds), 3)}
    for percentile in PERCENTILES:
        found[str(percentile)] = round(1e3 * float(np.percentile(seconds, percentile)), 3)
    return found


def check_way(server: Server) -> dict[str, int]:
    """Return the prefills since the last check, by outcome.

    Raises:
        WrongPathError: some were cut or none, unlike the way, or SGLang's graphs have no exits.
    """
    from sglang_gemma4_yoco.commands import status
    from sglang_gemma4_yoco.commands.verify.servers import WrongPathError

    forwards = server.take_forwards()
    exits = str(server.states()[0].get(status.ENTRY, {}).get("exits"))
    _, cut, graphs = WAYS[server.name]
    if cut == counters.CUT.isdisjoint(forwards) or graphs > exits.startswith("open"):
        raise WrongPathError(
            f"this is not {server.name!r}: prefills {dict(forwards)}, exits from SGLang's graphs "
            f"{exits}. Its log: {server.log_file}"
        )
    return dict(forwards)


@contextmanager
def serving(args: argparse.Namespace, folder: Path, mixed: str) -> Iterator[list[Server]]:
    """Run a server for each way in the ``with`` block."""
    from sglang_gemma4_yoco.commands.verify.servers import Server, find_free_ports, run_servers

    folder.mkdir()
    flags = ["--model-path", str(args.checkpoint), f"--chunked-prefill-size={args.chunk}"]
    if args.device == "cuda":
        flags += ["--load-format=dummy", "--dtype=bfloat16", "--attention-backend=triton"]
    else:
        # An idle scheduler spins, and would take a core from the server that is measured.
        flags += ["--device=cpu", "--dtype=float32", "--sleep-on-idle"]
    if mixed == "on":
        flags.append("--enable-mixed-chunk")
    flags += args.flags
    servers: list[Server] = []
    with ExitStack() as stack:
        for way in ("off", "on", *args.ways):
            port, log = find_free_ports(1)[0], folder / f"{way}.log"
            server = Server(way != "off", flags, port, log)
            server.name = way
            server.env |= WAYS[way][0]
            if server.fast:
                server.arguments += args.fast_flags
            if args.device == "cuda":  # of the free memory; all get the same, and one share is left
                share = 1 / (len(args.ways) + 3 - len(servers))
                server.arguments.insert(0, f"--mem-fraction-static={share:.3f}")
            stack.enter_context(run_servers([server], 300))
            servers.append(server)
        yield servers


def measure_latency(
    servers: Sequence[Server], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure all ways at each rate; yield the results of one rate at a time."""
    for rate in args.rates:
        runs = defaultdict[str, list[dict[str, Any]]](list)
        for seed, server in product(range(args.repeats), servers):
            runs[server.name].append(send(server, rate, seed, args))
        found = {}
        for server in servers:
            found[server.name] = summed_up(runs[server.name]) | {"outcomes": check_way(server)}
        yield {"rate": rate, **found}


def measure_capacity(
    servers: Sequence[Server], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure the unloaded servers, then one rate of each in turns; yield each result."""
    limit, searches = 0.0, []
    for server in servers:
        alone = summed_up([send(server, math.inf, 0, args, **UNLOADED)])
        yield {"way": server.name, "unloaded": alone, "outcomes": check_way(server)}
        limit = limit or FACTOR * alone["ttft_ms"]["95"]
        # At the first rate, prefills one after another would take half of the time.
        searches.append(search(server, limit, 500 / alone["ttft_ms"]["mean"], args))
    for turn in zip_longest(*searches):
        yield from filter(None, turn)


def search(
    server: Server, limit: float, rate: float, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Bisect, beginning at ``rate``; yield the result of each rate.

    The result has the highest rate ``within`` the limit so far, or 0, and the lowest ``above`` it,
    or ``MOST``.

    Args:
        limit: of the 95th percentile of TTFT, in milliseconds.
    """
    within, above = 0.0, MOST
    for seed in range(1, args.capacity + 1):
        point: dict[str, Any] = {"way": server.name, "rate": rate, "limit_ms": limit}
        requests, keeps_up = {"num-prompts": math.ceil(rate * args.seconds)}, False
        with suppress(subprocess.TimeoutExpired):
            point |= summed_up([send(server, rate, seed, args, **requests)])
            point["outcomes"] = check_way(server)
            keeps_up = point["ttft_ms"]["95"] <= limit
        server.forget_prefixes()  # it waits for requests of a run that was stopped
        if keeps_up:
            within = rate
        else:
            above = rate
        yield point | {"within": within, "above": above}
        if above <= CLOSE * within:
            return
        rate = min((within + above) / 2, WIDER * within or above)


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line; see ``--help``."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    number: dict[str, Any] = {"type": parse_positive, "metavar": "N"}
    add("--preset", default="E2B_MINI", help="random model, such as E2B_MINI")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to serve")
    besides = "ways besides off and on; see above"
    add("--ways", nargs="+", choices=("graphs", "both"), default=[], help=besides)
    add("--rates", type=float, nargs="+", default=[0.1, 0.2, 0.35], help="requests per second")
    add("--capacity", help="measure capacity, with at most N rates of each way", **number)
    add("--seconds", type=float, default=120, help="arrivals of a run of --capacity")
    add("--mixed", nargs="+", choices=("off", "on"), default=["off"], help="mixed chunks")
    add("--requests", default=16, help="requests of a run", **number)
    add("--concurrency", help="the most requests at a time", **number)
    add("--repeats", default=3, help="runs of each server at each rate", **number)
    add("--prompt", default=512, help="tokens of the longest prompt, twice the shortest", **number)
    own = "fewest and most tokens that a prompt of --capacity has after those that all share"
    add("--own", type=int, nargs=2, default=[16, 384], help=own)
    add("--shared", default=96, help="tokens that all prompts of --capacity share", **number)
    add("--answer", default=32, help="tokens of the longest answer, twice the shortest", **number)
    add("--exact", action="store_true", help="all prompts and answers have the maximum length")
    only = "more flags for all servers but stock, in one word: --fast-flags='--FLAG --FLAG=VALUE'"
    add("--fast-flags", type=shlex.split, default=[], help=only)
    special = "count special tokens, as always with dummy weights; answers have the maximum length"
    add("--special", action="store_true", help=special)
    add("--chunk", default=256, help="tokens of a chunk", **number)
    add("--work-dir", type=Path, default=REPO / ".demo", help="for logs and checkpoints")
    add("--json", type=Path, help="write the JSON document to this file too")
    add("flags", nargs="*", metavar="-- FLAG", help="more flags for all servers")
    args = parser.parse_args()
    if args.answer == 1:
        parser.error("--answer 1: an answer of one token has no time between tokens")
    args.special |= args.device == "cuda"
    return args


def main() -> int:
    """Run, print, and return the exit status."""
    args, measure = parse_arguments(), measure_latency
    from sglang_gemma4_yoco.commands.verify.servers import WrongPathError

    os.environ["NO_PROXY"], dtype = "127.0.0.1,localhost", "bfloat16"
    if args.device == "cpu":
        os.environ["SGLANG_PLATFORM"], dtype = "gemma4_cpu", "float32"
    if args.capacity:
        measure = measure_capacity
    document = begin_result(args.preset, args.device, dtype) | {"points": []}
    try:
        folder = make_log_dir(args.work_dir)
        weights = args.device == "cpu"
        args.checkpoint = make_checkpoint(args.preset, folder.parents[1], weights=weights)
        for mixed in args.mixed:
            with serving(args, folder / f"mixed-{mixed}", mixed) as servers:
                for point in measure(servers, args):
                    document["points"].append(point | {"mixed": mixed})
                    line = write_result(args.json, document)
    except (
        SetupError,
        WrongPathError,
        subprocess.TimeoutExpired,
        OSError,
        ImportError,
    ) as failure:
        return failed(failure)
    print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
