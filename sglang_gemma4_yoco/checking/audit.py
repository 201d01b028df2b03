"""Audits of a running server: one of N prefills that were cut runs again as stock, and is compared.

Stock is recorded, and the cut runs again on its rows, step by step (``layerwise``): eagerly, and
with the captured tail if that served. All kept rows, and K and V of layer S-1, are compared. A
prefill that left its graph at an exit is compared with a full replay of the graph. The client gets
stock's answer.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass, replace

from sglang_gemma4_yoco import compat, log, settings
from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.checking import exit_check, layerwise, rounding
from sglang_gemma4_yoco.checking.layerwise import Stock
from sglang_gemma4_yoco.checking.rounding import Difference
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.compat.text_model import ModelOutput
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.core.eager_tail import EagerTail
from sglang_gemma4_yoco.core.interfaces import Forward
from sglang_gemma4_yoco.core.kept_batch import rewrite_batch
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.counters import DIFFERS
from sglang_gemma4_yoco.refusal import ServerRefusal

TABLES = "SGLang may rewrite its tables before an audit reads them"
DIFFERED = ServerRefusal("an audited prefill differed from stock's", level=logging.ERROR)
_MOST_LINES = 16  # errors that are logged; the others are counted


def make_auditor(runner: ModelRunner, state: ModelState) -> Auditor | None:
    """Return the auditor of this server; None if audits are off, or impossible (logged)."""
    if settings.current.audit == 0:
        return None
    if compat.attention.frees_tables_early(runner.attn_backend):
        log.log_once(
            f"YOCO fast prefill is not audited: {TABLES}; "
            f"{compat.server.BARRIER_VARIABLE}=1 prevents that",
            logging.WARNING,
        )
        return None
    return Auditor(state, Turns(settings.current.audit))


class Turns:
    """Chooses the forwards that are audited: one of N, and each outcome in its turn.

    One audit is due for every N forwards. The first due one is reserved for the outcome that was
    audited least recently, the second for the next one, and so on. So an outcome that stops
    occurring holds back only one audit, and a rare outcome is audited as soon as it occurs.

    With k outcomes so far, a forward is audited if it comes kN or more forwards after the last
    audit of its outcome (or after the first forward of that outcome). The choice depends only on N
    and the outcomes so far, which are the same on all ranks.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._forwards = self._audits = 0
        #: The outcomes so far, ordered by their last audits; new ones at the end.
        self._order: list[str] = []

    def take(self, outcome: str) -> bool:
        """Count a forward with this outcome, and return True if it is to be audited."""
        self._forwards += 1
        if outcome not in self._order:
            self._order.append(outcome)
        kept_for_others = self._order.index(outcome)
        due = self._forwards // self._every - self._audits
        if self._every > 1 and due <= kept_for_others:
            return False
        self._audits += 1
        self._order.remove(outcome)
        self._order.append(outcome)
        return True


@dataclass(eq=False)
class Auditor:
    """Audits the forwards of one model; called after each forward that was cut."""

    state: ModelState
    turns: Turns

    def __call__(self, forward: Forward, plan: Plan, output: ModelOutput) -> ModelOutput:
        """Audit the forward in its turn, and return the output for the model.

        An audit that fails is the last one.

        Raises:
            Exception: the audit failed, and other ranks wait for this one.
        """
        try:
            if self.turns.take(plan.outcome):
                return self._audit(forward, plan, output)
        except Exception as failure:
            if not compat.server.is_single_rank():
                raise
            self.state.after_cut = None  # the fast path has served, and stays on
            log.log_failure("YOCO fast prefill: an audit failed, audits are disabled", failure)
            traceback.clear_frames(failure.__traceback__)  # the answer may need their memory
        return output

    def _audit(self, forward: Forward, plan: Plan, output: ModelOutput) -> ModelOutput:
        """Audit one forward; on failure ``output`` is restored, and K and V are complete."""
        rows = compat.layers.get_rows(output)
        fast = rows.clone()  # stock may overwrite their memory
        try:
            # A forward that fails leaves its residual on the batch.
            with rewrite_batch(plan.kept_batch.batch, {}):
                if self.state.front:  # the full replay overwrites ``output``
                    found = exit_check.compare_exit(forward, plan, output)
                    answer = output
                else:
                    found, answer = self._run_again(forward, plan)
            self._judge(plan, found)
        except BaseException:
            rows.copy_(fast)
            raise
        return answer

    def _run_again(self, forward: Forward, plan: Plan) -> tuple[list[Difference], ModelOutput]:
        """Return the findings of the cut on stock's rows, and stock's output."""
        stock = Stock(plan.kept_batch.index)
        found = list[Difference]()
        with layerwise.watch_stock(self.state, stock, self.state.cut_layer):
            output = forward.stock()
        stock.keys = layerwise.get_donor_cache(self.state, plan).read()
        if isinstance(plan.runner, Replay):
            _, found = layerwise.run_on_stocks_rows(self.state, plan, stock)
            plan = replace(plan, runner=EagerTail.of(self.state, plan.backends, plan.kept_batch))
        _, found_eagerly = layerwise.run_on_stocks_rows(self.state, plan, stock)
        return found + found_eagerly, output

    def _judge(self, plan: Plan, found: list[Difference]) -> None:
        """Count an audit; log a defect, and turn the path off if audits are strict."""
        worst = rounding.find_worst(found)
        differ = ranks.find_difference(f"an audit: {worst.is_rounding}")
        agrees = worst.is_rounding and not differ
        counters = self.state.counters
        counters.count_audit(worst.excess, agrees=agrees)
        if agrees:
            return
        if counters.audits[DIFFERS] <= _MOST_LINES:
            batch = plan.kept_batch.batch
            what = str(worst)
            if worst.is_rounding:
                what = "another rank has found a defect"
            log.log_error(
                f"YOCO fast prefill: an audited prefill differs from stock's: {what}; new "
                f"tokens {batch.extend_seq_lens_cpu}, cached {batch.extend_prefix_lens_cpu}, "
                f"logprobs from {batch.extend_logprob_start_lens_cpu}, {plan.outcome}"
            )
        if settings.current.audit_strict:
            self.state.turn_off(DIFFERED)
