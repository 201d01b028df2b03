"""The self-check at start: small prefills of synthetic requests, as stock and cut, compared.

Stock is recorded once on requests that exceed the window. Then the cut runs on stock's rows and is
compared step by step (``layerwise``): for last rows, for suffixes as with input logprobs, for an
intermediate chunk, and with the captured tail. The logits that SGLang computes from the rows must
belong to the right request.

Finally one whole forward runs as in serving, but with stock's rows before the cut. Its K and V are
compared, and its logits must be finite. No slot of another request may change during the check.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_gemma4_yoco import counters, settings
from sglang_gemma4_yoco.checking import layerwise, rounding, synthetic_requests
from sglang_gemma4_yoco.checking.layerwise import Stock
from sglang_gemma4_yoco.checking.rounding import Difference, Tolerance
from sglang_gemma4_yoco.checking.synthetic_requests import (
    ForwardResult,
    NotComparableError,
    SyntheticRequests,
)
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.core import cut
from sglang_gemma4_yoco.core.kept_batch import KeptRows
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.patched import patched
from sglang_gemma4_yoco.refusal import ServerRefusal

CHECK_FAILED = ServerRefusal("its self-check at start failed", is_logged=False)
UNCHECKED = "its self-check at start could not be run"
NOT_FINITE = "stock's own answers are not finite numbers"
NOT_SEEN = "the layers of the check's prefills could not be observed"  # replayed, or not ours
RAISED = "the fast path raised an error"
NO_NUMBERS = "logits that are not finite"
OTHERS_SLOTS = "KV slots that are not the requests' were written to"
# Triton compiles a kernel three times: for 1 request, for a multiple of 16, and for other numbers,
# which the comparisons use. In a cut prefill these kernels are SGLang's extend kernel before the
# cut and, if the tail runs eagerly, the one of its decode step's metadata.
_OTHER_NUMBERS = (1, 16)
_OF_LOGITS = Tolerance(3.0, over=-1)  # on top of the last layer's and the norm's errors


class FastPathError(Exception):
    """A forward failed on the fast path; the failure is logged with its traceback."""


@dataclass(frozen=True)
class CheckResult:
    """The result of the check: the worst comparison, or the reason why nothing was compared."""

    worst: Difference | None = None
    seconds: float = 0.0
    unchecked: str | None = None

    @property
    def agrees(self) -> bool:
        """True if prefills may be cut: nothing differs, or the check is disabled."""
        if not self.worst:
            return self is NOT_WANTED
        return self.worst.is_rounding

    @property
    def refusal(self) -> ServerRefusal:
        """The reason for stock if this rank or another one does not agree."""
        if not self.worst and not self.agrees:
            return ServerRefusal(f"{UNCHECKED}: {self.unchecked}", is_logged=False)
        return CHECK_FAILED

    def __str__(self) -> str:  # for the log
        if not self.worst:
            return f"not checked: {self.unchecked}"
        if self.agrees:
            return f"self-check passed: worst {self.worst}"
        return str(self.worst)

    def to_json(self) -> dict[str, Any]:  # for /server_info
        what = error = allowed = None
        if self.worst:
            what, error, allowed = self.worst
        return {
            "compared": what,
            "largest_difference": error,
            "allowed": allowed,
            "seconds": round(self.seconds, 3),
            "unchecked": self.unchecked,
        }


#: The result if the check is disabled, on all ranks.
NOT_WANTED = CheckResult(unchecked=f"{settings.name_of('self_check')}=0")


def check_model(runner: ModelRunner, state: ModelState) -> CheckResult:
    """Run all comparisons on an idle ``ModelRunner``; slots that are written are restored.

    If the setting disables the check, nothing runs, and the result is ``NOT_WANTED``.
    """
    if not settings.current.self_check:
        return NOT_WANTED
    began = time.monotonic()
    found = []
    try:
        for lengths in synthetic_requests.choose_batches(runner, state):
            with run_both_paths(runner, state, lengths) as both:
                found += both.findings()
                if state.on_gpu:
                    both.compile_kernels(runner)
        worst = rounding.find_worst(found)
    except NotComparableError as why:
        return CheckResult(unchecked=str(why))
    except FastPathError:
        worst = rounding.make_defect(RAISED)
    return CheckResult(worst, time.monotonic() - began)


@contextmanager
def run_both_paths(
    runner: ModelRunner, state: ModelState, lengths: Sequence[synthetic_requests.Lengths] = ()
) -> Iterator[BothPaths]:
    """Yield both paths, with stock recorded on synthetic requests.

    Args:
        lengths: of the requests, as for ``make_synthetic_requests``.

    Raises:
        NotComparableError: the requests do not fit, or stock cannot be recorded.
    """
    with (
        patched(runner, prefill_cuda_graph_runner=None),
        synthetic_requests.make_synthetic_requests(runner, state, lengths) as synthetic,
    ):
        yield BothPaths(state, synthetic)


class BothPaths:
    """The same synthetic requests, run as stock and on the fast path."""

    def __init__(self, state: ModelState, synthetic: SyntheticRequests) -> None:
        """Run stock, and record it."""
        self._state = state
        self._requests = synthetic
        lens = synthetic.lens
        # One request with several rows, one with its last only, one with all.
        self._starts = [*lens[:-1], 0]
        self._starts[0] = 2
        device = synthetic.requests[0].ids.device
        self._stock = stock = Stock(torch.arange(sum(lens), device=device))
        as_stock = replace(state, off_because=ServerRefusal("it is being compared"))
        with layerwise.watch_stock(state, stock, first=0):
            run = synthetic.run(as_stock, self._starts)
        if not stock.layer_inputs:
            raise NotComparableError(NOT_SEEN)
        if not run.logits.isfinite().all():
            raise NotComparableError(NOT_FINITE)
        self._logits = run.logits
        #: K and V of the layers before layer S-1.
        self._before_cut = dict(run.caches)
        stock.keys = self._before_cut.pop(state.cut_layer)

    def findings(self) -> list[Difference]:
        """Run all comparisons, and return their findings.

        Raises:
            NotComparableError: a batch that should have been cut was not.
            FastPathError: a forward failed.
        """
        eager = replace(self._state, captured=None)
        found = self._on_stocks_rows(eager)
        found += self._on_stocks_rows(eager, self._starts)
        found += self._on_stocks_rows(eager, finishes=False)
        if self._state.captured:  # eager again if no graph has this many rows
            found += self._on_stocks_rows(self._state)
        found += self._as_served()
        if self._requests.others_changed():
            found.append(rounding.make_defect(OTHERS_SLOTS))
        return found

    def compile_kernels(self, runner: ModelRunner) -> None:
        """Compile kernels that the comparisons do not use, so that no request waits for them."""
        for number in _OTHER_NUMBERS:
            if number <= runner.max_running_requests:
                same = [self._requests.requests[0]] * number
                SyntheticRequests(runner, self._state, same).run(self._state)

    def _on_stocks_rows(
        self,
        state: ModelState,
        starts: Sequence[int] | None = None,
        *,
        finishes: bool = True,
    ) -> list[Difference]:
        """Run the cut on stock's rows, with the captured tail if there is one, and compare."""
        lens = self._requests.lens
        found = []
        known = self._stock.of_rows(KeptRows.suffixes(lens, lens, starts).indices)

        def run_prefill(_: object, plan: Plan, *__: object) -> torch.Tensor:
            rows, steps = layerwise.run_on_stocks_rows(state, plan, known)
            found.extend(steps)
            return rows

        with patched(cut, run_prefill=run_prefill):
            seen, before = self._cut(
                state, starts=starts, given=self._before_cut, finishes=finishes
            )
        found += before
        # A captured tail does not run on stock's steps.
        if finishes and not state.captured:
            # The logits' rounding depends on the type of these rows, and not on their own.
            rows = self._stock.layer_inputs[state.cut_layer]
            found.append(
                rounding.compare_rows("logits", self._logits, seen.logits, _OF_LOGITS, rounded=rows)
            )
        return found

    def _as_served(self) -> list[Difference]:
        """Run a whole forward as in serving, but with stock's rows before the cut."""
        state = self._state
        given = self._stock.layer_inputs

        def force(number: int, _: object, __: object, call: dict[str, Any]) -> None:
            state.adapter.view_rows(call["hidden_states"]).copy_(given[number])

        with layerwise.call_before_layers(state, range(state.cut_layer), force):
            seen, found = self._cut(state)
        if not seen.logits.isfinite().all():
            found.append(rounding.make_defect(NO_NUMBERS))
        return found

    def _cut(self, state: ModelState, **how: Any) -> tuple[ForwardResult, list[Difference]]:
        """Run a forward that must be cut, and compare K and V of the layers before the cut.

        Args:
            how: arguments of ``SyntheticRequests.run``.
        """
        run = self._requests.run(state, **how)
        if run.outcome == counters.FAILED:
            raise FastPathError
        if run.outcome not in counters.CUT:
            raise NotComparableError(str(run.outcome or NOT_SEEN))
        found = []
        for layer, expected in self._before_cut.items():
            found += layerwise.compare_keys_and_values(layer, expected, run.caches[layer])
        return run, found
