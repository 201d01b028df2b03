#!/usr/bin/env python3
"""Measure prefill speedup, and the ceiling that no implementation can beat, on a GPU or a CPU.

Runs SGLang's ModelRunner in this process (no scheduler, no HTTP), on a GPU or on the CPU platform,
and times the same batch three ways, interleaved in one run:

* **off**: the stock forward (``SGLANG_GEMMA4_YOCO=0``);
* **on**: with fast prefill;
* **front-only**: without the tail, a time that no implementation can beat.

For each batch it prints medians with 20th and 80th percentiles, the ratio off/on and the ceiling
off/front-only; its document also has the overhead on forwards that run as stock, and
counts of the host's work in a forward (``host_work``). It verifies that on and off give the same
answer, and how many rows each layer computed. A batch for which the fast path was not active, and
gave no reason, is listed in the document as ``not_active``, and the next one is measured. E2B_HOST
and E4B_HOST have the real models' layers, and are tiny otherwise.

With ``--graphs tail`` the tail is captured, as on a server with CUDA graphs. With ``--graphs
prefills`` (or the flag alone) SGLang captures its prefills too, in its own buckets of rows, and
there are two more ways: **off replayed** runs SGLang's captured prefill to its end, **on replayed**
leaves it for the package's captured tail, unless the outcome beside it (``path``) says otherwise.
They are timed on a GPU only, in turns with the others. On a CPU a replay runs the captured
operations one by one, so only the host's other work is measured there.

Output contract: a line for each batch on stdout; the last line is one JSON document. Exit status: 0
if everything was measured, 1 if an answer differs in float32 or "on" cannot be reported.

    python scripts/bench/bench_prefill.py --preset E2B_MINI --lengths 128 512 2048
    python scripts/bench/bench_prefill.py --lengths 4 64 --decoding 0 31 --min-skipped-rows 1
    python scripts/bench/bench_prefill.py --preset E2B --graphs tail    # on a GPU

Needs the environment that ``scripts/demo.py`` makes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import timeit
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import new_parser
from scripts.result_files import REHEARSAL, begin_result, device_name, write_result
from sglang_gemma4_yoco.commands.console import say
from sglang_gemma4_yoco.commands.verify.comparison import Times
from sglang_gemma4_yoco.commands.verify.verify import parse_positive
from sglang_gemma4_yoco.settings import name_of

if TYPE_CHECKING:
    import torch

    from scripts.bench.host_work import Counts

WAYS = ("off", "on", "front")
OFF_REPLAYED, ON_REPLAYED = REPLAYED = ("off replayed", "on replayed")
# Larger prefills stay eager on a CPU, where a captured one keeps every intermediate result.
MOST_CAPTURED = 1024
# A prefill of this many rows is always captured: the package's self-check fits into it.
CHECKED = 32
# The first run is slower; in the many seconds of a larger batch the difference does not show.
WARM_UP_ROWS = 4096
# Minimum standard deviation of the logits. Below it all are alike, as with SGLang's dummy weights,
# and on agrees with off whatever it computes.
LEAST_SPREAD = 0.01
GEMMA3N = "GEMMA3N_"  # prefix of the names of its presets
CONTEXT = 64  # cached tokens of a request that decodes in the same batch


@dataclass(frozen=True)
class Load:
    """One batch to measure.

    Attributes:
        length: new tokens of each prompt.
        batch_size: prompts.
        decoding: further requests with one new token, as a mixed batch has them.
        read: share of each prompt's rows with input logprobs; 0: only the last row is read.
    """

    length: int
    batch_size: int
    decoding: int = 0
    read: float = 0.0

    @property
    def total(self) -> int:
        """Return the number of rows of the batch."""
        return self.length * self.batch_size + self.decoding

    @property
    def suffix(self) -> int:
        """Return the number of kept rows of each prompt, at least 1."""
        return max(round(self.length * self.read), 1)

    @property
    def kept(self) -> int:
        """Return the number of kept rows of the batch."""
        return self.suffix * self.batch_size + self.decoding


@dataclass(frozen=True)
class Replayed:
    """Result of a prefill that SGLang replays.

    Attributes:
        path: the outcome that the package reports, or the reason why it fell back.
        max_logit_difference: from the eager stock forward.
        same_tokens: whether the greedy next tokens are the same.
        times: on a GPU only.
    """

    path: str
    max_logit_difference: float
    same_tokens: bool
    times: Times | None = None


@dataclass(frozen=True)
class Point:
    """Measurements of one batch.

    Attributes:
        path: the outcome that the package reports, or the reason why it fell back.
        rows: FFN rows of the first and of the last layer with the fast path on.
        max_logit_difference: between on and off, over the last row of every prompt.
        same_tokens: whether the greedy next tokens are the same.
        ratio: off / on; ``ceiling`` is off / front-only.
        host: counts of the host's work, by way; see ``host_work``.
        replayed: results of the ways in which SGLang replays the prefill; empty if it has captured
            none of this length.
        profile: ``profile``, by way; empty unless requested.
    """

    load: Load
    path: str
    rows: tuple[int, int]
    max_logit_difference: float
    same_tokens: bool
    off: Times
    on: Times
    front: Times
    ratio: float
    ceiling: float
    host: dict[str, Counts]
    replayed: dict[str, Replayed]
    profile: dict[str, Any]

    @property
    def differs(self) -> bool:
        """Return True if an answer differs from stock's in float32."""
        answers: list[Point | Replayed] = [self, *self.replayed.values()]
        return any(not one.same_tokens or one.max_logit_difference > 1e-3 for one in answers)


class NotActiveError(Exception):
    """The fast path did not run as requested, or the logits are too alike to compare."""


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line; see ``--help``."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    presets = ["E2B", "E4B", "E2B_MINI", "E4B_MINI", "E2B_TINY", "E2B_HOST", "E4B_HOST"]
    presets += ["GEMMA3N_E2B_MINI", "GEMMA3N_E4B_MINI"]
    add("--preset", choices=presets, default="E2B_MINI", help="a model with random weights")
    lengths = [128, 512, 2048, 8192]
    add("--lengths", type=parse_positive, nargs="+", default=lengths, help="tokens of a prompt")
    add("--batch-sizes", type=parse_positive, nargs="+", default=[1, 4], help="prompts of a batch")
    add("--decoding", type=int, nargs="+", default=[0], help="requests that decode in the batch")
    add("--read", type=float, nargs="+", default=[0.0], help="share of each prompt with logprobs")
    fewest = "cut a prefill that can skip this many rows, regardless of the rule"
    add("--min-skipped-rows", type=parse_positive, help=fewest)
    add("--profile", nargs="*", default=[], choices=WAYS, help="ways to profile too")
    add("--repeats", type=parse_positive, default=7, help="timed forwards of each way")
    add("--graphs", nargs="?", const="prefills", choices=("tail", "prefills"), help="see above")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to run")
    add("--json", type=Path, help="also write the JSON document to this file")
    return parser.parse_args()


def loads(args: argparse.Namespace) -> list[Load]:
    """Return the batches to measure."""
    every = product(args.batch_sizes, args.decoding, args.read, args.lengths)
    return [Load(length, size, decoding, read) for size, decoding, read, length in every]


def choose_device(wanted: str) -> str:
    """Return ``cpu`` or ``cuda``; for a CPU, select its platform before SGLang is imported."""
    import torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        os.environ["SGLANG_PLATFORM"] = "gemma4_cpu"
        return "cpu"
    return "cuda"


def build_engine(
    preset: str, device: str, folder: Path, rows: int, *, graphs: bool, prefills: Sequence[int] = ()
) -> Any:
    """Return the model on SGLang's ModelRunner.

    Args:
        preset: made in ``folder``, with random weights.
        rows: of the largest batch.
        graphs: whether CUDA graphs are on.
        prefills: lengths of the prefills that SGLang captures; it captures no others.
    """
    from sglang_gemma4_reference import checkpoint, gemma3n
    from sglang_gemma4_reference.engine import Engine

    options: dict[str, Any] = {"device": device, "dtype": "bfloat16", "load_format": "dummy"}
    # The pool of the window layers must hold the batch too.
    options |= {"max_total_tokens": rows + 1024, "swa_full_tokens_ratio": 1.0}
    options["disable_cuda_graph"] = not graphs
    if device == "cpu":
        options["dtype"] = "float32"
    if graphs:
        options["cuda_graph_bs_decode"] = [1]
    if prefills:
        options |= {"cuda_graph_backend_prefill": "breakable", "cuda_graph_bs_prefill": prefills}
    path = folder / preset
    if preset.startswith(GEMMA3N):
        gemma3n.write_config(path, gemma3n.PRESETS[preset.removeprefix(GEMMA3N)])
    else:
        checkpoint.write_checkpoint(path, checkpoint.PRESETS[preset], weights=False)
    with ExitStack() as span:
        if prefills:
            span.enter_context(capturable(device))
        engine = Engine(path, **options)
    randomise(engine)
    return engine


def buckets(args: argparse.Namespace, device: str) -> list[int]:
    """Return the rows of the prefills that SGLang captures: of its own buckets, those in use."""
    from sglang.srt.arg_groups.cuda_graph_hook import generate_prefill_cuda_graph_batch_sizes

    from sglang_gemma4_reference import releases

    on_cpu = device == "cpu"
    if args.graphs != "prefills" or (on_cpu and not releases.records_prefills()):
        return []
    totals = {CHECKED, *(load.total for load in loads(args))}
    own, found = generate_prefill_cuda_graph_batch_sizes(2 * max(totals)), set()
    for total in totals:
        if total <= MOST_CAPTURED or not on_cpu:
            found.add(own[bisect_left(own, total)])
    return sorted(found)


def capturable(device: str) -> AbstractContextManager[object]:
    """Let SGLang capture prefills in the ``with`` block, on a CPU too."""
    if device != "cpu":
        return nullcontext()
    from sglang_gemma4_reference import prefill_graphs

    return prefill_graphs.recordable()


def capture(engine: Any) -> None:
    """Capture the tail, or raise ``NotActiveError``; decode steps stay eager."""
    from sglang_gemma4_reference import releases
    from sglang_gemma4_yoco.core.state import get_state

    releases.record_decode_steps(engine.runner)
    known = get_state(engine.text_model)
    if known.captured is None:
        raise NotActiveError(f"the tail is {known.report.tail_mode}")
    engine.runner.decode_cuda_graph_runner = None


def randomise(engine: Any) -> None:
    """Draw weights whose answers depend on the whole prompt, which dummy weights' do not."""
    import torch

    from sglang_gemma4_reference import checkpoint, gemma3n

    torch.manual_seed(0)
    model, draw, prefix = engine.text_model, checkpoint.randomise, "model.language_model"
    if hasattr(model, "altup_projections"):
        draw, prefix = gemma3n.randomise, "model"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw(f"{prefix}.{name}", weight)
        for layer in model.layers:
            if hasattr(layer, "layer_scalar"):
                layer.layer_scalar.fill_(0.95)


def must_have_spread(logits: torch.Tensor) -> None:
    """Raise ``NotActiveError`` if the answers would be the same whatever was computed."""
    spread = float(logits.float().std())
    if device_name(logits.device.type) == REHEARSAL:
        return
    if not spread >= LEAST_SPREAD:  # also if NaN
        raise NotActiveError(f"the logits' standard deviation is {spread:.1e}: nothing is compared")


@contextmanager
def served(engine: Any, way: str) -> Iterator[None]:
    """Turn the fast path and SGLang's replays on or off for ``way`` in the ``with`` block."""
    from sglang_gemma4_reference.engine import switched
    from sglang_gemma4_yoco import compat
    from sglang_gemma4_yoco.core import eligibility

    patched, switch = mock.patch.object, "1"
    if way in ("off", OFF_REPLAYED):
        switch = "0"
    with ExitStack() as span:
        span.enter_context(switched(switch))
        if way not in REPLAYED and compat.server.get_captured_prefills(engine.runner) is not None:
            runner = engine.runner.prefill_cuda_graph_runner
            span.enter_context(patched(runner, "can_run_graph", return_value=False))
        if way == "front":  # as an intermediate chunk: the tail is skipped
            span.enter_context(patched(eligibility, "is_intermediate_chunk", return_value=True))
        yield


def timed(engine: Any, batch: Any, way: str) -> tuple[float, Any]:
    """Return the seconds and the logits of one forward."""
    from sglang_gemma4_yoco.compat.server import wait_for_device

    device = engine.runner.device
    with served(engine, way):
        wait_for_device(device)
        began = time.perf_counter()
        output = engine.forward(batch)
        wait_for_device(device)
        return time.perf_counter() - began, output.next_token_logits


def timed_in_turns(
    engine: Any, batch: Any, ways: Sequence[str], repeats: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the seconds of each way's forwards, and its last logits; rounds rotate the order."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    logits = {}
    order = list(ways)
    for _ in range(repeats):
        for way in order:
            spent, logits[way] = timed(engine, batch, way)
            seconds[way].append(spent)
        order.append(order.pop(0))
    return seconds, logits


def rows_of_forward(engine: Any, batch: Any) -> list[int]:
    """Return the FFN rows of each layer with the fast path on, from hooks; 0 if replayed."""
    rows = []
    with ExitStack() as span:
        for layer in engine.text_model.layers:
            hook = layer.mlp.register_forward_pre_hook(lambda _, x: rows.append(x[0].shape[0]))
            span.enter_context(hook)
        timed(engine, batch, "on")
    return rows + [0] * (len(engine.text_model.layers) - len(rows))


def with_outcome(forward: Callable[[], Any]) -> tuple[str, Any]:
    """Return the outcome of one ``forward``, and its result.

    Raise ``NotActiveError`` unless the package counts exactly one.
    """
    from sglang_gemma4_yoco import counters

    counters.served.forwards.clear()
    given = forward()
    if len(counters.served.forwards) != 1:
        raise NotActiveError(f"the package reports {dict(counters.served.forwards)}")
    return str(next(iter(counters.served.forwards))), given


def path_taken(engine: Any, batch: Any, load: Load) -> tuple[str, list[int]]:
    """Return the outcome and each layer's rows; raise ``NotActiveError`` if they do not match."""
    from sglang_gemma4_yoco import counters

    outcome, rows = with_outcome(partial(rows_of_forward, engine, batch))
    launched = load.kept
    if outcome == counters.TAIL_CAPTURED:
        launched = 0
    fast = rows[0] == load.total > load.kept and rows[-1] == launched
    if fast != (outcome in (counters.TAIL_CAPTURED, counters.TAIL_EAGER)):
        raise NotActiveError(f"the package says {outcome!r}, the layers computed {rows} rows")
    return outcome, rows


def prompts(load: Load, vocabulary: int) -> list[Any]:
    """Return the requests of a batch, whose random tokens are always the same."""
    from sglang_gemma4_reference.engine import Prompt

    draw = random.Random(load.length * 1000 + load.batch_size)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(300, vocabulary) for _ in range(count))

    start = load.length - load.suffix
    if load.read == 0:
        start = -1
    found = []
    for _ in range(load.batch_size):
        found.append(Prompt((), tokens(load.length), logprob_start=start))
    for _ in range(load.decoding):
        found.append(Prompt(tokens(CONTEXT), tokens(1)))
    return found


def replayed(engine: Any, batch: Any, rows: int) -> dict[str, Replayed]:
    """Return the results of the replayed ways; empty if SGLang has no bucket for these rows.

    They are compared with the eager stock forward.
    """
    if rows > max(captured_rows(engine), default=0):
        return {}
    _, stock = timed(engine, batch, "off")
    found = {}
    for way in REPLAYED:
        path, (_, logits) = with_outcome(partial(timed, engine, batch, way))
        found[way] = Replayed(path, *agreement(logits, stock))
    return found


def agreement(logits: torch.Tensor, stock: torch.Tensor) -> tuple[float, bool]:
    """Return the largest difference of two answers' logits; True if their greedy tokens agree."""
    same = (logits.argmax(-1) == stock.argmax(-1)).all()
    return float((logits - stock).abs().max()), bool(same)


def captured_rows(engine: Any) -> list[int]:
    """Return the lengths of the prefills that SGLang has captured."""
    runner = getattr(engine.runner, "prefill_cuda_graph_runner", None)
    graphs = getattr(getattr(runner, "backend", None), "_graphs", ())
    return sorted(getattr(key, "size", key) for key in graphs)


def measure_host(engine: Any, batch: Any, ways: Sequence[str]) -> dict[str, Counts]:
    """Return the host's work in each way; raise ``NotActiveError`` if a replay did not happen."""
    from scripts.bench import host_work

    counts = {}
    for way in ways:
        with served(engine, way):
            counts[way] = host_work.count(partial(engine.forward, batch))
        if way in REPLAYED and counts[way].replays < 2:
            raise NotActiveError(f"{way}: SGLang has replayed no segments")
    return counts


def profile(engine: Any, batch: Any, way: str) -> dict[str, Any]:
    """Return the breakdown of one prefill's time.

    Host time and end-to-end time are measured without the profiler, which slows the host down; the
    device's times in one forward with it.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

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

    It is idle when nothing is queued, so it waits for the host; kernels run on one stream. On a CPU
    the innermost operations count as kernels.
    """
    totals, calls, ends = Counter[str](), Counter[str](), []
    for event in events:
        # A named range of the host also appears on the device's time line, but is no work.
        is_work = not event.is_user_annotation and not event.cpu_children
        if event.device_type.name == device.upper() and is_work:
            span = event.time_range
            totals[event.name] += span.end - span.start
            calls[event.name] += 1
            ends += [span.start, span.end]
    if not ends:
        raise NotActiveError("the profiler has seen no work of the device: it needs CUPTI")
    busy = totals.total()
    return {
        "device_busy_ms": busy / 1e3,
        "device_idle_ms": (max(ends) - min(ends) - busy) / 1e3,
        "kernels": calls.total(),
        "largest": [[name[:120], calls[name], us / 1e3] for name, us in totals.most_common(10)],
    }


def measure(engine: Any, load: Load, repeats: int, *profiled: str) -> Point:
    """Return the measurements of one batch, all ways interleaved; compare the answers.

    Raise ``NotActiveError`` if the fast path did not run and gave no reason, or if the logits are
    too alike to compare. ``profiled`` ways are profiled too.
    """
    batch = engine.schedule(prompts(load, engine.text_model.config.vocab_size), slots=None)
    path, rows = path_taken(engine, batch, load)
    # On a GPU each shape may select, load or compile its own kernels.
    if load.total <= WARM_UP_ROWS or engine.runner.device == "cuda":
        for way in WAYS:
            timed(engine, batch, way)
    by_replay = replayed(engine, batch, load.total)
    ways = [*WAYS]
    if engine.runner.device == "cuda":
        ways += by_replay
    seconds, logits = timed_in_turns(engine, batch, ways, repeats)
    must_have_spread(logits["off"])
    off, on, front, *of_replays = map(Times.of, seconds.values())
    for way, times in zip(by_replay, of_replays, strict=False):  # none on a CPU
        by_replay[way] = replace(by_replay[way], times=times)
    difference, same_tokens = agreement(logits["on"], logits["off"])
    return Point(
        load=load,
        path=path,
        rows=(rows[0], rows[-1]),
        max_logit_difference=difference,
        same_tokens=same_tokens,
        off=off,
        on=on,
        front=front,
        ratio=off.median / on.median,
        ceiling=off.median / front.median,
        host=measure_host(engine, batch, ("off", "on", *by_replay)),
        replayed=by_replay,
        profile={way: profile(engine, batch, way) for way in profiled},
    )


class IdleBackend:
    """An attention backend that plans nothing."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Do nothing."""


def measure_gate(engine: Any) -> dict[str, float]:
    """Return the overhead on forwards that run as stock, in microseconds.

    Stock functions that do nothing are called with the package's wrappers around them, and without.
    """
    from sglang_gemma4_reference import releases
    from sglang_gemma4_reference.engine import Prompt
    from sglang_gemma4_yoco import compat
    from sglang_gemma4_yoco.core import planning
    from sglang_gemma4_yoco.core.backend_pair import BackendPair
    from sglang_gemma4_yoco.core.forward import wrap_model_forward
    from sglang_gemma4_yoco.core.state import ModelState
    from sglang_gemma4_yoco.models import registry

    def stock(*_: Any) -> None:
        pass

    def taken(forward: Callable[..., Any], backend: IdleBackend, forward_batch: Any) -> float:
        arguments = (model, forward_batch.input_ids, forward_batch.positions, forward_batch)
        planned = backend.init_forward_metadata
        timer = timeit.Timer(lambda: (planned(forward_batch), forward(*arguments)))
        number, _ = timer.autorange()
        return min(timer.repeat(5, number)) / number * 1e6  # the minimum: other load only adds time

    backend, model, wrapped = IdleBackend(), engine.text_model, wrap_model_forward(stock)
    attention = BackendPair(backend, IdleBackend())
    known = ModelState(model, registry.find_adapter(model), None, attention)
    # Every row is read; eligibility checks that last but one.
    batch = engine.schedule([Prompt((), (5,)), Prompt((), (6,))])
    forward_batch, added = releases.forward_batch(batch, engine.runner), {}
    with mock.patch.dict(model.__dict__):  # the model's own state is restored
        known.attach(planning.plan_batch)
        for name in ("ineligible_prefill_us", "decode_us"):
            with_package = taken(wrapped, backend, forward_batch)
            added[name] = round(with_package - taken(stock, IdleBackend(), forward_batch), 3)
            forward_batch.forward_mode = compat.batch.ForwardMode.DECODE
        known.close()
    return added


def describe(preset: str, engine: Any) -> dict[str, Any]:
    """Return the origin of the figures: command, commit, model, machine and versions."""
    import torch

    dtype = next(engine.text_model.parameters()).dtype
    return {
        **begin_result(preset, engine.runner.device, str(dtype)),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "attention_backend": type(engine.runner.attn_backend).__name__,
    }


def show(point: Point) -> None:
    """Print a line for people, in which each way that may be cut has its counted outcome."""
    ways = {"off": point.off, f"on ({point.path})": point.on, "front only": point.front}
    for way, seen in point.replayed.items():
        if seen.times is not None:
            ways[f"{way} ({seen.path})"] = seen.times
    times = ", ".join(f"{way} {times} s" for way, times in ways.items())
    say(
        f"{point.load.batch_size} x {point.load.length} tokens: {times}; "
        f"off/on {point.ratio:.2f} of {point.ceiling:.2f}"
    )


def main() -> int:
    """Measure, print, and return the exit status."""
    args = parse_arguments()
    device = choose_device(args.device)
    if args.min_skipped_rows is not None:  # the package reads it when SGLang loads it
        os.environ[name_of("min_skipped_rows")] = str(args.min_skipped_rows)
    status = 0
    rows = max(args.lengths) * max(args.batch_sizes) + max(args.decoding) * (CONTEXT + 1)
    graphs, prefills = args.graphs is not None, buckets(args, device)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        engine = build_engine(args.preset, device, folder, rows, graphs=graphs, prefills=prefills)
        if graphs:
            capture(engine)
        document = describe(args.preset, engine)  # before the result file changes the checkout
        document |= {"points": [], "not_active": [], "gate": measure_gate(engine)}
        for load in loads(args):
            try:
                point = measure(engine, load, args.repeats, *args.profile)
            except NotActiveError as reason:
                say(f"not measured: {load}: {reason}", sys.stderr)
                document["not_active"].append({"load": asdict(load), "reason": str(reason)})
                status = 1
            else:
                show(point)
                document["points"].append(asdict(point))
                if point.differs and document["dtype"] == "torch.float32":
                    say(f"{load}: answers differ", sys.stderr)
                    status = 1
            line = write_result(args.json, document)  # after each point, so that nothing is lost
    print(line)
    return status


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except NotActiveError as reason:
        raise SystemExit(f"the fast path cannot be measured: {reason}") from None
