"""Batches as they are served in a rehearsal, and what each cost: launches, waits, compilations.

``batches.json`` has every kind of batch. Its prompts are the arguments of ``prompt``, or of
``MediaPrompt`` where there are images; ``rows`` are those of this forward, and ``kept`` those of
them that are read: none of a chunk that is not its prompt's last one. ``replayed`` says whether the
tail is a graph's where one was captured, ``launches`` how many each way may have.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.media import MediaPrompt, media_batch
from rehearsal import device, kernels, operations
from sglang_gemma4_reference.engine import Engine, Prompt, settings_changed, switched
from sglang_gemma4_reference.host_reads import refusing_waits
from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.core.replaced import replaced
from sglang_gemma4_yoco.core.state import ModelState, find

STOCK, CAPTURED, EAGER = "stock", "captured", "eager"
BATCHES: dict[str, Any] = json.loads(Path(__file__).with_name("batches.json").read_text())
#: SGLang reads input log-probabilities back to the host in the forward that computes them.
LOGPROBS_ARE_READ = "logits_processor"


def prompt(
    new: int, cached: int = 0, start: int = -1, to_come: int = 0, decodes: bool = False
) -> Prompt:
    """Random token ids, always the same ones for the same lengths.

    Args:
        new: how many tokens this forward computes.
        start: the first new row whose log-probability is wanted.
    """
    draw = random.Random(1000 * cached + new)
    ids = tuple(draw.randrange(300, 3700) for _ in range(cached + new + to_come))
    wanted = cached + start if start >= 0 else -1
    end = cached + new
    return Prompt(ids[:cached], ids[cached:end], wanted, ids[end:], decodes)


def schedule(engine: Engine, name: str) -> Any:
    asked = BATCHES[name]
    if "media" in asked:
        return media_batch(engine, *(MediaPrompt(**one) for one in asked["media"]))
    return engine.schedule([prompt(**one) for one in asked["prompts"]])


def state_of(engine: Engine) -> ModelState:
    state = find(engine.text_model)
    assert state is not None
    return state


def describe(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"


def serve(
    engine: Engine, batch: Any, way: str, *, is_chunk: bool = False
) -> tuple[dict[str, Any], Any]:
    """Run one forward as stock, with the captured tail or with the eager one.

    PyTorch refuses each wait of the host in the planning and in the model of the last two; any
    skipped row is worth it.

    Returns:
        What it cost, and SGLang's logits output, None where the forward has failed. The cost is
        the ``outcome`` as the package counts it; ``counts`` by the names of ``device.Kind``;
        ``product_rows``, how many matrix products had so many rows; ``waits``, where the host
        waited for the device and how often; the kernels that were ``compiled``; the ``failure``
        that was raised, or that the package has caught to have stock serve the batch.
    """
    mode, state = operations.current, state_of(engine)
    assert mode is not None
    failures: list[str] = []
    stock_failed = log.failed

    def failed(failure: Exception, *others: Any) -> None:
        failures.append(describe(failure))
        stock_failed(failure, *others)

    log.forwards.clear()
    mode.waits.clear()
    mode.product_rows.clear()
    known = len(kernels.compiled)
    output = None
    with ExitStack() as span:
        span.enter_context(settings_changed(min_skipped_rows=1))
        span.enter_context(replaced(log, failed=failed))
        if way == STOCK:
            span.enter_context(switched("0"))
        else:
            span.enter_context(refusing_waits(state, "planner"))
            span.enter_context(refusing_waits(engine.text_model, "forward"))
        if way == EAGER:
            span.enter_context(replaced(state, captured=None))
        before = Counter(device.read_counters(operations.RUNTIME))
        try:
            output = engine.forward(batch, intermediate=is_chunk)
        except Exception as failure:  # noqa: BLE001 - it is what is asked for
            failures.append(describe(failure))
        counts = Counter(device.read_counters(operations.RUNTIME)) - before
    cost = {
        "outcome": next(iter(log.forwards), ""),
        "counts": dict(counts),
        "product_rows": dict(mode.product_rows),
        "waits": {place: n for place, n in mode.waits.items() if LOGPROBS_ARE_READ not in place},
        "compiled": list(kernels.compiled)[known:],
        "failure": next(iter(failures), None),
    }
    return cost, output


def serve_by_name(engine: Engine, name: str, way: str) -> dict[str, Any]:
    """What a batch of ``batches.json`` cost in this way."""
    is_chunk = BATCHES[name]["kept"] == 0
    cost, _ = serve(engine, schedule(engine, name), way, is_chunk=is_chunk)
    return cost


def serve_all(
    engine: Engine, ways: Sequence[str], names: Iterable[str] = BATCHES
) -> dict[str, dict[str, Any]]:
    """The cost of each batch in each way, in this order."""
    costs: dict[str, dict[str, Any]] = {}
    for name in names:
        costs[name] = {way: serve_by_name(engine, name, way) for way in ways}
    return costs
