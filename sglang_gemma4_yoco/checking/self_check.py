"""Before it serves: a few small prefills of nobody's, as stock and on the fast path, compared.

The package's tests know neither this GPU nor these weights. So when the server starts, behind its
graphs, it runs requests that reach beyond the window, with prefixes of random K and V: together,
with logprobs, and as an unfinished chunk. Each layer is compared with stock's on stock's own
numbers (``layerwise``), where a defect is a defect and rounding is rounding; the recorded tail with
the launched layers on the same rows, padding and all; K and V of all layers in the pools; and no
slot that is not the requests' may change.

End to end only that is judged which no rounding does: logits are numbers, and each request's are
nearest to its own of stock's. How far they are apart is told, beside what stock's own answers do
when each step of its tail is rounded once more: in bf16 both may be large on a model that is right.

With a window of 512 and pages of one slot, the requests have 0 + 7, 508 + 6 and 1025 + 5 tokens
(cached + new): a few rows each, so that this takes milliseconds, and rows around the window's edge.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from sglang_gemma4_yoco import log, seams, settings
from sglang_gemma4_yoco.checking import layerwise, proof, rounding
from sglang_gemma4_yoco.checking.borrowed import borrowed, random_like
from sglang_gemma4_yoco.checking.checked import Checked
from sglang_gemma4_yoco.checking.layerwise import Forced, Trace
from sglang_gemma4_yoco.checking.replayed import Witness
from sglang_gemma4_yoco.checking.rounding import Finding
from sglang_gemma4_yoco.cutting.served import ServedModel
from sglang_gemma4_yoco.deciding.rows import KeptRows

OFF = f"{settings.name_of('self_check')}=0"
FAILED = "its self-check at start failed"
BACKED_LATER = "K and V get their memory later"
NO_ROOM = "the pools are too small for it"
NOT_FINITE = "stock's own answers are not finite numbers"
NOT_SEEN = "such prefills run in no way that could be seen"  # replayed from a CUDA graph
NOT_REPLAYED = "the recorded tail was not replayed"
RAISED = "the fast path raised an error"
NO_NUMBERS = "logits that are no numbers"
OTHERS_ROW = "logits nearer to another request's than to its own"
OTHERS_SLOTS = "slots that are not the requests' were written to"
NO_DOOR_TAKEN = "no prefill of the check has left by a door"
_BEING_CHECKED = "it is being compared with stock"
_NEW = 7  # tokens of a request
_BEHIND = 2  # tokens of one, behind the window of its first one
_FARTHER = 4.0  # than one more rounding takes stock's logits those of a right fast path may be


class FastPathError(Exception):
    """A forward failed on the fast path, and was served by stock."""


class NotComparableError(Exception):
    """There are not two ways to compare; the message says why."""


def why_not(runner: Any) -> str | None:
    """Why the check is not made on this server, or None; the same on all ranks."""
    if not settings.current.self_check:
        return OFF
    if seams.is_backed_later(runner.token_to_kv_pool):
        return BACKED_LATER
    return None


def check(runner: Any, known: ServedModel) -> Checked:
    """Run and compare; all that was written is put back.

    Args:
        runner: SGLang's ``ModelRunner``, which serves nobody at the moment.
        known: what is known of its model, whose batches may be cut.
    """
    began = time.monotonic()
    try:
        with comparing(runner, known) as both:
            with known.eagerly():
                found = both.findings()
            doors = both.through_doors()
    except NotComparableError as why:
        return Checked(unchecked=str(why))
    except FastPathError:  # it is logged, with its traceback
        return Checked(rounding.defect(RAISED), seconds=time.monotonic() - began)
    seconds = time.monotonic() - began
    return Checked(rounding.worst(found), both.apart, both.noise, seconds, doors=doors)


@contextmanager
def comparing(runner: Any, known: ServedModel) -> Iterator[BothWays]:
    """Stock has been watched on the requests of nobody's, and they can be run on the fast path.

    Raises:
        NotComparableError: the message says why.
    """
    window = max(seams.keys_in_window(layer.self_attn.attn) for layer in known.model.layers)
    requests = _requests(runner, known, window)
    if not requests:
        raise NotComparableError(NO_ROOM)
    placed = _placed(runner, known, requests, window)
    with torch.no_grad(), placed as places, settings.changed(min_skipped_rows=1):
        with known.eagerly():
            both = BothWays(runner, known, requests, places)
        yield both


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


def _requests(runner: Any, known: ServedModel, window: int) -> list[_Request]:
    """Those that fit into the pools; slots follow each other in a page, and pages do not."""
    page = runner.token_to_kv_pool_allocator.page_size
    table = runner.req_to_token_pool.req_to_token
    pool = runner.token_to_kv_pool
    slots_there = min(pool.get_kv_buffer(layer)[0].shape[0] for layer in _donors(known))
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


def _donors(known: ServedModel) -> list[int]:
    """Layers with K and V of their own, 0 to K-1, by their numbers."""
    layers = known.model.layers[: known.first_shared]
    return [layer.self_attn.attn.layer_id for layer in layers]


# ---------------------------------------------------------------- places


@contextmanager
def _placed(
    runner: Any, known: ServedModel, requests: Sequence[_Request], window: int
) -> Iterator[list[torch.Tensor]]:
    """SGLang's tables say where these requests' tokens are, and their K and V are random.

    Yields views of all places that may be written to or read.
    """
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    mapping = getattr(pool, "full_to_swa_index_mapping", None)
    last = 1 + max(int(places.max()) for r in requests for places in (r.slots, r.window_slots))
    caches = {
        layer: tuple(buffer[:last] for buffer in pool.get_kv_buffer(layer))
        for layer in _donors(known)
    }
    rows = [(table[r.row, : len(r.slots)], r) for r in requests]
    mappings = [] if mapping is None else [mapping[:last]]
    places = [buffer for of_layer in caches.values() for buffer in of_layer]
    with borrowed([*places, *mappings, *(row for row, _ in rows)]):
        generator = torch.Generator(runner.device).manual_seed(0)
        for layer, (keys, values) in zip(known.model.layers, caches.values(), strict=False):
            # As large as the model's own: Gemma 4 scales no scores, its weights keep them small.
            of_channels = layer.self_attn.k_norm.weight.float()
            keys.copy_(random_like(keys, generator) * of_channels)
            values.copy_(random_like(values, generator))
        for layer in caches:
            _mark_edges(pool, layer, requests, window)
        for row, request in rows:
            row.copy_(request.slots)
            for of_window in mappings:
                of_window[request.slots] = request.window_slots.to(of_window.dtype)
        yield places


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


# ---------------------------------------------------------------- both ways


@dataclass(frozen=True)
class _Run:
    """What came of one forward.

    Attributes:
        logits: [requests, vocabulary].
        caches: K and V of each layer of the front for all new tokens, [T, kv_heads, head_dim].
        outcome: as it was counted; None where none was.
    """

    logits: torch.Tensor
    caches: dict[int, tuple[torch.Tensor, torch.Tensor]]
    outcome: str | None


class BothWays:
    """Runs batches of the same requests, as stock and on the fast path.

    Attributes:
        apart: the largest difference of a request's logits from stock's, end to end.
        noise: that of stock's from its own, where its tail is rounded once more.
    """

    def __init__(
        self,
        runner: Any,
        known: ServedModel,
        requests: Sequence[_Request],
        places: Sequence[torch.Tensor],
    ) -> None:
        self.apart = self.noise = 0.0
        self._runner = runner
        self._known = known
        self._requests = requests
        self._places = places
        self._layers = _donors(known)
        self._generator = torch.Generator(runner.device).manual_seed(1)
        self._lens = [r.new for r in requests]
        self._ends = list(accumulate(self._lens))
        # One request with several rows, one with its last alone, one with all.
        self._starts = list(self._lens)
        self._starts[0], self._starts[-1] = 2, 0
        self._before = self._others()
        self._trace = Trace(known.first_cut, self._rows(range(sum(self._lens))))
        with layerwise.watched(known.model, self._trace, start=0):
            self._stock = self._as_stock()
        if not self._trace.is_whole:
            raise NotComparableError(NOT_SEEN)
        if not self._stock.logits.isfinite().all():
            raise NotComparableError(NOT_FINITE)

    def findings(self) -> list[Finding]:
        """All that is judged.

        Raises:
            NotComparableError: a batch that should have been cut was not.
            FastPathError: a forward failed.
        """
        last_rows = self._trace.of_rows(self._rows(end - 1 for end in self._ends))
        found = self._launched(last_rows, None)
        found += self._launched(self._of_suffixes(self._trace), self._starts)
        found += self._unread(last_rows)
        found += self._replayed(last_rows)
        found += self._as_served()
        if not all(map(torch.equal, self._before, self._others())):
            found.append(rounding.defect(OTHERS_SLOTS))
        return found

    def through_doors(self) -> Finding | None:
        """Prefills that leave SGLang's recording by its open doors; None where they are closed.

        Returns:
            What is farthest beyond its bound, or nearest to it.
        """
        if self._known.doors.closed is not None:
            return None
        if self._known.doors.room < sum(self._lens):
            return rounding.defect(
                f"{NO_DOOR_TAKEN}: they have up to {self._known.doors.room} rows"
            )
        kinds = (True, False) if self._graph_size is not None else (False,)
        witness = Witness(self._known)
        before, self._known.auditor = self._known.auditor, witness
        try:
            with self._known.by_recordings():
                for finishes in kinds:
                    self._fast(None, finishes=finishes)
        except NotComparableError as why:
            return rounding.defect(f"{NO_DOOR_TAKEN}: {why}")
        finally:
            self._known.auditor = before
        if witness.seen < len(kinds):  # recordings have no room for these, or too much
            return rounding.defect(NO_DOOR_TAKEN)
        if not all(map(torch.equal, self._before, self._others())):
            witness.found.append(rounding.defect(OTHERS_SLOTS))
        return rounding.worst(witness.found)

    # -- what is compared ----------------------------------------------------------------------

    def _launched(self, trace: Trace, starts: list[int] | None) -> list[Finding]:
        """Each layer on stock's numbers; rows of ``trace`` are those that are kept."""
        last = len(self._known.model.layers) - 1
        with self._known.launching(), Forced(self._known.model, trace, 0, last) as forced:
            run = self._fast(starts)
        return [*forced.findings(), *self._written(run)]

    def _unread(self, trace: Trace) -> list[Finding]:
        """Nothing but K and V of layer K-1, given stock's rows."""
        model = self._known.model
        with Forced(model, trace, 0, self._known.first_cut - 1) as forced:
            run = self._fast(None, finishes=False)
        return [*forced.findings(), *self._written(run)]

    def _replayed(self, trace: Trace) -> list[Finding]:
        """The recorded tail, given stock's rows, and its layers launched on the same rows."""
        tail, size = self._known.graphs, self._graph_size
        if tail is None or size is None:
            return []
        with Forced(self._known.model, trace, 0, tail.first - 1) as forced:
            run = self._fast(None)
        if run.outcome != log.TAIL_CAPTURED or forced.final is None:
            raise NotComparableError(NOT_REPLAYED)
        replayed = forced.final.clone()
        fill = partial(
            trace.fill,
            requests=torch.tensor([r.row for r in self._requests]),
            lengths=torch.tensor([r.cached + r.new for r in self._requests]),
        )
        inputs = tail.inputs_for(size, len(self._requests), fill)
        launched = tail.launched(inputs)[: len(self._requests)]
        return [*forced.findings(), *self._written(run), proof.difference(launched, replayed)]

    @property
    def _graph_size(self) -> int | None:
        """Rows of the graph that replays the requests' last rows; None if none does."""
        tail = self._known.graphs
        return None if tail is None else tail.size_for(KeptRows.suffixes(self._lens, self._lens))

    def _as_served(self) -> list[Finding]:
        """End to end, with nothing forced: what no rounding does."""
        logits, stock, noisy = self._fast(None).logits, self._stock.logits, self._noisy()
        self.apart = rounding.relative_error(stock, logits)
        self.noise = rounding.relative_error(stock, noisy)
        found = [] if logits.isfinite().all() else [rounding.defect(NO_NUMBERS)]
        if _strays(stock, logits) and not _strays(stock, stock + _FARTHER * (noisy - stock)):
            found.append(rounding.defect(OTHERS_ROW))
        return found

    def _noisy(self) -> torch.Tensor:
        """Stock's logits, each attention and FFN of its tail rounded once more."""
        behind = self._known.model.layers[self._known.first_cut :]
        with layerwise.rounded_once_more(behind, self._generator):
            return self._as_stock().logits

    def _written(self, run: _Run) -> list[Finding]:
        """K and V in the pools, of all layers that have some."""
        stock = self._stock.caches
        return rounding.findings(
            [
                comparison
                for layer in self._layers
                for comparison in layerwise.keys_and_values_compared(
                    f"layer {layer} in the pool", stock[layer], run.caches[layer]
                )
            ]
        )

    # -- rows ----------------------------------------------------------------------------------

    def _rows(self, numbers: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self._runner.device)

    def _of_suffixes(self, trace: Trace) -> Trace:
        rows: list[int] = []
        for end, new, start in zip(self._ends, self._lens, self._starts, strict=True):
            rows += range(end - max(1, new - start), end)
        return trace.of_rows(self._rows(rows))

    def _others(self) -> list[torch.Tensor]:
        """Copies of all places but those of the new tokens, which are zeros here."""
        copies = [place.clone() for place in self._places]
        for number, (_, slots) in enumerate(self._caches()):
            copies[number][slots] = 0
            copies[number][0] = 0  # nobody's, where padding goes
        return copies

    # -- forwards ------------------------------------------------------------------------------

    def _as_stock(self) -> _Run:
        with log.not_counted(), self._known.refusing(_BEING_CHECKED):
            return self._run(self._starts, finishes=True)

    def _fast(self, starts: list[int] | None, *, finishes: bool = True) -> _Run:
        with log.not_counted() as outcomes:
            run = self._run(starts, finishes=finishes)
        if log.FAILED in outcomes:
            raise FastPathError
        if not log.CUT.issuperset(outcomes) or not outcomes:
            raise NotComparableError(next(iter(outcomes), NOT_SEEN))
        return replace(run, outcome=next(iter(outcomes)))

    def _run(self, starts: list[int] | None, *, finishes: bool) -> _Run:
        requests = self._requests
        caches = list(self._caches())
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
        logits = self._runner.forward(batch).logits_output.next_token_logits.clone()
        written = [buffer[slots] for buffer, slots in caches]
        pairs = zip(self._layers, zip(written[::2], written[1::2], strict=True), strict=True)
        return _Run(logits, dict(pairs), None)

    def _caches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer of the front, and where the new tokens are in them."""
        pool = self._runner.token_to_kv_pool
        for layer in self._layers:
            window = seams.is_in_window_pool(pool, layer)
            slots = [(r.window_slots if window else r.slots)[r.cached :] for r in self._requests]
            for buffer in pool.get_kv_buffer(layer):
                yield buffer, torch.cat(slots)


def _strays(stock: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether some request's logits are nearer to another's of stock's; [requests, vocabulary]."""
    nearest = torch.cdist(logits.float(), stock.float()).argmin(dim=-1)
    return nearest.tolist() != list(range(len(nearest)))
