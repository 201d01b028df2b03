#!/usr/bin/env python3
"""Compare the growth of a fast server with that of a stock one, in a long run.

Serves a small random Gemma 4 on the CPU platform twice, in float32, with the fast path off and on,
and sends both the same random requests, in turns of a block each, so that other load on the machine
affects both alike. ``sglang_gemma4_reference.workload`` has the requests: short, long and chunked
prompts, shared prefixes, images, log-probabilities, streams, clients that leave, and aborts. One
answer of twenty must be JSON of a schema. After each block, when no request is left, a sample is
taken: private memory, open files and threads of each process, and the size of the log.

A run passes if

* every request is answered that nobody interrupts, and afterwards no token holds a slot;
* in each block the fast path was active on one server only, and no prefill failed;
* after the first tenth of the requests nothing grows more than it may (``judge``).

Output contract: lines for people on stdout; the last line is one JSON document. Exit status: 0 if
the run passed, 1 if not, 2 if it could not run, a server has died, or the fast path was not
active on one server only.

    python scripts/bench/soak.py --requests 600

Needs the environment that ``scripts/run_tests.py`` makes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.bench.random_workload import (
    ARGUMENTS,
    CLIENTS,
    PRESET,
    inspect_processes,
    make_requests,
    new_load_parser,
)
from scripts.command_line import failed, make_checkpoint, make_log_dir
from scripts.environment import SetupError
from scripts.result_files import begin_result, write_result
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.commands import status
from sglang_gemma4_yoco.commands.console import CommandError, say
from sglang_gemma4_yoco.commands.verify import servers

SAMPLES = 200
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
BROKEN_OFF, HELD = "requests broken off", "slots still held"
#: Counts that must be 0.
WRONG = (BROKEN_OFF, HELD, counters.FAILED)


@dataclass
class Seen:
    """What was seen of one server.

    Attributes:
        counts: of requests, of prefills by outcome, and of rows by whether the last layer computed
            them.
        series: samples by their name.
    """

    counts: Counter[str] = field(default_factory=Counter)
    series: dict[str, list[int]] = field(default_factory=dict)


def take_sample(server: servers.Server) -> Counter[str]:
    """Return the size of a server's log, and what its processes hold.

    Private memory is what is resident without files and shared memory: how much of those is
    resident depends on what else the machine runs.
    """
    found = Counter({"kB of log": server.log_file.stat().st_size // 1000})

    def look(process: Any) -> Any:
        memory, name = process.memory_info(), process.name().removeprefix("sglang::")
        private = (memory.rss - memory.shared) // 1000
        return name, private, process.num_fds(), process.num_threads()

    for name, private, files, threads in inspect_processes(server.process.pid, look):
        if name != "sh":  # it ends the server with this script
            found.update({f"kB of {name}": private, "open files": files, "threads": threads})
    return found


def send_block(server: servers.Server, block: Sequence[Any], seen: Seen) -> None:
    """Send a block of requests to one server, and add to what was seen of it."""
    from sglang_gemma4_reference.workload import Client, ask_all, broke_off, held_tokens

    client = Client(server.url)
    answers = ask_all(client, block, concurrency=CLIENTS)
    for request, answer in zip(block, answers, strict=True):
        end = "requests answered"
        if broke_off(request, answer):
            end = BROKEN_OFF
            say(f"{server.name}: {answer}")
        elif answer.aborted:
            end = "requests interrupted"
        seen.counts[end] += 1
    seen.counts[HELD] += held_tokens(client)
    seen.counts.update(servers.check_switch(server, "a block of requests"))
    for name, value in take_sample(server).items():
        seen.series.setdefault(name, []).append(value)


def soak(args: argparse.Namespace, logs: Path) -> tuple[Seen, Seen]:
    """Send all requests to a stock server and to a fast one; return what was seen of each."""
    from tqdm import trange

    checkpoint = make_checkpoint(PRESET, logs.parents[1])
    flags = ["--model-path", str(checkpoint), "--dtype", "float32", *ARGUMENTS]
    stock, fast = both = servers.make_pair(flags, logs, device="cpu")
    seen, size = (Seen(), Seen()), max(args.requests // SAMPLES, CLIENTS)
    with servers.run_servers(both, 600):
        for first in trange(0, args.requests, size):
            block = make_requests(size, args.seed + first)
            for request in block[::20]:
                request.body["sampling_params"]["json_schema"] = SCHEMA
            send_block(stock, block, seen[0])
            send_block(fast, block, seen[1])
        seen[1].counts.update(fast.states()[0][status.ENTRY]["rows"])
    return seen


def judge(stock: Sequence[float], fast: Sequence[float]) -> tuple[float, float, float]:
    """Return how much a series has grown on the stock server and on the fast one, and may have.

    Growth is from the second tenth to the last one, between medians. The fast server's may be as
    much as all samples of the stock server span, those of the first tenth included: what is
    allocated once and kept, one may allocate before the first tenth ends and the other after it.
    """
    tenth = max(len(stock) // 10, 1)
    before, after = slice(tenth, 2 * tenth), slice(-tenth, None)
    stock_grows, fast_grows = (median(x[after]) - median(x[before]) for x in (stock, fast))
    return stock_grows, fast_grows, max(stock) - min(stock)


def main() -> int:
    """Run, print, and return the exit status."""
    args = new_load_parser(__doc__, 20_000).parse_args()
    os.environ["SGLANG_PLATFORM"] = "gemma4_cpu"
    try:
        document = begin_result(PRESET, "cpu", "float32") | {"requests": args.requests}
        stock, fast = soak(args, make_log_dir(args.work_dir))
    except (SetupError, CommandError, servers.WrongPathError, OSError, ImportError) as failure:
        return failed(failure)
    growth = {name: judge(series, fast.series[name]) for name, series in stock.series.items()}
    problems = [name for name, (_, grows, allowed) in growth.items() if grows > allowed]
    problems += [name for name in WRONG if (stock.counts + fast.counts)[name]]
    document |= {"stock": vars(stock), "fast": vars(fast), "growth": growth, "problems": problems}
    line = write_result(args.json, document)
    say(f"Problems: {problems or 'none'}")
    print(line)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
