"""Before it serves: a few small prefills of synthetic requests, as stock and cut, compared.

The package's tests know neither this GPU nor these weights. So when the server starts, after its
graphs, it runs requests that reach beyond the window. Stock is watched once. Then the cut is made
of stock's own rows: of the last rows, of suffixes as log-probabilities want them, of an
intermediate chunk, and by the captured tail, each compared step by step (``layerwise``), where a
defect is a defect and rounding is rounding. And K and V of all layers are compared in the pools.

The logits that SGLang makes of those rows are compared as well: they are the right rows of the
right request. At last one whole forward runs as it serves, but that the layers before the cut are
given stock's rows. It must be cut, with logits that are numbers: how far they are from stock's
means nothing, and among requests that are much alike rounding takes some nearer to another's. No
slot that is not the requests' may change in all of this.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_gemma4_yoco import log, seams, settings
from sglang_gemma4_yoco.captured.backend import is_allocated_after_capture
from sglang_gemma4_yoco.checking import layerwise, rounding
from sglang_gemma4_yoco.checking.layerwise import Stock
from sglang_gemma4_yoco.checking.requests import (
    NotComparableError,
    Run,
    SyntheticRequests,
    prefills_eagerly,
    synthetic_requests,
)
from sglang_gemma4_yoco.checking.rounding import Finding
from sglang_gemma4_yoco.core import forward as core_forward
from sglang_gemma4_yoco.core.cut import Plan
from sglang_gemma4_yoco.core.kept import KeptRows
from sglang_gemma4_yoco.core.replaced import replaced
from sglang_gemma4_yoco.core.state import ModelState

OFF = f"{settings.name_of('self_check')}=0"
FAILED = "its self-check at start failed"
ALLOCATED_LATER = "K and V get their memory later"
NOT_FINITE = "stock's own answers are not finite numbers"
NOT_SEEN = "such prefills run in no way that could be seen"  # replayed from a CUDA graph
NOT_REPLAYED = "the captured tail was not replayed"
RAISED = "the fast path raised an error"
NO_NUMBERS = "logits that are no numbers"
OTHERS_SLOTS = "slots that are not the requests' were written to"
_MODEL = ("input_ids", "positions", "forward_batch")
_BEING_CHECKED = "it is being compared with stock"


class FastPathError(Exception):
    """A forward failed on the fast path; it is logged, with its traceback."""


@dataclass(frozen=True)
class Checked:
    """What came of the check.

    Attributes:
        worst: the comparison that is farthest beyond its bound, or nearest to it; None where
            nothing was compared.
        seconds: how long it took.
        unchecked: why nothing was compared.
    """

    worst: Finding | None = None
    seconds: float = 0.0
    unchecked: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether nothing was found that speaks against the fast path."""
        return self.worst is None or self.worst.is_rounding

    def describe(self) -> str:
        """For the log."""
        if self.worst is None:
            return f"not checked: {self.unchecked}"
        return f"checked layer by layer: {'at most ' if self.agrees else ''}{self.worst}"

    def facts(self) -> dict[str, Any]:
        """For /server_info."""
        worst = self.worst
        return {
            "compared": None if worst is None else worst.what,
            "largest_difference": None if worst is None else worst.error,
            "allowed": None if worst is None else worst.allowed,
            "seconds": round(self.seconds, 3),
            "unchecked": self.unchecked,
        }


def why_not(runner: Any) -> str | None:
    """Why the check is not made on this server, or None; the same on all ranks."""
    if not settings.current.self_check:
        return OFF
    return ALLOCATED_LATER if is_allocated_after_capture(runner.token_to_kv_pool) else None


def check(runner: Any, state: ModelState) -> Checked:
    """Run and compare; all that was written is put back.

    Args:
        runner: SGLang's ``ModelRunner``, which serves nobody at the moment.
        state: of its model, whose batches may be cut. A forward that turns out to be none that can
            be cut refuses them all.
    """
    began = time.monotonic()
    try:
        with comparing(runner, state) as both:
            worst = rounding.worst(both.findings())
    except NotComparableError as why:
        return Checked(unchecked=str(why))
    except FastPathError:
        worst = rounding.defect(RAISED)
    return Checked(worst, time.monotonic() - began)


@contextmanager
def comparing(runner: Any, state: ModelState) -> Iterator[BothPaths]:
    """Stock has been watched on synthetic requests, which can now be run on the fast path.

    Raises:
        NotComparableError: the message says why.
    """
    with synthetic_requests(runner, state) as requests, prefills_eagerly(runner):
        yield BothPaths(state, requests)


class BothPaths:
    """The same synthetic requests, run as stock and on the fast path."""

    def __init__(self, state: ModelState, requests: SyntheticRequests) -> None:
        """Watch stock."""
        self._state = state
        self._requests = requests
        lens = requests.lens
        # One request with several rows, one with its last alone, one with all.
        self._starts = [2, *lens[1:-1], 0] if len(lens) > 1 else [2]
        self._stock = Stock(self._rows(range(sum(lens))))
        with self._watched(), state.refusing(_BEING_CHECKED):
            self._run = requests.run(self._starts)
        if self._stock.final is None or self._stock.front is None:
            raise NotComparableError(NOT_SEEN)
        if not self._run.logits.isfinite().all():
            raise NotComparableError(NOT_FINITE)
        self._stock.keys = self._run.caches[state.tail_layers[0].self_attn.attn.layer_id]

    def findings(self) -> list[Finding]:
        """All that is judged.

        Raises:
            NotComparableError: a batch that should have been cut was not.
            FastPathError: a forward failed.
        """
        last = self._of(KeptRows.suffixes(self._requests.lens, self._requests.lens))
        suffixes = self._of(
            KeptRows.suffixes(self._requests.lens, self._requests.lens, self._starts)
        )
        with replaced(self._state, captured=None):
            found = self._on_stocks_rows(last)
            found += self._on_stocks_rows(suffixes, self._starts)
            found += self._on_stocks_rows(last, finishes=False)
        if self._is_captured():
            found += self._on_stocks_rows(last, outcome=log.TAIL_CAPTURED)
        found += self._as_served()
        if self._requests.others_changed():
            found.append(rounding.defect(OTHERS_SLOTS))
        return found

    # -- what is compared ----------------------------------------------------------------------

    def _on_stocks_rows(
        self,
        stock: Stock,
        starts: Sequence[int] | None = None,
        *,
        finishes: bool = True,
        outcome: str | None = None,
    ) -> list[Finding]:
        """The cut, made of stock's rows; those of ``stock`` are kept."""
        forward = _OnStocksRows(self._state, stock)

        def run(*args: Any, **kwargs: Any) -> Any:
            batch = layerwise.called(_MODEL, args, kwargs)["forward_batch"]
            self._requests.write(self._run.caches, self._front_layers)
            return core_forward.serve(self._state, batch, forward)

        with replaced(self._state.model, forward=run):
            seen = self._cut(starts, finishes=finishes)
        if outcome not in (None, seen.outcome):
            raise NotComparableError(NOT_REPLAYED)
        found = forward.found + self._written(seen)
        if finishes and outcome is None:  # a captured tail is not given stock's steps
            assert stock.final is not None
            logits = self._run.logits, seen.logits
            found += rounding.findings([layerwise.compare_logits(*logits, rows=stock.final)])
        return found

    def _as_served(self) -> list[Finding]:
        """A whole forward."""
        with layerwise.before_the_cut(self._state, self._stock, force=True):
            seen = self._cut(None)
        found = self._written(seen, self._front_layers)
        if not seen.logits.isfinite().all():
            found.append(rounding.defect(NO_NUMBERS))
        return found

    def _written(self, seen: Run, layers: Sequence[int] | None = None) -> list[Finding]:
        """K and V in the pools, of these layers, or of all that have some."""
        pairs = ((n, self._run.caches[n], seen.caches[n]) for n in layers or seen.caches)
        return rounding.findings(
            [one for pair in pairs for one in layerwise.compare_keys_and_values(*pair)]
        )

    # -- forwards ------------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        def hook(_: Any, __: Any, output: Any) -> None:
            self._stock.final = seams.layer_rows(output).clone()

        handle = self._state.model.register_forward_hook(hook)
        try:
            with (
                layerwise.watched(self._state, self._stock),
                layerwise.before_the_cut(self._state, self._stock, force=False),
            ):
                yield
        finally:
            handle.remove()

    def _cut(self, starts: Sequence[int] | None, *, finishes: bool = True) -> Run:
        run = self._requests.run(starts, finishes=finishes)
        if run.outcome == log.FAILED:
            raise FastPathError
        if run.outcome not in log.CUT:
            raise NotComparableError(run.outcome or NOT_SEEN)
        return run

    @property
    def _front_layers(self) -> list[int]:
        """Those before the cut, by their numbers in the pools."""
        return list(self._run.caches)[: self._state.cut]

    def _is_captured(self) -> bool:
        """Whether a captured tail has room for the requests' last rows."""
        captured = self._state.captured
        last = KeptRows.suffixes(self._requests.lens, self._requests.lens)
        return captured is not None and captured.bucket_for(last) is not None

    # -- rows ----------------------------------------------------------------------------------

    def _of(self, kept: KeptRows) -> Stock:
        return self._stock.of_rows(self._rows(kept.indices))

    def _rows(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self._requests.device)


class _OnStocksRows:
    """A forward whose layers before the cut have given what stock's have."""

    def __init__(self, state: ModelState, stock: Stock) -> None:
        self.found: list[Finding] = []
        self._state = state
        self._stock = stock

    def fast(self, plan: Plan) -> torch.Tensor:
        rows, self.found = layerwise.prefill(self._state, plan, self._stock)
        return rows

    def stock(self) -> torch.Tensor:
        assert self._stock.front is not None
        return self._stock.front.clone()
