"""While it serves: every N-th shortened prefill is run again as stock, and the answers compared.

Compared are the logits of the kept rows, by SGLang's own logits processor, which the model around
the text model calls next; and K and V of layer K-1, whose way of being written is the package's
own. (The layers before it are stock's in any case.) The stock forward finds all as the first one
did, for the same reasons as in ``fallback``; K and V go to the same slots once more.

Who asked gets the fast path's answer, as without an audit, unless the two differ beyond rounding:
then stock's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_gemma4_yoco import seams, switch
from sglang_gemma4_yoco.checking import difference
from sglang_gemma4_yoco.checking.self_check import PIPELINE
from sglang_gemma4_yoco.cutting import fallback
from sglang_gemma4_yoco.cutting.shadow import Shadows
from sglang_gemma4_yoco.deciding import ranks
from sglang_gemma4_yoco.telling import report

if TYPE_CHECKING:
    from sglang_gemma4_yoco.cutting.plan import Plan
    from sglang_gemma4_yoco.owner import Owner

VARIABLE = "SGLANG_GEMMA4_YOCO_AUDIT"
STRICT = "SGLANG_GEMMA4_YOCO_AUDIT_STRICT"
DIFFERED = "an audited prefill differed from stock's"
_MOST_LINES = 16  # errors that are logged; the others are counted


def every() -> int:
    """Of how many shortened prefills one is audited; 0 for none, as when it is unset.

    Raises:
        ValueError: the variable is no whole number from 0 up; the message names both.
    """
    return switch.whole_number(VARIABLE, 0, "no prefill is audited", "no audits") or 0


def strict() -> bool:
    """Whether a difference beyond rounding turns the fast path off. Unset means no.

    Raises:
        ValueError: the variable is neither ``0`` nor ``1``; the message names it and both.
    """
    remedy = "use 1 to turn the fast path off where an audit differs, 0 (or leave it unset) not to"
    return switch.yes_or_no(STRICT, "0", remedy)


def auditor(runner: Any, known: Owner) -> Auditor | None:
    """Who audits this server, where the operator wants it; why nobody does is said."""
    try:
        number, turns_off = every(), strict()
    except ValueError as invalid:  # changed after load
        report.error(f"Gemma 4 fast prefill is not audited: {invalid}")
        return None
    if number == 0:
        return None
    argument = seams.server_arguments()
    processor = getattr(runner.model, "logits_processor", None)
    if argument is not None and (argument("pp_size") or 1) > 1:
        reason = PIPELINE
    elif processor is None:
        reason = f"{type(runner.model).__name__} has no logits processor"
    else:
        return Auditor(known, runner, processor, number, turns_off=turns_off)
    report.once(f"Gemma 4 fast prefill is not audited: {reason}", logging.WARNING)
    return None


class Auditor:
    """Audits the forwards of one model."""

    def __init__(
        self, known: Owner, runner: Any, processor: Any, number: int, *, turns_off: bool
    ) -> None:
        self._known = known
        self._pool = runner.token_to_kv_pool
        self._processor = processor
        self._every = number
        self._turns_off = turns_off
        self._forwards = 0
        self._lines = 0
        self._shadows = Shadows()
        config, dtypes = known.model.config, (runner.dtype, self._pool.dtype)
        checked = None if known.checked is None else known.checked.allowed
        self._allowed = checked or difference.allowed(0.0, config.num_hidden_layers, *dtypes)

    def is_due(self) -> bool:
        """Asked once for each shortened prefill: is it to be audited?"""
        self._forwards += 1
        return self._forwards % self._every == 0

    def audit(self, plan: Plan, output: Any, again: Callable[[], Any]) -> Any:
        """Run a forward again as stock; what the model goes on with.

        Args:
            plan: of the batch, whose forward is over.
            output: what the fast path has given: [T, hidden], or a tuple that begins with it.
            again: runs it as stock.
        """
        self._shadows.close()  # of an audit whose logits nobody has asked for
        # Stock may run in the memory that holds these rows.
        fast = seams.layer_rows(output).clone()
        try:
            written = self._keys_and_values(plan)
            stock = again()
            apart = [
                difference.relative_error(expected, found)
                for expected, found in zip(self._keys_and_values(plan), written, strict=True)
            ]
        except Exception as failure:
            if not fallback.is_alone():
                raise
            self._known.auditor = None
            report.failure("Gemma 4 fast prefill: an audit failed, and no more are made", failure)
            return _with_rows(output, fast)
        if plan.tail.unread:
            self._judge(plan, max(apart), 0)
            return stock
        self._compare_logits(plan, fast, max(apart))
        return stock

    def _compare_logits(self, plan: Plan, fast: torch.Tensor, of_caches: float) -> None:
        """Where SGLang asks for the logits of stock's rows, make those of the fast ones as well."""

        def both(processor: Callable[..., Any]) -> Callable[..., Any]:
            def forward(input_ids: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
                self._shadows.close()
                expected = processor(input_ids, hidden_states, *args, **kwargs)
                logits = expected.next_token_logits.clone()  # it may lie in a buffer of all calls
                found = processor(input_ids, fast, *args, **kwargs)
                if self._agree(plan, logits, found.next_token_logits, of_caches):
                    return found
                expected.next_token_logits = logits
                return expected

            return forward

        self._shadows.add(self._processor, "forward", both)

    def _agree(
        self, plan: Plan, expected: torch.Tensor, found: torch.Tensor, of_caches: float
    ) -> bool:
        apart = max(of_caches, difference.relative_error(expected, found))
        changes = int((expected.argmax(dim=-1) != found.argmax(dim=-1)).sum())
        return self._judge(plan, apart, changes)

    def _judge(self, plan: Plan, apart: float, changes: int) -> bool:
        apart = ranks.largest(apart)
        agrees = apart <= self._allowed
        report.audited(apart, agrees=agrees, greedy_changes=changes)
        if not agrees:
            self._say(plan, apart)
            if self._turns_off:
                self._known.refuse(DIFFERED)
                report.steps_aside(DIFFERED, logging.ERROR)
        return agrees

    def _say(self, plan: Plan, apart: float) -> None:
        self._lines += 1
        if self._lines > _MOST_LINES:
            return
        batch = plan.batch
        starts = batch.extend_logprob_start_lens_cpu if batch.return_logprob else None
        run = "skipped" if plan.tail.unread else "launched" if plan.replay is None else "replayed"
        report.error(
            f"Gemma 4 fast prefill: an audited prefill differs from stock's by {apart:.1e}, where "
            f"{self._allowed:.1e} is rounding; new tokens {batch.extend_seq_lens_cpu}, cached "
            f"{batch.extend_prefix_lens_cpu}, logprobs from {starts}, tail {run}"
        )

    def _keys_and_values(self, plan: Plan) -> list[torch.Tensor]:
        """K and V of layer K-1 for the batch's new tokens, each [T, kv_heads, head_dim]."""
        layer = self._known.model.layers[self._known.first_shared - 1].self_attn.attn.layer_id
        slots = plan.batch.out_cache_loc
        if seams.is_in_window_pool(self._pool, layer):
            slots = self._pool.translate_loc_from_full_to_swa(slots)
        return [buffer[slots] for buffer in self._pool.get_kv_buffer(layer)]


def _with_rows(output: Any, rows: torch.Tensor) -> Any:
    return (rows, *output[1:]) if isinstance(output, tuple) else rows
