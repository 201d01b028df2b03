"""Property tests of fast against stock on random batches of random models.

Lengths are drawn relative to the model's window, so that its edges are covered for every model. A
property returns whether the fast path was active for an example, by the rows that each layer
computed. Only then do equal answers mean anything, so a minimum of such examples is required.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from harness.batches import tokens
from harness.observe import (
    TOLERANCE,
    Observed,
    assert_as_expected,
    assert_metadata_unchanged,
    assert_same_answers,
    assert_same_cache,
    assert_same_objects,
    assert_stock,
    expected,
    run,
    skips_tail,
)
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import E2B_TINY, Gemma4Shape
from sglang_gemma4_reference.engine import Engine, Prompt


def has_one_pool(seed: int) -> bool:
    """Return True for every third model, whose K/V of all layers is in one pool."""
    return seed % 3 == 2


_PATTERNS = (5, 1, 4, 2, 3)
_WINDOWS = (16, 5, 40, 512)


def random_shape(seed: int) -> Gemma4Shape:
    """Return a small Gemma 4 with a random layer pattern; both kinds of donors occur.

    Any four seeds in a row have four windows, any five in a row five patterns, the first E4B's.
    """
    draw = random.Random(seed)
    sliding_per_full = _PATTERNS[seed % len(_PATTERNS)]
    group = sliding_per_full + 1
    front = draw.randint(group, 2 * group + 1)
    shared = draw.randint(1, 8)
    head_dim = E2B_TINY.head_dim
    if has_one_pool(seed):  # SGLang's one pool for all layers has one width of heads
        head_dim = E2B_TINY.global_head_dim
    return dataclasses.replace(
        E2B_TINY,
        layers=front + shared,
        kv_shared_layers=shared,
        sliding_per_full=sliding_per_full,
        heads=draw.choice([4, 8]),
        kv_heads=draw.choice([1, 2, 4]),
        sliding_window=_WINDOWS[seed % len(_WINDOWS)],
        ple_width=draw.choice([0, 16, 16]),
        double_wide_mlp=draw.random() < 0.5,
        head_dim=head_dim,
        seed=seed,
    )


#: A number of tokens: a number of windows, and a remainder.
Length = tuple[int, int]
ZERO = (0, 0)


def in_tokens(length: Length, window: int, least: int) -> int:
    """Return a length in tokens, for a window of this many keys; at least ``least``."""
    windows, more = length
    return max(windows * window + more, least)


@dataclass(frozen=True)
class Request:
    """Request before the model is known.

    Attributes:
        wanted: the share of its tokens with input logprobs, from the end; None for none.
        to_come: tokens that are left for later chunks.
    """

    cached: Length
    new: Length
    wanted: float | None = None
    to_come: int = 0


@dataclass(frozen=True)
class Batch:
    """Requests, and the switch under which the fast side's cached tokens are computed."""

    requests: tuple[Request, ...]
    prefix: str = "0"
    seed: int = 0

    def prompts(self, window: int) -> list[Prompt]:
        """Return the batch's prompts for a model of this window."""
        draw = random.Random(self.seed)
        made = []
        for request in self.requests:
            cached = in_tokens(request.cached, window, 0)
            # An unfinished chunk of one token alone is a batch with nothing to skip.
            new = in_tokens(request.new, window, 1 + bool(request.to_come))
            start = -1
            if request.wanted is not None:
                start = int((cached + new) * (1 - request.wanted))
            made.append(
                Prompt(
                    tokens(draw, cached),
                    tokens(draw, new),
                    logprob_start=start,
                    to_come=tokens(draw, request.to_come),
                )
            )
        return made


def batches(
    longest: int, most: int, *, logprobs: bool = False, unfinished: bool = False
) -> st.SearchStrategy[Batch]:
    """Return 1 to ``most`` requests of up to ``longest`` new tokens after as many cached ones."""
    edges = st.tuples(st.just(1), st.integers(-1, 1))

    def plain(least: int) -> st.SearchStrategy[Length]:
        return st.tuples(st.just(0), st.integers(least, longest))

    fields: dict[str, st.SearchStrategy[Any]] = {
        "cached": st.one_of(st.just(ZERO), plain(0), edges),
        "new": st.one_of(plain(1), edges),
    }
    if logprobs:
        fields["wanted"] = st.one_of(st.none(), st.floats(0, 1))
    if unfinished:
        fields["to_come"] = st.integers(1, 50)
    requests = st.lists(st.builds(Request, **fields), min_size=1, max_size=most)
    seeds = st.integers(0, 2**32)
    return st.builds(Batch, requests.map(tuple), prefix=st.sampled_from("01"), seed=seeds)


HARD_LAST_ROWS = (
    Batch(
        (
            Request((1, -1), (0, 2)),
            Request((1, 0), (0, 3)),
            Request((1, 1), (0, 1)),
            Request(ZERO, (0, 1)),
        )
    ),
    Batch((Request(ZERO, (1, -1)), Request(ZERO, (1, 0)), Request(ZERO, (1, 1))), prefix="1"),
    Batch((Request((1, 7), (1, 0)), Request((0, 3), (0, 1))), prefix="1"),
)
HARD_LOGPROBS = (
    Batch(
        (
            Request((1, 1), (1, 2), wanted=0.3),
            Request(ZERO, (0, 7)),
            Request((0, 2), (0, 1), wanted=0.0),
        )
    ),
    Batch((Request((1, -1), (0, 3), wanted=0.2), Request((1, 0), (0, 4))), prefix="1"),
)
HARD_CHUNKS = (
    Batch((Request((1, 1), (0, 4), to_come=3), Request(ZERO, (1, 1), to_come=1))),
    Batch((Request((1, -1), (0, 2), to_come=1),), prefix="1"),
)


def _both_ways(engine: Engine, batch: Batch) -> tuple[list[Prompt], Observed, Observed, bool]:
    """Run a batch off and on; the last value is True if rows were skipped, as they must be."""
    prompts = batch.prompts(engine.text_model.config.sliding_window)
    scheduled = engine.schedule(prompts)
    stock = run(engine, scheduled, "0")
    if batch.prefix == "1" and any(p.cached for p in prompts):
        scheduled = engine.schedule(prompts, prefix="1")
    fast = run(engine, scheduled, "1")
    wanted = expected(engine, prompts)
    assert_stock(engine, prompts, stock)
    if wanted is None:
        assert_stock(engine, prompts, fast)
    else:
        assert_as_expected(fast, wanted)
    for seen in (stock, fast):
        assert_same_objects(seen)
        assert_metadata_unchanged(seen)
    assert_same_cache(stock, fast)
    assert fast.hidden.isfinite().all()
    return prompts, stock, fast, wanted is not None


def last_rows(engine: Engine, batch: Batch) -> bool:
    """Assert that every request's last row, and the answer after it, are stock's."""
    prompts, stock, fast, active = _both_ways(engine, batch)
    ends = torch.tensor([len(p.new) for p in prompts]).cumsum(0) - 1
    torch.testing.assert_close(fast.hidden[ends], stock.hidden[ends], atol=TOLERANCE, rtol=1e-4)
    assert_same_answers(stock, fast, TOLERANCE)
    return active


def input_logprobs(engine: Engine, batch: Batch) -> bool:
    """Assert that all log-probabilities of the prompts' rows are stock's."""
    _, stock, fast, active = _both_ways(engine, batch)
    assert_same_answers(stock, fast, TOLERANCE)
    return active


def intermediate_chunks(engine: Engine, batch: Batch) -> bool:
    """Assert that a chunk of which no row is read leaves its K and V, and finite rows."""
    prompts, _, fast, active = _both_ways(engine, batch)
    assert fast.output.next_token_logits.isfinite().all()
    return active and skips_tail(prompts)


@dataclass(frozen=True)
class Property:
    """Property of batches.

    Attributes:
        says: asserts it, and returns whether the fast path was active.
        hard: batches that every model must be tried on.
        kind: the arguments of ``batches`` for the random ones.
    """

    says: Callable[[Engine, Batch], bool]
    hard: tuple[Batch, ...]
    kind: dict[str, bool]


PROPERTIES = {
    "last rows are stock's": Property(last_rows, HARD_LAST_ROWS, {}),
    "input logprobs are stock's": Property(input_logprobs, HARD_LOGPROBS, {"logprobs": True}),
    "chunks that nobody reads skip the tail": Property(
        intermediate_chunks, HARD_CHUNKS, {"unfinished": True}
    ),
}


def holds(engine: Engine, tried: Property, longest: int, most: int, *, examples: int) -> None:
    """Try a property on the hard batches and on random ones.

    Args:
        longest: new tokens of a request.
        most: requests of a batch.
        examples: random batches to try; on as many the fast path must be active.
    """
    active, floor = 0, examples
    if tried.says is intermediate_chunks and not releases.marks_intermediate():
        floor = 0

    def checked(batch: Batch) -> None:
        nonlocal active
        with torch.inference_mode():
            active += tried.says(engine, batch)

    property_ = given(batches(longest, most, **tried.kind))(checked)
    for batch in tried.hard:
        property_ = example(batch)(property_)
    settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )(property_)()
    assert active >= floor, f"the fast path was active for {active} examples only"
