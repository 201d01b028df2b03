"""Batches as served in a rehearsal, and the cost of each: launches, waits, compilations.

``batches.json`` has every kind of batch. Its prompts are the arguments of ``_make_prompt``, or of
``MediaPrompt`` where there are images; ``rows`` are those of this forward, and ``kept`` those of
them that are read: none of a chunk that is not its prompt's last one. ``replayed`` says whether the
tail is a graph's where one was captured, ``launches`` how many each way may have.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from harness.batches import tokens
from harness.forwards import state_of
from harness.media import MediaPrompt, media_batch
from rehearsal import device, kernels, operations
from rehearsal.device import Answer
from sglang_gemma4_reference.engine import Engine, Prompt, switched
from sglang_gemma4_reference.host_reads import refusing_waits
from sglang_gemma4_yoco import counters, settings
from sglang_gemma4_yoco.core import planning
from sglang_gemma4_yoco.patched import patched

STOCK, CAPTURED, EAGER = "stock", "captured", "eager"
BATCHES: Answer = device.read_table("batches")


def _make_prompt(
    new: int, cached: int = 0, logprob_start: int = -1, to_come: int = 0, decodes: bool = False
) -> Prompt:
    """Return the same token ids for the same lengths; ``new`` of them are of this forward."""
    draw = random.Random(1000 * cached + new)
    ids = [tokens(draw, count) for count in (cached, new, to_come)]
    return Prompt(ids[0], ids[1], logprob_start, ids[2], decodes)


def _schedule(engine: Engine, name: str) -> Any:
    asked = BATCHES[name]
    if "media" in asked:
        return media_batch(engine, *(MediaPrompt(**one) for one in asked["media"]))
    return engine.schedule([_make_prompt(**one) for one in asked["prompts"]])


def describe(failure: Exception) -> str:
    """Return an error's message, or the line that raised it, as a stand-in's assertion."""
    line = traceback.extract_tb(failure.__traceback__)[-1].line
    return f"{type(failure).__name__}: {str(failure) or line}"


def serve(engine: Engine, name: str, way: str) -> Answer:
    """Serve a batch of ``batches.json`` as stock, with the captured tail or with the eager one.

    PyTorch refuses each wait of the host in the planning and in the model of the last two; any
    skipped row is worth it.

    Returns:
        What it cost: the ``outcome`` as the package counts it; ``counts`` by the names of
        ``device.Kind``; ``product_rows``, the number of matrix products by rows; ``waits``,
        where the host waited for the device and how often; the kernels that were ``compiled``; the
        ``failure`` that was raised, or that the package has caught to have stock serve the batch.
    """
    batch, is_chunk = _schedule(engine, name), BATCHES[name]["kept"] == 0
    mode, state = operations.current, state_of(engine)
    assert mode is not None
    failures: list[str] = []
    stock_failed = counters.served.count_failure

    def failed(failure: Exception, *others: Any) -> None:
        failures.append(describe(failure))
        stock_failed(failure, *others)

    counters.served.forwards.clear()
    mode.waits.clear()
    mode.product_rows.clear()
    known = len(kernels.compiled)
    with ExitStack() as span:
        span.enter_context(settings.changed(min_skipped_rows=1))
        span.enter_context(patched(counters.served, count_failure=failed))
        if way == STOCK:
            span.enter_context(switched("0"))
        else:
            span.enter_context(refusing_waits(planning, "make_plan"))
            span.enter_context(refusing_waits(engine.text_model, "forward"))
        if way == EAGER:
            span.enter_context(patched(state, captured=None))
        before = device.read_counters(operations.RUNTIME)
        try:
            engine.forward(batch, intermediate=is_chunk)
        except Exception as failure:  # noqa: BLE001 - it is what is asked for
            failures.append(describe(failure))
        counts = device.read_counters(operations.RUNTIME) - before
    return {
        "outcome": next(iter(counters.served.forwards), ""),
        "counts": dict(counts),
        "product_rows": dict(mode.product_rows),
        "waits": dict(mode.waits),
        "compiled": list(kernels.compiled)[known:],
        "failure": next(iter(failures), None),
    }


def serve_all(
    engine: Engine, ways: Sequence[str], names: Iterable[str] = BATCHES
) -> dict[str, Answer]:
    """Return the cost of each batch in each way, in this order."""
    costs: dict[str, Answer] = {}
    for name in names:
        costs[name] = {}
        for way in ways:
            costs[name][way] = serve(engine, name, way)
    return costs
