"""Random models on which ``bench_checks.py`` tries the checks, and the results of each.

The weights are drawn into the loaded model, so that hundreds of models need no checkpoint of their
own; the reference platform replays captured tails in place of CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("SGLANG_PLATFORM", "gemma4_cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from harness import checking
from harness.batches import tokens
from harness.breakages import BREAKAGES
from harness.decode_graphs import recorded_decode_steps
from harness.forwards import state_of
from sglang_gemma4_reference import checkpoint, interpreter
from sglang_gemma4_reference.checkpoint import E2B, E2B_HOST, E2B_MINI, E2B_TINY, E4B_HOST, E4B_MINI
from sglang_gemma4_reference.engine import Engine, Prompt, reset_log, switched
from sglang_gemma4_yoco import counters, settings
from sglang_gemma4_yoco.captured.graphs import TailGraphs
from sglang_gemma4_yoco.checking import audit, rounding, tail_graphs
from sglang_gemma4_yoco.checking import self_check as check

KINDS = {
    "sharpness": (0.5, 1.0, 2.0, 4.0, 8.0),
    "post_norms": (0.5, 1.0, 2.0, 4.0),
    "outliers": (1.0, 50.0),
}
DTYPES = ("bfloat16", "float16", "float32")

_E2B_WITHOUT_TOWERS = dataclasses.replace(
    E2B, vocab_size=4096, vision=E2B_MINI.vision, audio=None, image_tokens=70
)
_WINDOW_DONOR = dataclasses.replace(E2B_TINY, kv_shared_layers=3, sliding_per_full=1)
Shapes = dict[str, tuple[checkpoint.Gemma4Shape, tuple[int, int, int]]]
#: name -> shape, and how many models of it in bf16, fp16 and fp32.
SHAPES = {
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
TRITON = {
    "tiny, on Triton": (dataclasses.replace(E2B_TINY, heads=2), (5, 1, 0)),
    "tiny, window donor, on Triton": (dataclasses.replace(_WINDOW_DONOR, heads=2), (5, 0, 1)),
}
AUDITED = 10  # batches of random traffic for each model
# In the interpreter a check takes about ten seconds, so there are fewer audits, and each model gets
# only some of the breakages, in rotation.
_AUDITED_ON_TRITON, _BROKEN_ON_TRITON = 3, 4
TIMED = ("E2B_MINI", "E4B_MINI")  # models whose time is not only the host's


@dataclass(frozen=True)
class Group:
    """Models of one shape and type, which one process makes."""

    shape: str
    dtype: str
    count: int
    triton: bool


@dataclass
class Result:
    """Results of one model.

    Attributes:
        check, audits, proof: the largest error of the correct package, in multiples of its bound.
        cost: the time of the check and of an audit; see ``costs``.
        found: breakage -> the error that the check found, in multiples of its bound.
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

    def __str__(self) -> str:
        least = min(self.found.values(), default=math.nan)
        return (
            f"{self.model}, {self.dtype}, sharpness {self.sharpness:g}, post-norms "
            f"{self.post_norms:g}, outliers {self.outliers:g}, seed {self.seed}: check "
            f"{self.check:.2f}, audits {self.audits:.2f}, proofs {self.proof:.2f}; "
            f"errors of defects are at least {least:.1f} times the bound"
        )


def groups(only: str, models: int | None, triton: bool) -> list[Group]:
    """Return all groups of models whose shapes' names contain ``only``."""
    shapes, found = SHAPES, []
    if triton:
        shapes = TRITON
    for name, (_, counts) in shapes.items():
        for dtype, count in zip(DTYPES, counts, strict=True):
            if only in name and count:
                found.append(Group(name, dtype, min(count, models or count), triton))
    return found


@contextmanager
def engines(shape: checkpoint.Gemma4Shape, dtype: str) -> Iterator[Engine]:
    """Yield an engine of this shape, its tail captured, whose weights are to be drawn."""
    with tempfile.TemporaryDirectory() as directory:
        typed = dataclasses.replace(shape, dtype=dtype)
        path = checkpoint.write_checkpoint(directory, typed, weights=False)
        options: dict[str, Any] = {"max_total_tokens": 4096, "load_format": "dummy"}
        graphs = [1, 2, 4, 8]
        engine = Engine(path, device="cpu", dtype=dtype, cuda_graph_bs_decode=graphs, **options)
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
    """Return ``count`` kinds of weights: all combinations in random order, repeated."""
    every = list(itertools.product(*KINDS.values()))
    random.Random(seed).shuffle(every)
    found = []
    for number, kind in zip(range(count), itertools.cycle(every), strict=False):
        found.append({**dict(zip(KINDS, kind, strict=True)), "seed": seed + number})
    return found


def traffic(draws: random.Random) -> list[Prompt]:
    """Return one to four requests: prefixes, lengths around the window, input log-probabilities."""
    prompts = []
    for _ in range(draws.randint(1, 4)):
        cached, new = draws.choice((0, 0, 3, 30, 70)), draws.randint(2, 60)
        start = -1
        if draws.random() < 0.2:
            start = cached + draws.randrange(new)
        prompts.append(Prompt(tokens(draws, cached), tokens(draws, new), logprob_start=start))
    return prompts


def audit_traffic(engine: Engine, draws: random.Random, number: int, result: Result) -> None:
    """Audit random prefills."""
    reset_log()
    with checking.audited(engine):
        for _ in range(number):
            batch = engine.schedule(traffic(draws))
            with switched("1"):
                engine.forward(batch, intermediate=draws.random() < 0.15)
    result.audited = sum(checking.counts())
    result.audits = counters.served.worst_audit


def costs(engine: Engine, state: Any, seconds: float) -> dict[str, float]:
    """Return ms of stock, fast and audited prefills, and the check's time in short prefills.

    They are medians of seven, interleaved; other processes may run on the machine. ``seconds`` is
    the time of the check.
    """
    auditor = audit.Auditor(state, 1, random.Random(0))
    few, many = Prompt((), tuple(range(20, 27))), Prompt((), tuple(range(20, 20 + 512)))
    ways = {
        "stock": ("0", many, None),
        "fast": ("1", many, None),
        "audited": ("1", many, auditor),
        "small": ("0", few, None),
    }
    took = defaultdict(list)
    for _ in range(7):
        for way, (switch, prompt, state.after_cut) in ways.items():
            batch = engine.schedule([prompt])
            with switched(switch):
                began = time.perf_counter()
                engine.forward(batch)
                took[way].append(time.perf_counter() - began)
    state.after_cut = None
    stock, fast, with_audit, small = map(statistics.median, took.values())
    found = {"stock_ms": 1e3 * stock, "fast_ms": 1e3 * fast, "audited_ms": 1e3 * with_audit}
    return found | {"check_in_small_stock_prefills": seconds / small}


@torch.no_grad()
def judge(
    engine: Engine, result: Result, draws: random.Random, breaks: Sequence[str], number: int
) -> None:
    """Run the check, proofs and ``number`` audits on the correct package, then each breakage.

    Proofs compare every graph of the captured tail, full and padded, with its eager layers.
    """
    state, runner = state_of(engine), engine.runner
    checked = check.check_model(runner, state)
    if checked.worst is None:
        raise SystemExit(f"{result.model}: the self-check compared nothing: {checked}")
    result.check, result.seconds = checked.worst.excess, checked.seconds
    if isinstance(state.captured, TailGraphs):
        for size in state.captured.sizes:
            for one in tail_graphs.compare_graph(state.captured, runner, size):
                result.proof = max(result.proof, one.excess)
                result.proved += 1
    audit_traffic(engine, draws, number, result)
    if result.model in TIMED and result.dtype == "bfloat16":
        result.cost = costs(engine, state, result.seconds)
    with check.run_both_paths(runner, state) as both:
        for name in breaks:
            with BREAKAGES[name](state) as applies:
                if applies:
                    broken = rounding.find_worst(both.findings())
                    result.found[name] = broken.excess


def judged(group: Group) -> list[Result]:
    """Return the results of a group; its process must end, since models' memory stays in use."""
    # Every row that can be skipped is skipped; the check is called explicitly.
    os.environ |= {settings.name_of("min_skipped_rows"): "1", settings.name_of("self_check"): "0"}
    logging.disable(logging.ERROR)  # deliberate defects are logged again and again
    torch.set_num_threads(1)
    shapes, number, results = SHAPES, AUDITED, []
    if group.triton:
        shapes, number = TRITON, _AUDITED_ON_TRITON
        interpreter.make_quick()
        interpreter.make_exact()  # unpatched, it multiplies bf16 as integers
    shape, place = shapes[group.shape][0], list(shapes).index(group.shape)
    seed = 1000 * place + 100 * DTYPES.index(group.dtype)
    if group.triton:
        seed += 5 * place  # so that every breakage is injected
    with engines(shape, group.dtype) as engine:
        for kind in kinds(group.count, seed):
            draw(engine.text_model, dataclasses.replace(shape, outlier_share=0.02, **kind))
            result = Result(group.shape, group.dtype, **kind)
            breaks = list(BREAKAGES)
            if group.triton:
                first = _BROKEN_ON_TRITON * kind["seed"] % len(breaks)
                breaks = (breaks * 2)[first : first + _BROKEN_ON_TRITON]
            judge(engine, result, random.Random(kind["seed"]), breaks, number)
            results.append(result)
            print(result, flush=True)
    return results
