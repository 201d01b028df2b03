#!/usr/bin/env python3
"""Compare a fast server's answers to random traffic with stock's, and check its health.

Serves a small random Gemma 4 on the CPU platform twice, in float32, with the fast path off and on,
and sends both the same random requests (``sglang_gemma4_reference.workload`` has the requests and
the comparison of answers). With ``--captured`` the fast server replays its decode steps, and
its tails for up to 16 prompts. With ``--failures-every N`` it gets the requests once more, while
every Nth forward that takes the fast path fails inside the tail: stock must serve those.

A run passes if

* every request is answered, and every answer is that of the stock server;
* the fast path was active on one server only, by the rows that the layers computed; in each forward
  the last layer computed exactly the rows that are read, or all if the package's own rule finds too
  few to skip; a captured tail was replayed; and stock served one forward for each injected failure;
* nothing leaks: after the last answer no token holds a slot, and SGLang's own checks of its pools,
  after every step and when idle, have reported nothing. ``soak.py`` watches the memory.

Output contract: lines for people on stdout; the last line is one JSON document. Exit status: 0 if
the run passed, 1 if not, 2 if it could not run or a server has died.

    python scripts/bench/random_workload.py --requests 200
    python scripts/bench/random_workload.py --requests 2000 --failures-every 100
    python scripts/bench/random_workload.py --requests 2000 --captured

Needs the environment that ``scripts/run_tests.py`` makes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import failed, make_checkpoint, make_log_dir, new_parser
from scripts.environment import HARNESS, REPO, SetupError
from scripts.result_files import begin_result, write_result
from sglang_gemma4_yoco.commands.console import say
from sglang_gemma4_yoco.commands.verify.verify import parse_positive

if TYPE_CHECKING:
    from harness.server import Server
    from sglang_gemma4_reference.workload import Request

sys.path.append(HARNESS)
PRESET = "E2B_TINY"
CLIENTS = 16
ARGUMENTS = ("--max-total-tokens", "32768", "--chunked-prefill-size", "1024")
CAPTURED_ROWS = (1, 2, 4, 8, 16)


@dataclass
class Pass:
    """One run of all requests against one server.

    Attributes:
        name: ``off``, ``on`` or ``on, with failures``.
        seconds: from the first request to the last answer.
        forwards: prefill forwards by outcome, derived from the rows that the layers computed.
        eligible_share: of those with rows to skip, the share that was cut, failed ones included.
        injected: failures injected into the tail.
        replays: forwards that replayed a captured tail.
        used_tokens: slots that tokens still held after the last answer.
        problems: the conditions that failed, as text.
    """

    name: str
    seconds: float = 0.0
    forwards: dict[str, int] = field(default_factory=dict)
    eligible_share: float = 0.0
    injected: int = 0
    replays: int = 0
    used_tokens: int = 0
    problems: list[str] = field(default_factory=list)

    def require(self, holds: object, otherwise: str) -> None:
        """Note a problem unless ``holds`` is true."""
        if not holds:
            self.problems.append(otherwise)


def run_pass(
    name: str, server: Server, workload: Sequence[Any], captured: Sequence[int]
) -> tuple[Pass, list[Any]]:
    """Send all requests to one server, and observe it; return the answers too.

    ``captured`` are the row counts for which its tail is captured.
    """
    from tqdm import tqdm

    from sglang_gemma4_reference import tail_failures
    from sglang_gemma4_reference.workload import Client, ask_all, held_tokens

    result, client = Pass(name), Client(server.url)
    mark, injected = server.mark(), len(tail_failures.so_far(server.failures))
    server.forget_prefixes()
    with tqdm(total=len(workload), desc=name, unit="request") as progress:
        began = time.monotonic()
        answers = ask_all(client, workload, concurrency=CLIENTS, answered=progress.update)
        result.seconds = time.monotonic() - began
    result.used_tokens = held_tokens(client)
    result.injected = len(tail_failures.so_far(server.failures)) - injected
    judge_forwards(result, server.fast, server.prefills(since=mark), captured)
    result.require(not result.used_tokens, f"{result.used_tokens} slots are held by no request")
    result.require("leak detected" not in server.log().lower(), "SGLang reports a leak in its log")
    return result, answers


def judge_forwards(
    result: Pass, fast: bool, prefills: Sequence[Any], captured: Sequence[int]
) -> None:
    """Set the figures of ``result`` about forwards, and note what is wrong with them."""
    from harness.layer_rows import rows_and_replays
    from sglang_gemma4_reference import workload as kinds

    forwards = kinds.outcomes(prefills)
    result.forwards = dict(forwards.most_common())
    served_by_stock = forwards[kinds.SERVED_BY_STOCK]
    shortened = forwards[kinds.ACTIVE] + forwards[kinds.SKIPPED] + served_by_stock
    with_rows_to_skip = forwards.total() - forwards[kinds.NOTHING_TO_SKIP]
    result.eligible_share = shortened / max(with_rows_to_skip, 1)
    result.replays = sum(prefill.replays for prefill in prefills)
    wrong = f"{result.injected} failures, {served_by_stock} forwards served by stock"
    result.require(served_by_stock == result.injected, wrong)
    if not fast:
        stock = {kinds.STOCK, kinds.NOTHING_TO_SKIP}
        result.require(forwards.keys() <= stock, "the stock server skipped rows")
        return
    result.require(forwards[kinds.ACTIVE], "the fast path was not active")
    result.require(result.replays or not captured, "no tail was replayed")
    for prefill in prefills:
        rows, replays = rows_and_replays(prefill, 1, captured)  # one row to skip is enough
        if not replays:
            rows, replays = rows_and_replays(prefill, None, captured)
        if kinds.outcome(prefill) != kinds.SERVED_BY_STOCK:
            right = (prefill.rows[-1], prefill.replays) == (rows[-1], replays)
            result.require(right, f"a forward with {rows[-1]} rows to compute: {prefill}")


def make_requests(count: int, seed: int) -> list[Request]:
    """Return ``count`` random requests to a server of ``PRESET``."""
    from sglang_gemma4_reference.checkpoint import PRESETS
    from sglang_gemma4_reference.workload import random_requests

    vocabulary = PRESETS[PRESET].vocab_size
    return random_requests(count, seed=seed, vocabulary=vocabulary, longest=4000)


def run(args: argparse.Namespace, logs: Path) -> Iterator[tuple[Pass, Any]]:
    """Yield each pass, and for each after the first the comparison with the first one's answers."""
    from harness.server import DEFAULT_THRESHOLD, running
    from sglang_gemma4_reference.workload import Client, compare

    checkpoint = make_checkpoint(PRESET, args.work_dir)
    workload = make_requests(args.requests, args.seed)
    env = {**DEFAULT_THRESHOLD, "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    off = {"switch": "0", "arguments": ARGUMENTS, "env": env, "spawned": True}
    on, captured = off | {"switch": None}, tuple[int, ...]()
    if args.captured:
        captured = CAPTURED_ROWS
        on["arguments"] = (*ARGUMENTS, "--cuda-graph-bs-decode", *map(str, captured))
        on["env"] = env | {"GEMMA4_CPU_GRAPHS": "decode", "SGLANG_GEMMA4_YOCO_GRAPH_ROWS": "16"}
    with (
        running(checkpoint, logs / "off", **off) as stock,
        running(checkpoint, logs / "on", **on) as fast,
    ):
        result, reference = run_pass("off", stock, workload, ())
        yield result, None
        turns = {"on": 0}
        if args.failures_every:
            turns["on, with failures"] = args.failures_every
        for name, interval in turns.items():
            fast.failures.write_text(str(interval))
            result, answers = run_pass(name, fast, workload, captured)
            comparison = compare(workload, reference, answers, Client(stock.url).likeliest)
            result.problems += comparison.differences
            none = "no failure was injected (is test/reference up to date?)"
            result.require(result.injected or not interval, none)
            yield result, comparison


def new_load_parser(about: str | None, requests: int) -> argparse.ArgumentParser:
    """Return a parser with the flags of scripts that send random requests.

    Args:
        about: the script's docstring.
        requests: the default number of requests.
    """
    parser = new_parser(about)
    add = parser.add_argument
    add("--requests", type=parse_positive, default=requests, help="how many")
    add("--seed", type=int, default=0, help="seed of the requests")
    add("--work-dir", type=Path, default=REPO / ".demo", help="for logs and checkpoints")
    add("--json", type=Path, help="write the JSON document to this file too")
    return parser


def main() -> int:
    """Run, print, and return the exit status."""
    parser = new_load_parser(__doc__, 200)
    add = parser.add_argument
    add("--captured", action="store_true", help="replay decode steps and tails from graphs")
    add("--failures-every", type=int, default=0, metavar="N", help="see above")
    args = parser.parse_args()
    try:
        document = begin_result(PRESET, "cpu", "float32")
        document |= {"passed": True, "passes": [], "comparisons": []}
        logs = make_log_dir(args.work_dir)
        args.work_dir = logs.parents[1]
        say(f"Logs: {logs}")
        for one, comparison in run(args, logs):
            say(f"{one.name}: {one.seconds:.0f} s, {one.forwards}, {len(one.problems)} problems")
            for problem in one.problems[:20]:
                say(f"- {problem}")
            document["passed"] &= not one.problems
            document["passes"].append(asdict(one))
            if comparison is not None:
                document["comparisons"].append(asdict(comparison))
            line = write_result(args.json, document)  # a later pass may end without an answer
    except (SetupError, OSError, ImportError) as failure:
        return failed(failure)
    print(line)
    return int(not document["passed"])


if __name__ == "__main__":
    raise SystemExit(main())
