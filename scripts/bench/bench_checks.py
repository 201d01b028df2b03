#!/usr/bin/env python3
"""Do the check at start, audits and proofs tell a defect from rounding, on any weights?

Random models of many shapes, types and kinds of weights (sharp attention, large norms, outlier
channels) run on SGLang's ModelRunner with the unbroken package: no check, audit or proof may report
a difference. Then the package is broken in every way of ``breakages.py``, and the check at start
must find each on every model, by its own bound and several times over::

    python scripts/bench/bench_checks.py --results benchmark/results/checks_cpu.json \\
        --write benchmark/results/checks.md                        # an hour on two idle cores
    python scripts/bench/bench_checks.py --models 12 --only tiny        # a few minutes
    TRITON_INTERPRET=1 python scripts/bench/bench_checks.py --triton    # on SGLang's Triton backend

The weights are drawn into the loaded model, so that hundreds of models need no checkpoint of their
own; the reference platform replays captured tails in place of CUDA graphs.

Output contract: a line for each model and two tables on stdout; the last line is one JSON document.
The exit status is 1 after a false alarm, or if something broken was not found.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_PLATFORM", "gemma4_cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test" / "srt"))

import torch

from breakages import BREAKAGES
from environment import command_line, commit_of, package_of, write_whole
from generated import inserted, markdown
from harness.decode_graphs import recorded_decode_steps
from sglang_gemma4_reference import checkpoint, interpreter
from sglang_gemma4_reference.checkpoint import E2B, E2B_HOST, E2B_MINI, E2B_TINY, E4B_HOST, E4B_MINI
from sglang_gemma4_reference.engine import Engine, Prompt, reset_log, settings_changed, switched
from sglang_gemma4_yoco import log, settings
from sglang_gemma4_yoco.captured import proof
from sglang_gemma4_yoco.captured.graphs import TailGraphs
from sglang_gemma4_yoco.checking import audit, rounding
from sglang_gemma4_yoco.checking import start as check
from sglang_gemma4_yoco.loading import start

SHARPNESS = (0.5, 1.0, 2.0, 4.0, 8.0)
POST_NORMS = (0.5, 1.0, 2.0, 4.0)
OUTLIERS = (1.0, 50.0)
ENOUGH = 4.0  # times its bound is what everything broken must come to
AUDITED = 10  # batches of random traffic for each model

_E2B_WITHOUT_TOWERS = dataclasses.replace(
    E2B, vocab_size=4096, vision=E2B_MINI.vision, audio=None, image_tokens=70
)
_WINDOW_DONOR = dataclasses.replace(E2B_TINY, kv_shared_layers=3, sliding_per_full=1)
#: name -> shape, and how many models of it in bf16, fp16 and fp32.
SHAPES: dict[str, tuple[checkpoint.Gemma4Shape, tuple[int, int, int]]] = {
    "tiny": (E2B_TINY, (84, 10, 10)),
    "tiny, window donor": (_WINDOW_DONOR, (30, 4, 4)),
    "tiny, 256 wide": (dataclasses.replace(E2B_TINY, hidden_size=256, head_dim=64), (20, 2, 2)),
    "35 layers": (E2B_HOST, (12, 1, 1)),
    "42 layers": (E4B_HOST, (10, 1, 1)),
    "35 layers, 256 wide": (dataclasses.replace(E2B_HOST, hidden_size=256), (6, 1, 1)),
    "E2B_MINI": (E2B_MINI, (4, 0, 0)),
    "E4B_MINI": (E4B_MINI, (3, 0, 0)),
    "E2B's dimensions": (_E2B_WITHOUT_TOWERS, (1, 0, 0)),
}
TRITON: dict[str, tuple[checkpoint.Gemma4Shape, tuple[int, int, int]]] = {
    "tiny, on Triton": (dataclasses.replace(E2B_TINY, heads=2), (5, 1, 0)),
    "tiny, window donor, on Triton": (dataclasses.replace(_WINDOW_DONOR, heads=2), (5, 0, 1)),
}
# In the interpreter a check takes some ten seconds: fewer audits, and each model is broken in some
# of the ways alone, in turn.
_AUDITED_ON_TRITON, _BROKEN_ON_TRITON = 3, 4
MEASURED = (
    "sglang_gemma4_yoco",
    "test/reference",
    "scripts/bench/bench_checks.py",
    "scripts/bench/breakages.py",
)
PART, PART_ON_TRITON = "checks", "checks, on Triton"  # of the document
TIMED = ("E2B_MINI", "E4B_MINI")  # models whose time is not all the host's
DTYPES = ("bfloat16", "float16", "float32")


@dataclass
class Result:
    """What one model has shown.

    Attributes:
        check, audits, proof: the largest error of the unbroken package, in multiples of its bound.
        cost: what the check and an audit take; see ``costs``.
        found: breakage -> the error that the check has found, in multiples of its bound.
    """

    model: str
    dtype: str
    seed: int
    sharpness: float
    post_norms: float
    outliers: float
    check: float = 0.0
    audits: float = 0.0
    audited: int = 0
    proof: float = 0.0
    proved: int = 0
    seconds: float = 0.0
    cost: dict[str, float] = field(default_factory=dict)
    found: dict[str, float] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        name, least = min(self.found.items(), key=lambda one: one[1], default=("nothing", math.inf))
        return (
            f"{self.model}, {self.dtype}, sharpness {self.sharpness:g}, post-norms "
            f"{self.post_norms:g}, outliers {self.outliers:g}, seed {self.seed}: check "
            f"{self.check:.2f}, audits {self.audits:.2f}, proofs {self.proof:.2f}; "
            f"found least: {name}, {least:.1f} times its bound"
        )


@contextmanager
def engines(shape: checkpoint.Gemma4Shape, dtype: str) -> Iterator[Engine]:
    """An engine of this shape, its tail captured, whose weights are to be drawn."""
    with tempfile.TemporaryDirectory() as directory:
        path = checkpoint.write_checkpoint(
            directory, dataclasses.replace(shape, dtype=dtype), weights=False
        )
        engine = Engine(
            path,
            device="cpu",
            dtype=dtype,
            max_total_tokens=4096,
            load_format="dummy",
            cuda_graph_bs_decode=[1, 2, 4, 8],
        )
        with recorded_decode_steps(engine):
            yield engine


@torch.no_grad()
def draw(model: Any, shape: checkpoint.Gemma4Shape) -> None:
    """Draw the weights of a loaded ``Gemma4TextModel`` as a checkpoint's."""
    torch.manual_seed(shape.seed)
    for name, weight in model.named_parameters():
        drawn = torch.nn.Parameter(torch.empty(weight.shape))
        checkpoint.randomise(f"model.language_model.{name}", drawn)
        weight.copy_(drawn)
    checkpoint.scale(model, shape)


def kinds(count: int, seed: int) -> list[dict[str, Any]]:
    """Kinds of weights, ``count`` of them: all combinations in random order, over and over."""
    names = ("sharpness", "post_norms", "outliers")
    combined = itertools.product(SHARPNESS, POST_NORMS, OUTLIERS)
    every: list[dict[str, Any]] = [dict(zip(names, one, strict=True)) for one in combined]
    random.Random(seed).shuffle(every)
    return [every[i % len(every)] | {"seed": seed + i} for i in range(count)]


def traffic(draws: random.Random, vocabulary: int) -> list[Prompt]:
    """One to four requests: prefixes, lengths around the window, input log-probabilities."""

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draws.randrange(vocabulary // 10, vocabulary) for _ in range(count))

    prompts = []
    for _ in range(draws.randint(1, 4)):
        cached, new = draws.choice((0, 0, 3, 30, 70)), draws.randint(2, 60)
        start = cached + draws.randrange(new) if draws.random() < 0.2 else -1
        prompts.append(Prompt(ids(cached), ids(new), logprob_start=start))
    return prompts


def audited(engine: Engine, state: Any, draws: random.Random, number: int, result: Result) -> None:
    """Random prefills, every one audited."""
    reset_log()
    with settings_changed(audit=1):
        state.after_cut = audit.auditor(engine.runner, state)
    try:
        for _ in range(number):
            batch = engine.schedule(traffic(draws, engine.text_model.config.vocab_size))
            with switched("1"):
                engine.forward(batch, intermediate=draws.random() < 0.15)
    finally:
        state.after_cut = None
    result.audited = log.audits.agree + log.audits.differ
    result.audits = log.audits.worst


def proved(state: Any, runner: Any, result: Result) -> None:
    """Every graph of the captured tail, full and padded."""
    rows = state.captured.rows
    found = [one.excess for size in rows for one in proof.findings(state.captured, runner, size)]
    result.proof, result.proved = max(found), len(found)


def costs(engine: Engine, state: Any, seconds: float) -> dict[str, float]:
    """What a prefill of 512 tokens takes in ms, and an audited one; and the check, in small ones.

    Medians of seven, in turns; in a process that times nothing else, on a machine that may.

    Args:
        seconds: that the check has taken.
    """
    auditor = audit.Auditor(state, engine.runner.model.logits_processor, 1)
    prompt = [Prompt((), tuple(range(20, 20 + 512)))]
    few = [Prompt((), tuple(range(20, 27)))]
    ways: dict[str, tuple[str, list[Prompt], audit.Auditor | None]] = {
        "stock": ("0", prompt, None),
        "fast": ("1", prompt, None),
        "audited": ("1", prompt, auditor),
        "small": ("0", few, None),
    }
    took: dict[str, list[float]] = defaultdict(list)
    for _ in range(7):
        for way, (switch, prompts, state.after_cut) in ways.items():
            batch = engine.schedule(prompts)
            with switched(switch):
                began = time.perf_counter()
                engine.forward(batch)
                took[way].append(time.perf_counter() - began)
    state.after_cut = None
    medians = {way: statistics.median(times) for way, times in took.items()}
    cost = {f"{way}_ms": 1000 * medians[way] for way in ("stock", "fast", "audited")}
    return cost | {"check_in_small_stock_prefills": seconds / medians["small"]}


@torch.no_grad()
def judge(
    engine: Engine, result: Result, draws: random.Random, breaks: Sequence[str], number: int
) -> None:
    """The unbroken package, in the check, proofs and ``number`` audits; then every breakage."""
    state = start.of(engine.text_model)
    checked = check.check(engine.runner, state)
    if checked.worst is None:
        raise SystemExit(f"{result.model}: {checked}")
    result.check, result.seconds = checked.worst.excess, checked.seconds
    if isinstance(state.captured, TailGraphs):
        proved(state, engine.runner, result)
    audited(engine, state, draws, number, result)
    if result.model in TIMED and result.dtype == "bfloat16":
        result.cost = costs(engine, state, result.seconds)
    with check.comparing(engine.runner, state) as both:
        for name in breaks:
            with BREAKAGES[name](state) as applies:
                if applies:
                    broken = rounding.worst(both.findings())
                    result.found[name], result.where[name] = broken.excess, broken.what


#: A shape and a type, how many models of it, how they are broken, and whether on Triton.
Group = tuple[str, str, int, Sequence[str], bool]


def judged(group: Group) -> list[Result]:
    """All models of one shape and type; in a process of its own, which keeps their memory."""
    name, dtype, count, breaks, triton = group
    # Every row that can be skipped is; the check is called by hand.
    os.environ |= {settings.name_of("min_skipped_rows"): "1", settings.name_of("self_check"): "0"}
    logging.disable(logging.ERROR)  # what is broken on purpose is logged, again and again
    torch.set_num_threads(1)
    if triton:
        interpreter.make_quick()
        interpreter.make_exact()  # as it comes, it multiplies bf16 as integers
    shapes = TRITON if triton else SHAPES
    shape, results = shapes[name][0], []
    seed = 1000 * list(shapes).index(name) + 100 * DTYPES.index(dtype)
    seed += 5 * list(shapes).index(name) * triton  # so that every way is taken
    with engines(shape, dtype) as engine:
        for kind in kinds(count, seed):
            draw(engine.text_model, dataclasses.replace(shape, outlier_share=0.02, **kind))
            result, draws = Result(name, dtype, **kind), random.Random(kind["seed"])
            if triton:
                first = _BROKEN_ON_TRITON * kind["seed"] % len(breaks)
                some = [*breaks[first:], *breaks[:first]][:_BROKEN_ON_TRITON]
                judge(engine, result, draws, some, _AUDITED_ON_TRITON)
            else:
                judge(engine, result, draws, breaks, AUDITED)
            results.append(result)
            print(result, flush=True)
    return results


def run(args: Namespace) -> Iterator[list[Result]]:
    """All models that are asked for, by shape and type."""
    breaks = [name for name in BREAKAGES if args.breakage in name]
    groups = [
        (name, dtype, min(count, args.models or count), breaks, args.triton)
        for name, (_, counts) in (TRITON if args.triton else SHAPES).items()
        for dtype, count in zip(DTYPES, counts, strict=True)
        if args.only in name and count
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        yield from pool.map(_in_a_process_of_its_own, groups)


def _in_a_process_of_its_own(group: Group) -> list[Result]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(judged, group).result()


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """False alarms, and the smallest factor of each breakage."""
    factors: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for result in results:
        for name, factor in result.found.items():
            model = f"{result.model}, {result.dtype}, seed {result.seed}"
            factors[name].append((factor, model))
    largest = {
        "check": [r.check for r in results],
        "audits": [r.audits for r in results],
        "proofs": [r.proof for r in results],
    }
    return {
        "models": len(results),
        "false_alarms": {kind: sum(x > 1 for x in errors) for kind, errors in largest.items()},
        "largest": {kind: max(errors) for kind, errors in largest.items()},
        "cost": {f"{r.model}, seed {r.seed}": r.cost for r in results if r.cost},
        "audited": sum(r.audited for r in results),
        "proved": sum(r.proved for r in results),
        "breakages": {
            name: {"models": len(found), "smallest": min(found)[0], "on": min(found)[1]}
            for name, found in factors.items()
        },
    }


def table(document: Mapping[str, Any]) -> str:
    """What was found, for ``benchmark/results/checks.md``."""
    largest, alarms = document["largest"], document["false_alarms"]
    lines = [
        f"{document['models']} models, commit `{document['commit']}`, "
        f"{document['seconds'] / 60:.0f} minutes. False alarms: {alarms['check']} of "
        f"{document['models']} checks, {alarms['audits']} of {document['audited']} audited "
        f"prefills, {alarms['proofs']} of {document['proved']} proofs. The largest errors of the "
        f"unbroken package, in multiples of their bounds: {largest['check']}, {largest['audits']}, "
        f"{largest['proofs']}.",
        "",
        markdown(
            ("broken", "models", "found: at least so many times its bound", "on"),
            ((name, *found.values()) for name, found in document["breakages"].items()),
        ),
    ]
    if document["cost"]:
        head = ("model", "stock, ms", "fast, ms", "audited, ms")
        rows = ((name, *cost.values()) for name, cost in document["cost"].items())
        lines += ["", markdown((*head, "the check, in prefills of 7 tokens"), rows)]
    return "\n".join(lines)


def finite(value: Any) -> Any:
    """``value`` for JSON, which has no infinity."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.3g}") if math.isfinite(value) else "infinite"
    return value


def parse_arguments() -> Namespace:
    """The command line; see ``--help``."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--models", type=int, help="at most so many of each shape and type")
    add("--only", default="", help="shapes with this in their name")
    add("--breakage", default="", help="breakages with this in their name")
    add("--jobs", type=int, default=2, help="processes")
    add("--triton", action="store_true", help="on SGLang's Triton backend")
    add("--results", type=Path, help="where to put the results, as JSON")
    add("--write", type=Path, help="a document to put the table into")
    return parser.parse_args()


def main() -> int:
    """Run, print, write."""
    args = parse_arguments()
    began = time.monotonic()
    commit = commit_of(MEASURED)
    results: list[Result] = []
    for group in run(args):  # a run that is cut short leaves what it has found
        results += group
        counts = summary(results)
        document = finite(
            {
                "commit": commit,
                "package": package_of(),
                "seconds": round(time.monotonic() - began),
                **counts,
                "results": [dataclasses.asdict(result) for result in results],
            }
        )
        if args.results:
            write_whole(args.results, json.dumps(document) + "\n")
        if args.write:
            part = PART_ON_TRITON if args.triton else PART
            args.write.write_text(inserted(args.write.read_text(), part, table(document)))
    for name, found in counts["breakages"].items():
        print(f"{name:45} {found['models']:4} models, at least {found['smallest']:.3g} times")
    document.pop("results")
    print(json.dumps(document))
    good = not any(counts["false_alarms"].values()) and all(
        found["smallest"] > ENOUGH for found in counts["breakages"].values()
    )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
