"""Servers whose cache has pages of 16 and of 64 tokens.

What is cached ends at a page boundary, so the tail's rows begin anywhere in a page. The pages of 64
come with a small pool, which runs full, without overlap of scheduling and compute, and with an
attention backend that the tail does not run on: it requires such pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.ask import (
    assert_alike,
    assert_same_tokens,
    at_once,
    compare,
    one_by_one,
    outputs,
    prompts_of,
    tokens,
)
from harness.layer_rows import assert_all_fast, cut
from harness.server import Pair, Server, pair

_SMALL_POOL = (
    *("--max-total-tokens", "4800"),
    # Admit requests as if they ended soon, so that the pool runs full.
    *("--schedule-conservativeness", "0.1"),
    "--disable-overlap-schedule",
)
_ANOTHER_BACKEND = ("--attention-backend", "intel_xpu")


@dataclass(frozen=True)
class Paged:
    """Two servers with pages of one size.

    Attributes:
        size: tokens of a page.
        both: the fast one and the stock one.
    """

    size: int
    both: Pair


@pytest.fixture(scope="module", params=[pytest.param(16, marks=pytest.mark.release), 64])
def paged(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Paged]:
    """Yield two servers with pages of one size."""
    arguments = ["--page-size", str(request.param)]
    if request.param == 64:
        arguments += [*_SMALL_POOL, *_ANOTHER_BACKEND]
    with pair(tiny_checkpoint, tmp_path_factory.mktemp("pages"), *arguments) as servers:
        for server in servers:
            assert server.resolved("page_size") == request.param
        yield Paged(request.param, servers)


@pytest.mark.parametrize("paged", [64], indirect=True)
def test_scheduling_does_not_overlap(paged: Paged) -> None:
    """It does elsewhere: ``test_server``."""
    for server in paged.both:
        assert server.resolved("disable_overlap_schedule") is True


def test_attention_backends(paged: Paged) -> None:
    assert_alike(paged.both, one_by_one(tokens(50, seed=29)))
    attention = {
        16: "attention by WindowedTorchNativeBackend",
        64: "attention by FrontBackend, the tail's by WindowedTorchNativeBackend",
    }
    [active] = paged.both[0].log_lines("fast prefill is active")
    assert attention[paged.size] in active


def test_prompts(paged: Paged) -> None:
    """They end one token before a page boundary, at it and after it."""
    size = paged.size
    assert_alike(paged.both, one_by_one(*prompts_of(2, 50, size - 1, size, size + 1, 2 * size + 1)))


@pytest.mark.parametrize(("beyond", "new"), [(-1, 40), (0, 1), (0, 2), (7, 40)])
def test_cached_prefix(paged: Paged, beyond: int, new: int) -> None:
    """A first prompt ends at a page boundary or beside it, and a second one continues it.

    Of the first one whole pages alone are cached: the second computes the rest of it again.
    """
    first = tokens(3 * paged.size + beyond, seed=30 + beyond)
    both = assert_alike(paged.both, one_by_one(first, first + tokens(new, seed=40)))
    cached = len(first) // paged.size * paged.size
    last = both.prefills[-1]
    assert last.prefix_lens == [cached]
    assert last.rows == cut(len(first) + new - cached, 1)
    assert both.on[1].cached_tokens == cached


def test_input_logprobs_over_a_page_boundary(paged: Paged) -> None:
    """The kept suffix begins in one page and ends in another."""
    length, start = 2 * paged.size + 3, 2 * paged.size - 4
    ask = one_by_one(tokens(length, seed=56), logprob_start_len=start)
    both = assert_alike(paged.both, ask)
    assert sum(prefill.rows[-1] for prefill in both.prefills) == length - start
    assert len(both.on[0].input_logprobs) == length - start - 1


@pytest.mark.parametrize("paged", [64], indirect=True)  # the pair with the small pool
def test_full_pool(paged: Paged) -> None:
    """Requests that lose their pages to others are computed again, and answer the same."""
    prompts = prompts_of(*range(560, 567))

    def ask(server: Server) -> list[list[int]]:
        # For requests that ignore the end token SGLang keeps the room that they will need.
        long = {"max_new_tokens": 150, "ignore_eos": False}
        return at_once(lambda prompt: outputs(server, prompt, **long)[0], prompts)

    both = compare(paged.both, ask)
    for server in paged.both:
        assert server.log_lines("Retract requests"), "the pool never ran full"
    assert_all_fast(both.prefills)
    assert_same_tokens(both, prompts, paged.both[1])
