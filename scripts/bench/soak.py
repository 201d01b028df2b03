#!/usr/bin/env python3
"""Compare the growth of a fast server with that of a stock one, in a long run.

Serves a small random Gemma 4 on the CPU platform twice, in float32, with the fast path off and on,
and sends both the same random requests, in turns of a block each, so that other load on the machine
affects both alike. ``sglang_gemma4_reference.workload`` has the requests: short, long and chunked
prompts, shared prefixes, images, log-probabilities, streams, clients that leave, and aborts. One
answer in twenty must match a JSON schema. After each block, when no request is left, a sample is
taken: private memory, open files and threads of each process, and the size of the log. Both servers
run in ``ENVIRONMENT``, so that memory that is freed is no longer counted.

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
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.bench.random_workload import (
    ARGUMENTS,
    CLIENTS,
    PRESET,
    make_requests,
    new_load_parser,
)
from scripts.command_line import failed, make_checkpoint, make_log_dir
from scripts.environment import SetupError
from scripts.result_files import begin_result, write_result
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.commands import status
from sglang_gemma4_yoco.commands.console import say
from sglang_gemma4_yoco.commands.verify import servers

SAMPLES = 200
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
FAILED, HELD = "requests failed", "slots still held"
#: Settings of glibc. One heap for all threads, and 128 KiB, its default, as a fixed threshold:
#: larger blocks go back to the system when they are freed. By default glibc raises the threshold to
#: 32 MiB when it frees such blocks, and then keeps tens of MiB, at different times in each process.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "SGLANG_PLATFORM": "gemma4_cpu",
}
#: Counts that must be 0.
WRONG = (FAILED, HELD, counters.FAILED)


@dataclass
class Seen:
    """Observations of one server.

    Attributes:
        counts: of requests, of prefills by outcome, and of rows by whether the last layer computed
            them.
        series: samples by their name.
    """

    counts: Counter[str] = field(default_factory=Counter)
    series: dict[str, list[int]] = field(default_factory=dict)


def take_sample(server: servers.Server) -> Counter[str]:
    """Return the size of a server's log, and what its processes hold.

    Private memory is resident memory less files and shared memory, whose resident part depends on
    what else runs on the machine.
    """
    import psutil

    found = Counter({"kB of log": server.log_file.stat().st_size // 1000})
    first = psutil.Process(server.process.pid)
    for process in [first, *first.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            memory, name = process.memory_info(), process.name().removeprefix("sglang::")
            if name == "sh":  # it ends the server with this script
                continue
            found[f"kB of {name}"] += (memory.rss - memory.shared) // 1000
            found["open files"] += process.num_fds()
            found["threads"] += process.num_threads()
    return found


def send_block(server: servers.Server, block: Sequence[Any], seen: Seen) -> None:
    """Send a block of requests to one server, and add to what was seen of it."""
    from sglang_gemma4_reference.workload import Client, ask_all, has_failed, held_tokens

    client = Client(server.url)
    answers = ask_all(client, block, concurrency=CLIENTS)
    for request, answer in zip(block, answers, strict=True):
        end = "requests answered"
        if has_failed(request, answer):
            end = FAILED
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
    """Return a series' growth on the stock server and on the fast one, and the allowed growth.

    Growth is from the second tenth to the last one, between medians. The fast server may grow by a
    twentieth more than the stock one, since their batches differ, plus the stock one's largest step
    between two samples: memory that is allocated once and kept may be allocated in the first tenth
    on one server, and after it on the other. A leak of 1 kB a request is 18 MB in 20,000 requests.
    """
    tenth = max(len(stock) // 10, 1)
    stock_grows, fast_grows = (
        median(series[-tenth:]) - median(series[: 2 * tenth][-tenth:]) for series in (stock, fast)
    )
    step = max((abs(after - before) for before, after in pairwise(stock)), default=0)
    return stock_grows, fast_grows, 1.05 * stock_grows + step


def main() -> int:
    """Run, print, and return the exit status."""
    args = new_load_parser(__doc__, 20_000).parse_args()
    os.environ |= ENVIRONMENT
    try:
        document = begin_result(PRESET, "cpu", "float32") | {"requests": args.requests}
        stock, fast = soak(args, make_log_dir(args.work_dir))
    except (SetupError, servers.WrongPathError, OSError, ImportError) as failure:
        return failed(failure)
    growth = {}
    for name, series in fast.series.items():
        stock.series.setdefault(name, [0] * len(series))  # a process that only the fast server has
        growth[name] = judge(stock.series[name], series)
    problems = [name for name, (_, grows, allowed) in growth.items() if grows > allowed]
    problems += [name for name in WRONG if (stock.counts + fast.counts)[name]]
    document |= {"stock": vars(stock), "fast": vars(fast), "growth": growth, "problems": problems}
    line = write_result(args.json, document)
    say(f"Problems: {problems or 'none'}")
    print(line)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
