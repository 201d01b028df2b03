"""Before it serves: a few small prefills of nobody's, as stock and on the fast path, compared.

The package's tests know neither this GPU nor these weights. So when the server starts, behind its
graphs, it runs requests that reach beyond the window, with prefixes of random K and V, alone and
together, one of them with logprobs, and an unfinished chunk. What is compared is all that anybody
reads: logits and logprobs of the kept rows, and K and V of all new tokens. How much they may differ
is measured too: by as much as stock's own answers do when each request runs alone.

With a window of 512 and pages of one slot, the requests have 0 + 7, 508 + 6 and 1025 + 5 tokens
(cached + new): a few rows each, so that this takes milliseconds, and rows around the window's edge.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_gemma4_yoco import seams, switch
from sglang_gemma4_yoco.checking import difference
from sglang_gemma4_yoco.checking.borrowed import borrowed, random_like
from sglang_gemma4_yoco.deciding import threshold
from sglang_gemma4_yoco.telling import report

if TYPE_CHECKING:
    from sglang_gemma4_yoco.owner import Owner

VARIABLE = "SGLANG_GEMMA4_YOCO_SELF_CHECK"
OFF = f"{VARIABLE}=0"
FAILED = "its self-check at start failed"
PIPELINE = "a pipeline's stages run no batch alone"
BACKED_LATER = "K and V get their memory later"
NO_ROOM = "the pools are too small for it"
NOT_FINITE = "stock's own answers are not finite numbers"
NOT_SEEN = "such prefills run in no way that could be seen"  # replayed from a CUDA graph
_BEING_CHECKED = "it is being compared with stock"
_NEW = 7  # tokens of a request
_BEHIND = 2  # tokens of one, behind the window of its first one


def wanted() -> bool:
    """Whether the operator wants it. Unset means yes.

    Raises:
        ValueError: the variable is neither ``0`` nor ``1``; the message names it and both.
    """
    remedy = "use 1 (or leave it unset) to compare with stock at start, 0 not to"
    return switch.yes_or_no(VARIABLE, "1", remedy)


@dataclass(frozen=True)
class Checked:
    """What came of it.

    Attributes:
        largest: the largest relative difference of a row; None where nothing was compared.
        allowed: the largest that is rounding.
        seconds: how long it took.
        unchecked: why nothing was compared.
    """

    largest: float | None = None
    allowed: float | None = None
    seconds: float = 0.0
    unchecked: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether nothing was found that speaks against the fast path."""
        if self.largest is None or self.allowed is None:
            return True
        return self.largest <= self.allowed

    def describe(self) -> str:
        """For the log."""
        if self.largest is None:
            return f"not checked: {self.unchecked}"
        return f"checked: largest difference {self.largest:.1e}, {self.allowed:.1e} is rounding"

    def state(self) -> dict[str, Any]:
        """For /server_info."""
        return {
            "largest_difference": self.largest,
            "allowed": self.allowed,
            "seconds": round(self.seconds, 3),
            "unchecked": self.unchecked,
        }


class NotCutError(Exception):
    """A batch that should have been cut was not; the message says why."""


def why_not(runner: Any) -> str | None:
    """Why the check is not made on this server, or None; the same on all ranks."""
    try:
        if not wanted():
            return OFF
    except ValueError as invalid:  # changed after load
        return str(invalid)
    argument = seams.server_arguments()
    if argument is not None and (argument("pp_size") or 1) > 1:
        return PIPELINE
    if seams.is_backed_later(runner.token_to_kv_pool):
        return BACKED_LATER
    return None


@torch.no_grad()
def check(runner: Any, known: Owner) -> Checked:
    """Run and compare; all that was written is put back.

    Args:
        runner: SGLang's ``ModelRunner``, which serves nobody at the moment.
        known: what is known of its model, whose batches may be cut.
    """
    began = time.monotonic()
    window = max(seams.keys_in_window(layer.self_attn.attn) for layer in known.model.layers)
    requests = _requests(runner, known, window)
    if not requests:
        return Checked(unchecked=NO_ROOM)
    both = _BothWays(runner, known, requests)
    try:
        with _placed(runner, _front(known), requests, window), threshold.lifted():
            largest, of_stock = both.largest(), both.of_stock()
    except NotCutError as stepped_aside:
        return Checked(unchecked=str(stepped_aside))
    if not math.isfinite(of_stock):  # whatever is compared with them says nothing
        return Checked(unchecked=NOT_FINITE)
    layers = known.model.config.num_hidden_layers
    allowed = difference.allowed(of_stock, layers, runner.dtype, runner.token_to_kv_pool.dtype)
    return Checked(largest, allowed, time.monotonic() - began)


# ---------------------------------------------------------------- requests


@dataclass(frozen=True)
class _Request:
    """One request of nobody's.

    Attributes:
        row: in SGLang's table of tokens.
        cached, new: tokens.
        ids: [new] int64, its new tokens.
        slots: [cached + new] int64, in the full pool.
        window_slots: the same tokens', in the window's pool.
    """

    row: int
    cached: int
    new: int
    ids: torch.Tensor
    slots: torch.Tensor
    window_slots: torch.Tensor


def _lengths(window: int, page: int) -> list[tuple[int, int]]:
    """Tokens cached and new, of each request; what is cached ends with a page.

    >>> _lengths(512, 1), _lengths(32, 64)
    ([(0, 7), (508, 6), (1025, 5)], [(0, 7), (0, 34), (128, 5)])
    """
    before = max(0, window - _NEW // 2 - 1) // page * page
    behind = -(-(2 * window + 1) // page) * page
    return [(0, _NEW), (before, window + _BEHIND - before), (behind, _NEW - 2)]


def _requests(runner: Any, known: Owner, window: int) -> list[_Request]:
    """Those that fit into the pools; slots follow each other in a page, and pages do not."""
    page = runner.token_to_kv_pool_allocator.page_size
    table = runner.req_to_token_pool.req_to_token
    pool = runner.token_to_kv_pool
    slots_there = min(pool.get_kv_buffer(layer)[0].shape[0] for layer in _front(known))
    pages = slots_there // page - 1  # the first one is nobody's
    found: list[tuple[int, int]] = []
    taken = 0
    for cached, new in _lengths(window, page):
        needed = -(-(cached + new) // page)
        fits = taken + needed <= pages and cached + new <= table.shape[1]
        if fits and len(found) + 1 < table.shape[0]:
            found.append((cached, new))
            taken += needed
    draw = torch.Generator().manual_seed(0)
    places = [torch.randperm(taken, generator=draw) + 1 for _ in range(2)]
    vocabulary = known.model.config.vocab_size
    requests = []
    for row, (cached, new) in enumerate(found, start=1):
        needed = -(-(cached + new) // page)
        slots = [
            (place[:needed, None] * page + torch.arange(page)).flatten()[: cached + new]
            for place in places
        ]
        places = [place[needed:] for place in places]
        # In the middle of the vocabulary: Gemma keeps special tokens at both ends.
        ids = torch.randint(vocabulary // 2, vocabulary * 9 // 10, (new,), generator=draw)
        at = [tensor.to(runner.device) for tensor in (ids, *slots)]
        requests.append(_Request(row, cached, new, *at))
    return requests


def _front(known: Owner) -> list[int]:
    """Layers 0 to K-1, by their numbers."""
    layers = known.model.layers[: known.first_shared]
    return [layer.self_attn.attn.layer_id for layer in layers]


# ---------------------------------------------------------------- both ways


@dataclass(frozen=True)
class _Answers:
    """All that anybody reads of a prefill.

    Attributes:
        logits: [requests, vocabulary]; None of an unfinished chunk.
        logprobs: [1, wanted], input logprobs; None if nobody wants any.
        caches: K and V of each layer of the front, for all new tokens.
    """

    logits: torch.Tensor | None
    logprobs: torch.Tensor | None
    caches: list[torch.Tensor]

    def difference(self, found: _Answers) -> float:
        """The largest relative error of a row of what both have."""
        pairs = [(self.logits, found.logits), (self.logprobs, found.logprobs)]
        pairs += zip(self.caches, found.caches, strict=True)
        return max(
            difference.relative_error(expected, other)
            for expected, other in pairs
            if expected is not None and other is not None
        )

    def of_one(self, number: int, first: int, new: int) -> _Answers:
        """Those of one request, whose first new token is the batch's token ``first``."""
        caches = [cache[first : first + new] for cache in self.caches]
        logits = None if self.logits is None else self.logits[number : number + 1]
        return _Answers(logits, None, caches)

    def caches_alone(self) -> _Answers:
        """All that is read of a chunk that finishes no prompt."""
        return _Answers(None, None, self.caches)


@contextmanager
def _placed(
    runner: Any, layers: Sequence[int], requests: Sequence[_Request], window: int
) -> Iterator[None]:
    """SGLang's tables say where these requests' tokens are, and their K and V are random."""
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    mapping = getattr(pool, "full_to_swa_index_mapping", None)
    last = 1 + max(int(places.max()) for r in requests for places in (r.slots, r.window_slots))
    caches = [buffer[:last] for layer in layers for buffer in pool.get_kv_buffer(layer)]
    rows = [(table[r.row, : len(r.slots)], r) for r in requests]
    mappings = [] if mapping is None else [mapping[:last]]
    with borrowed([*caches, *mappings, *(row for row, _ in rows)]):
        generator = torch.Generator(runner.device).manual_seed(0)
        for cache in caches:
            cache.copy_(random_like(cache, generator))
        for layer in layers:
            _mark_edges(pool, layer, requests, window)
        for row, request in rows:
            row.copy_(request.slots)
            for of_window in mappings:
                of_window[request.slots] = request.window_slots.to(of_window.dtype)
        yield


def _mark_edges(pool: Any, layer: int, requests: Sequence[_Request], window: int) -> None:
    """Have one token too few or too many in the window of a last row change all of its output.

    One value of 512 that are averaged would be lost in bf16's rounding: so the values of the first
    token within, and of the last one without, are as large as all of the others together.
    """
    values = pool.get_kv_buffer(layer)[1]
    most = torch.finfo(values.dtype).max / 8  # normally distributed numbers are below 8
    for request in requests:
        slots = request.window_slots if seams.is_in_window_pool(pool, layer) else request.slots
        first = len(slots) - window
        for token in (first - 1, first):
            if 0 <= token < request.cached:
                at = slots[token]
                values[at] = (values[at].float() * min(window, most)).to(values.dtype)


class _BothWays:
    """Runs batches of the same requests, as stock and on the fast path."""

    def __init__(self, runner: Any, known: Owner, requests: Sequence[_Request]) -> None:
        self._runner = runner
        self._known = known
        self._requests = requests
        self._layers = _front(known)
        self._generator = torch.Generator(runner.device).manual_seed(1)

    def largest(self) -> float:
        """The largest difference from stock, of all kinds of batches."""
        together = self._difference(None, finishes=True)
        starts = [r.new for r in self._requests]
        starts[0], starts[-1] = 2, 0
        suffixes = self._difference(starts, finishes=True)
        unread = self._difference(None, finishes=False)
        return max(together, suffixes, unread)

    def of_stock(self) -> float:
        """The largest difference of stock from itself, where each request runs alone."""
        together = self._stock(self._requests, None, finishes=True)
        errors = []
        for number, request in enumerate(self._requests):
            alone = self._stock([request], None, finishes=True)
            first = sum(r.new for r in self._requests[:number])
            errors.append(alone.difference(together.of_one(number, first, request.new)))
        return max(errors)

    def _difference(self, starts: list[int] | None, *, finishes: bool) -> float:
        stock = self._stock(self._requests, starts, finishes=finishes)
        with report.unheard() as outcomes:
            fast = self._run(self._requests, starts, finishes=finishes)
        if report.FAILED in outcomes:
            return math.inf
        if not report.CUT.issuperset(outcomes) or not outcomes:
            raise NotCutError(next(iter(outcomes), NOT_SEEN))
        return stock.difference(fast if finishes else fast.caches_alone())

    def _stock(
        self, requests: Sequence[_Request], starts: list[int] | None, *, finishes: bool
    ) -> _Answers:
        with report.unheard(), self._known.refusing(_BEING_CHECKED):
            return self._run(requests, starts, finishes=finishes)

    def _run(
        self, requests: Sequence[_Request], starts: list[int] | None, *, finishes: bool
    ) -> _Answers:
        caches = list(self._caches(requests))
        for buffer, slots in caches:  # what a forward does not write must not look as if it had
            buffer[slots] = random_like(buffer[slots], self._generator).to(buffer.dtype)
        batch = seams.prefill_batch(
            self._runner,
            input_ids=torch.cat([r.ids for r in requests]),
            requests=[r.row for r in requests],
            lens=[r.new for r in requests],
            prefix_lens=[r.cached for r in requests],
            slots=torch.cat([r.slots[r.cached :] for r in requests]),
            logprob_starts=starts,
            finishes=finishes,
        )
        output = self._runner.forward(batch).logits_output
        logprobs = None if starts is None else output.input_token_logprobs.clone()[None]
        written = [buffer[slots] for buffer, slots in caches]
        return _Answers(output.next_token_logits.clone(), logprobs, written)

    def _caches(self, requests: Sequence[_Request]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer of the front, and where the new tokens are in them."""
        pool = self._runner.token_to_kv_pool
        for layer in self._layers:
            window = seams.is_in_window_pool(pool, layer)
            slots = [(r.window_slots if window else r.slots)[r.cached :] for r in requests]
            for buffer in pool.get_kv_buffer(layer):
                yield buffer, torch.cat(slots)
