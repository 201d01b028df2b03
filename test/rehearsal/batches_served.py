"""Batches as they are served in a rehearsal, and what each cost: launches, waits, compilers.

``serve`` runs a batch in one way: as stock, with the captured tail, or with the eager one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rehearsal import device, kernels, operations
from sglang_gemma4_reference.engine import Engine, Prompt, settings_changed, switched
from sglang_gemma4_reference.host_reads import refusing_waits
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.core.state import find_state
from sglang_gemma4_yoco.replaced import replaced

STOCK, CAPTURED, EAGER = "stock", "captured", "eager"
#: SGLang reads input log-probabilities back to the host in the forward that computes them.
LOGPROBS_ARE_READ = "logits_processor"


def prompt(cached: int, new: int, *, start: int = -1, to_come: int = 0, **more: Any) -> Prompt:
    """Random token ids, always the same ones for the same lengths.

    Args:
        start: the first new row whose log-probability is wanted.
    """
    draw = random.Random(1000 * cached + new)
    ids = tuple(draw.randrange(300, 3700) for _ in range(cached + new + to_come))
    wanted = cached + start if start >= 0 else -1
    end = cached + new
    return Prompt(ids[:cached], ids[cached:end], wanted, ids[end:], **more)


def prompts(lengths: Sequence[int]) -> list[Prompt]:
    return [prompt(0, length) for length in lengths]


#: Every kind of batch, by name; those named "chunk" are no prompt's last one.
BATCHES: dict[str, list[Prompt]] = {
    "2 tokens": prompts([2]),
    "40 tokens": prompts([40]),
    "257 tokens": prompts([257]),
    "1100 tokens": prompts([1100]),
    "after a prefix": [prompt(520, 40)],
    "one row after a prefix": [prompt(520, 1), prompt(0, 3)],
    "three": [prompt(0, 5), prompt(3, 7), prompt(0, 30)],
    "five": prompts(range(3, 8)),
    "sixteen": [prompt(0, 1100), *prompts(range(3, 18))],
    "seventeen": prompts(range(3, 20)),
    "thirty-four": prompts(range(40, 74)),  # more than a graph has rows
    "beside decode steps": [
        *(prompt(0, 40), prompt(6, 1, decodes=True), prompt(7, 1, decodes=True)),
    ],
    "log-probabilities": [prompt(0, 1200, start=1190), prompt(0, 5, start=4)],
    "chunk": [prompt(0, 40, to_come=20)],
    "chunk of 1100": [prompt(0, 1100, to_come=20)],
}


@dataclass(frozen=True)
class Cost:
    """What one forward did.

    Attributes:
        outcome: as the package counts it.
        counts: by the names of ``device.Kind``.
        product_rows: how many matrix products had so many rows.
        waits: where the host waited for the device, and how often.
        compiled: kernels compiled in this forward.
        failure: the exception, if one was raised, or that the package has caught.
    """

    outcome: str
    counts: dict[str, int]
    product_rows: dict[str, int]
    waits: dict[str, int]
    compiled: list[str]
    failure: str | None


@contextmanager
def way_of(engine: Engine, way: str) -> Iterator[None]:
    """Forwards in the block are served in this way; any skipped row is worth it."""
    state = find_state(engine.text_model)
    assert state is not None
    with ExitStack() as span:
        span.enter_context(settings_changed(min_skipped_rows=1))
        span.enter_context(switched("0" if way == STOCK else "1"))
        if way == EAGER:
            span.enter_context(replaced(state, captured=None))
        yield


@contextmanager
def _failures_noted() -> Iterator[list[str]]:
    """Those that the package catches, to have stock serve the batch."""
    noted: list[str] = []
    stock = counters.count_failure

    def failed(failure: Exception, *others: Any) -> Any:
        noted.append(f"{type(failure).__name__}: {failure}")
        return stock(failure, *others)

    with replaced(counters, count_failure=failed):
        yield noted


def serve(engine: Engine, batch: Any, way: str, *, is_chunk: bool = False) -> Cost:
    """Run one forward of a batch that ``engine`` has scheduled."""
    cost, _ = serve_with_output(engine, batch, way, is_chunk=is_chunk)
    return cost


def serve_with_output(
    engine: Engine, batch: Any, way: str, *, is_chunk: bool = False
) -> tuple[Cost, Any]:
    """``serve``, and SGLang's logits output; None where the forward has failed."""
    mode = operations.current
    assert mode is not None
    counters.forwards.clear()
    mode.waits.clear()
    mode.product_rows.clear()
    known = set(kernels.compiled)
    before = Counter(device.read_counters(operations.RUNTIME))
    output = None
    with way_of(engine, way), _failures_noted() as failures:
        try:
            output = engine.forward(batch, intermediate=is_chunk)
        except Exception as failure:  # noqa: BLE001 - it is what is asked for
            failures.append(f"{type(failure).__name__}: {failure}")
        counts = Counter(device.read_counters(operations.RUNTIME)) - before
    cost = Cost(
        outcome=next(iter(counters.forwards), ""),
        counts=dict(counts),
        product_rows=dict(Counter(map(str, mode.product_rows))),
        waits={place: n for place, n in mode.waits.items() if LOGPROBS_ARE_READ not in place},
        compiled=[name for name in kernels.compiled if name not in known],
        failure=next(iter(failures), None),
    )
    return cost, output


def serve_all(
    engine: Engine, ways: Sequence[str], batches: Mapping[str, list[Prompt]] = BATCHES
) -> dict[str, dict[str, Any]]:
    """The cost of each batch in each way, in this order."""
    costs: dict[str, dict[str, Any]] = {}
    for name, asked in batches.items():
        costs[name] = {}
        for way in ways:
            batch = engine.schedule(asked)
            cost = serve(engine, batch, way, is_chunk=name.startswith("chunk"))
            costs[name][way] = asdict(cost)
    return costs


def serve_refusing_waits(engine: Engine) -> dict[str, str | None]:
    """What fails where PyTorch refuses each wait of the host, in planning and in the model."""
    state = find_state(engine.text_model)
    assert state is not None
    found: dict[str, str | None] = {}
    for name, way in (("40 tokens", CAPTURED), ("40 tokens", EAGER), ("chunk", CAPTURED)):
        batch = engine.schedule(BATCHES[name])
        with refusing_waits(engine.text_model, "forward"), refusing_waits(state, "planner"):
            cost = serve(engine, batch, way, is_chunk=name == "chunk")
        found[f"{name}, {way}: {cost.outcome}"] = cost.failure
    return found
