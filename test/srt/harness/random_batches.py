"""Property tests of fast against stock on random batches of random models.

Lengths are drawn relative to the model's window, so that its edges are covered for every model.
Equal answers mean something only where a batch was cut, by the rows that each layer computed. So a
minimum of such batches is required.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from harness.batches import tokens
from harness.forwards import assert_fast, assert_stock
from harness.observe import TOLERANCE, expected, skips_tail
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import E2B_TINY, Gemma4Shape
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco.core.eligibility import NOTHING_TO_SKIP


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


def is_cut(engine: Engine, batch: Batch, prompts: list[Prompt]) -> bool:
    """Assert that a batch is cut, with stock's answers and last rows.

    Args:
        prompts: those of ``batch``. If there is nothing to skip, they must run as stock; return
            False for them.
    """
    if expected(engine, prompts) is None:
        assert_stock(engine, NOTHING_TO_SKIP, prompts)
        return False
    stock, fast = assert_fast(engine, prompts, prefix=batch.prefix)
    if not skips_tail(prompts):
        ends = torch.tensor([len(p.new) for p in prompts]).cumsum(0) - 1
        last, wanted = fast.hidden[ends], stock.hidden[ends]
        torch.testing.assert_close(last, wanted, atol=TOLERANCE, rtol=1e-4)
    return True


@dataclass(frozen=True)
class Kind:
    """Kind of batches.

    Attributes:
        hard: batches that every model must be tried on.
        fields: the arguments of ``batches`` for the random ones.
    """

    hard: tuple[Batch, ...]
    fields: dict[str, bool]


KINDS = {
    "last rows are stock's": Kind(HARD_LAST_ROWS, {}),
    "input logprobs are stock's": Kind(HARD_LOGPROBS, {"logprobs": True}),
    "chunks that nobody reads skip the tail": Kind(HARD_CHUNKS, {"unfinished": True}),
}


def try_batches(
    check: Callable[[Batch], None],
    hard: Iterable[Batch],
    drawn: st.SearchStrategy[Batch],
    examples: int,
) -> None:
    """Call ``check`` with these batches, and with as many random ones as ``examples``."""
    tried = given(drawn)(check)
    for batch in hard:
        tried = example(batch)(tried)
    settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )(tried)()


def assert_cut(engine: Engine, name: str, longest: int, most: int, *, examples: int) -> None:
    """Assert ``is_cut`` for the hard batches of a kind, and for random ones.

    Args:
        name: a key of ``KINDS``.
        longest: new tokens of a request.
        most: requests of a batch.
        examples: random batches to try; as many must be cut. Of chunks that nobody reads, as many
            must skip the tail, where SGLang marks them.
    """
    kind = KINDS[name]
    needs_skipped = "unfinished" in kind.fields and releases.marks_intermediate()
    cut = 0

    def check(batch: Batch) -> None:
        nonlocal cut
        prompts = batch.prompts(engine.text_model.config.sliding_window)
        with torch.inference_mode():
            found = is_cut(engine, batch, prompts)
        if skips_tail(prompts) or not needs_skipped:
            cut += found

    try_batches(check, kind.hard, batches(longest, most, **kind.fields), examples)
    assert cut >= examples, f"only {cut} batches were cut as wanted"
