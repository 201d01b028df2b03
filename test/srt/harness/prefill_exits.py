"""Forwards of an engine whose prefills, and whose tail, are captured, compared on three paths.

*Eagerly* as stock; *replayed* as stock, to the end of SGLang's graph; and on the fast path, which
leaves the graph at the exit of layer S-1 if the batch allows it. A replay runs no Python code of a
layer: the segments that have run show what was computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from harness.batches import kept_rows, new_rows, rest_of
from harness.forwards import state_of
from harness.observe import skips_tail, without_padding
from sglang_gemma4_reference import recorder
from sglang_gemma4_reference.engine import SWITCHED_OFF, Engine, Prompt, switched
from sglang_gemma4_reference.prefill_graphs import RecordedPrefill
from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.compat.captured_prefills import ExitPoint
from sglang_gemma4_yoco.core.eligibility import NOTHING_TO_SKIP
from sglang_gemma4_yoco.counters import Outcome
from sglang_gemma4_yoco.prefill_exits.graph_exits import TAIL_NOT_CAPTURED

BUCKETS = [16, 32, 64, 128]
ROWS = 4  # prompts of a batch whose tail is captured
#: Server arguments of an engine whose prefills can be captured, and then its tail.
RECORDED: dict[str, Any] = {
    "cuda_graph_bs_decode": [ROWS],
    "cuda_graph_backend_prefill": "breakable",
    "cuda_graph_bs_prefill": BUCKETS,
}
TOLERANCE = 2e-5  # sums of other lengths, in fp32
close = partial(torch.testing.assert_close, atol=TOLERANCE, rtol=TOLERANCE)


@dataclass(frozen=True)
class Run:
    """Results of one forward.

    Attributes:
        segments: the number of its graph's segments that have run; 0 if it was not replayed.
        outcomes: as the package counts them.
        logits: [requests, vocabulary].
        logprobs: of input tokens, if requested.
        output: SGLang's output, parts of which later forwards may overwrite.
        cache: K and V of each layer that owns some, at all slots but the one of padding.
    """

    segments: int
    outcomes: dict[Outcome, int]
    logits: torch.Tensor
    logprobs: torch.Tensor | None
    output: Any
    cache: list[torch.Tensor]


def run(engine: Engine, batch: Any, *, fast: bool = False, eagerly: bool = False) -> Run:
    """Run one forward, over slots whose K and V are poisoned."""
    graphs = engine.runner.prefill_cuda_graph_runner
    engine.poison(batch)
    recorder.replays.clear()
    before = counters.served.forwards.copy()
    with ExitStack() as span:
        span.enter_context(switched(str(int(fast))))
        if eagerly:
            refused = mock.patch.object(graphs, "can_run_graph", return_value=False)
            span.enter_context(refused)
        output = engine.forward(batch)
    prefills = [graph for graph in recorder.replays if isinstance(graph, RecordedPrefill)]
    logprobs = output.input_token_logprobs
    if logprobs is not None:
        logprobs = torch.as_tensor(logprobs).clone()
    outcomes, logits = dict(counters.served.forwards - before), output.next_token_logits.clone()
    return Run(
        sum(prefill.ran for prefill in prefills),
        outcomes,
        logits,
        logprobs,
        output,
        without_padding(engine.kv()),
    )


def is_replayed(rows: int) -> bool:
    """Return True if SGLang replays a batch of ``rows`` rows, at least half of a bucket."""
    return any(rows <= bucket <= 2 * rows for bucket in BUCKETS)


@contextmanager
def strict_exits() -> Iterator[None]:
    """Overwrite a graph's memory at its exit, except for what may be read there, in the block."""
    stock = compat.captured_prefills.replay_to_exit

    def replay_to_exit(graph: Any) -> ExitPoint:
        point = stock(graph)
        prefill = recorder.replays[-1]
        assert isinstance(prefill, RecordedPrefill)
        assert len(prefill.segments) > prefill.ran == point.segments
        prefill.spoil(keep=[point.rows, point.keys, point.values])
        return point

    with mock.patch.object(compat.captured_prefills, "replay_to_exit", replay_to_exit):
        yield


EAGERLY: frozenset[Outcome] = frozenset(
    {counters.TAIL_EAGER, counters.TAIL_CAPTURED, counters.TAIL_SKIPPED, NOTHING_TO_SKIP}
)
TO_THE_END = frozenset({TAIL_NOT_CAPTURED, NOTHING_TO_SKIP})


def wanted(engine: Engine, prompts: Sequence[Prompt]) -> tuple[int, frozenset[Outcome]]:
    """Return the segments that the fast path must run, and the outcomes that may be counted."""
    state = state_of(engine)
    if not is_replayed(new_rows(prompts)):
        return 0, EAGERLY
    if skips_tail(prompts):
        return state.cut_layer + 1, frozenset({counters.EXIT_SKIPPED})
    one_each = sum(kept_rows(prompts)) == len(prompts)
    if one_each and state.captured is not None and len(prompts) <= ROWS:
        return state.cut_layer + 1, frozenset({counters.EXIT_CAPTURED})
    return len(engine.text_model.layers) + 1, TO_THE_END


def assert_served_alike(engine: Engine, prompts: Sequence[Prompt], chunk: Any = None) -> Outcome:
    """Assert that all three paths give the same answers and cache; return the fast one's outcome.

    The rest of unfinished prompts runs on the same three paths, from the fast one's cache.

    Args:
        chunk: the batch of ``prompts``, if it continues another one.
    """
    batch = chunk or engine.schedule(prompts)
    layers = len(engine.text_model.layers)
    eager = run(engine, batch, eagerly=True)
    stock = run(engine, batch)
    with strict_exits():
        fast = run(engine, batch, fast=True)
    rows = new_rows(prompts)
    assert (eager.segments, stock.segments) == (0, (layers + 1) * is_replayed(rows))
    assert eager.outcomes == stock.outcomes == {SWITCHED_OFF: 1}
    segments, outcomes = wanted(engine, prompts)
    [found] = fast.outcomes
    assert (fast.segments, found in outcomes) == (segments, True), found
    for one in (stock, fast):
        close(one.cache, eager.cache)
        assert one.logits.isfinite().all()
        if not all(prompt.to_come for prompt in prompts):
            close(one.logits, eager.logits)
            assert (one.logprobs is None) == (eager.logprobs is None)
            if eager.logprobs is not None:
                close(one.logprobs, eager.logprobs)
    if segments:  # the same graph on the same rows
        assert all(map(torch.equal, stock.cache, fast.cache))
    if rest := rest_of(prompts):
        assert_served_alike(engine, rest, engine.next_chunk(batch, prompts))
    return found
