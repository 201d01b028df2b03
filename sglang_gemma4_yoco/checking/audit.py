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
from random import Random

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
        log.log_warning(
            f"YOCO fast prefill is not audited: {TABLES}; "
            f"{compat.server.BARRIER_VARIABLE}=1 prevents that"
        )
        return None
    return Auditor(state, settings.current.audit, Random(0))


@dataclass(eq=False)
class Auditor:
    """Audits one of N forwards of one model on average; called after each forward that was cut.

    The first forward of each outcome is audited, and of the others each with probability 1 / N: in
    a fixed rhythm, some chunks of equal prompts would never be audited. All ranks have the same
    outcomes and draw the same numbers, so they audit the same forwards.

    Attributes:
        every: N.
        draw: the generator, with the same seed on all ranks.
    """

    state: ModelState
    every: int
    draw: Random

    def __call__(self, forward: Forward, plan: Plan, output: ModelOutput) -> ModelOutput:
        """Audit the forward if it is chosen, and return the output for the model.

        An audit that fails is the last one.

        Raises:
            Exception: the audit failed, and other ranks wait for this one.
        """
        is_known = plan.outcome in self.state.counters.forwards  # counted after its audit
        if is_known and self.draw.randrange(self.every):
            return output
        try:
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
