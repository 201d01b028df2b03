"""While it serves: every N-th shortened prefill is run again as stock, and the two compared.

How far their answers are apart says nothing in bf16 (``layerwise``), so the batch runs three times:
as it serves; as stock, whose tail is watched; and from layer K-1 on once more on the fast path,
each of its steps given stock's numbers. A recorded tail is replayed once more as well, beside its
layers launched on the same rows, padding and all. Compared are all rows that are kept, K and V of
layer K-1, and the logits and input log-probabilities that SGLang's own logits processor makes of
the rows that the model hands on. (The layers before K-1 are stock's in any case.)

A prefill that has left SGLang's recording by the door is compared there (``replayed``), with the
same recording run to its end.

The stock forward finds all as the first one did, for the same reasons as in ``fallback``; K and V
go to the same slots once more, and stock's are what lies there in the end.

The client gets the fast path's answer, as without an audit, or stock's where a defect was found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sglang_gemma4_yoco import log, seams, settings
from sglang_gemma4_yoco.checking import layerwise, proof, replayed, rounding
from sglang_gemma4_yoco.checking.layerwise import Forced, Trace
from sglang_gemma4_yoco.checking.rounding import Comparison, Finding
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.cutting import fallback
from sglang_gemma4_yoco.cutting.forward import Forwards, ReplayedFront
from sglang_gemma4_yoco.cutting.gate import Plan
from sglang_gemma4_yoco.cutting.served import ServedModel
from sglang_gemma4_yoco.tail.shadow import Shadows

DIFFERED = "an audited prefill differed from stock's"
ANOTHERS = "another rank has found a defect"
_MOST_LINES = 16  # errors that are logged; the others are counted
# Of logits, whose rows are off by the last layer's roundings and the norm's.
_OF_LOGITS = 3.0
_OF_LOGPROBS = 6.0  # of a logit, less a sum of all


def auditor(runner: Any, known: ServedModel) -> Auditor | None:
    """Who audits this server, where the operator wants it; why nobody does is said."""
    number, turns_off = settings.current.audit, settings.current.audit_strict
    if number == 0:
        return None
    processor = getattr(runner.model, "logits_processor", None)
    if processor is not None:
        return Auditor(known, runner, processor, number, turns_off=turns_off)
    reason = f"{type(runner.model).__name__} has no logits processor"
    log.once(f"Gemma 4 fast prefill is not audited: {reason}", logging.WARNING)
    return None


class Auditor:
    """Audits the forwards of one model."""

    def __init__(
        self, known: ServedModel, runner: Any, processor: Any, number: int, *, turns_off: bool
    ) -> None:
        self._known = known
        self._runner = runner
        self._processor = processor
        self._every = number
        self._turns_off = turns_off
        self._forwards = 0
        self._lines = 0
        self._shadows = Shadows()
        self._first = known.first_cut

    def is_due(self) -> bool:
        """Asked once for each shortened prefill: is it to be audited?"""
        self._forwards += 1
        return self._forwards % self._every == 0

    def audit(self, plan: Plan, output: Any, forwards: Forwards) -> Any:
        """Run a forward again; what the model goes on with.

        Args:
            plan: of the batch, whose forward is over.
            output: what the fast path has given: [T, hidden], or a tuple that begins with it.
            forwards: run it again.
        """
        self._shadows.close()  # of an audit whose logits nobody has asked for
        # Stock may run in the memory that holds these rows.
        fast = seams.layer_rows(output).clone()
        try:
            trace = Trace(self._first, plan.tail.index)
            with layerwise.watched(self._known.model, trace, start=self._first) as steps:
                stock = forwards.stock()
                steps.at_the_end(seams.layer_rows(stock))
            found, forced = self._forced(plan, trace, forwards)
        except Exception as failure:
            if not fallback.is_alone():
                raise
            self._failed(failure)
            return _with_rows(output, fast)
        self._conclude(plan, fast, forced, found)
        return stock

    def audit_replayed(
        self, plan: Plan, output: torch.Tensor, front: ReplayedFront
    ) -> torch.Tensor:
        """Run a forward that left SGLang's recording by the door to its end as well.

        Args:
            plan: of the batch, whose forward is over.
            output: [bucket, hidden], what the fast path has given.
            front: the forward.

        Returns:
            [bucket, hidden], what the model goes on with, in the same memory.
        """
        self._shadows.close()
        index = plan.tail.index
        fast = output.index_select(0, index)
        try:
            found = replayed.findings(self._known, plan, fast, front)
        except Exception as failure:
            if not fallback.is_alone():
                raise
            self._failed(failure)
            return output.index_copy_(0, index, fast)
        self._conclude(plan, output.index_copy(0, index, fast), None, found)
        return output

    def _conclude(
        self, plan: Plan, fast: torch.Tensor, forced: torch.Tensor | None, found: list[Finding]
    ) -> None:
        if plan.tail.unread:
            self._judge(plan, found, 0)
        else:
            self._compare_logits(plan, fast, forced, found)

    def _failed(self, failure: Exception) -> None:
        """An audit could not be made: the others are not made either."""
        self._known.auditor = None
        log.failure("Gemma 4 fast prefill: an audit failed, and no more are made", failure)

    # -- layer by layer ------------------------------------------------------------------------

    def _forced(
        self, plan: Plan, trace: Trace, forwards: Forwards
    ) -> tuple[list[Finding], torch.Tensor]:
        """What was found, and the rows that the forced forward has handed on, [T, hidden]."""
        model, last = self._known.model, len(self._known.model.layers) - 1
        if plan.tail.unread:
            last = self._first - 1  # K and V alone
        with self._stocks_keys(plan) as compared, Shadows() as shadows:
            shadows.add(model, "start_layer", lambda _: self._first)
            launched = replace(plan, replay=None)
            if not plan.tail.unread:
                plan.attention.plan(plan.batch, plan.tail.fields)
            with Forced(model, trace, self._first, last) as forced:
                rows = forwards.cut(launched)
                forced.at_the_end(rows)
            found = [*forced.findings(), *compared()]
            if plan.replay is not None:
                found += self._replayed(plan, trace, forwards)
                found += compared()
        return found, rows

    def _replayed(self, plan: Plan, trace: Trace, forwards: Forwards) -> list[Finding]:
        tail, batch = self._known.graphs, plan.batch
        assert tail is not None, "it has just been replayed"
        kept = len(plan.tail.kept.lens)
        size = tail.size_for(plan.tail.kept)
        assert size is not None
        fill = partial(
            trace.fill,
            requests=batch.req_pool_indices,
            lengths=batch.seq_lens,
        )
        again = replace(plan, replay=tail.planned(batch, plan.tail))
        with Forced(self._known.model, trace, self._first, self._first - 1) as forced:
            replayed = forwards.cut(again).index_select(0, plan.tail.index)
        # Over K and V that the replay has found, which were written for it.
        launched = tail.launched(tail.inputs_for(size, kept, fill))[:kept]
        return [*forced.findings(), proof.difference(launched, replayed)]

    @contextmanager
    def _stocks_keys(self, plan: Plan) -> Iterator[Callable[[], list[Finding]]]:
        """K and V of layer K-1 for the batch's new tokens are overwritten, and stock's at the end.

        Yields what compares those that were written since with stock's, and overwrites them again.
        """
        if self._first == self._known.first_shared:
            yield list  # stock's own code has written them, and does not run again
            return
        layer = self._known.model.layers[self._first].self_attn.attn.layer_id
        buffers, slots = seams.cache_of(self._runner, layer, plan.batch.out_cache_loc)
        stock = [buffer[slots] for buffer in buffers]

        def overwrite() -> None:
            for buffer in buffers:
                buffer[slots] = 0

        def compared() -> list[Finding]:
            written = [buffer[slots] for buffer in buffers]
            where = f"layer {self._first} in the pool"
            found = rounding.findings(layerwise.keys_and_values_compared(where, stock, written))
            overwrite()
            return found

        overwrite()
        try:
            yield compared
        finally:
            for buffer, values in zip(buffers, stock, strict=True):
                buffer[slots] = values

    # -- logits --------------------------------------------------------------------------------

    def _compare_logits(
        self, plan: Plan, fast: torch.Tensor, forced: torch.Tensor | None, found: list[Finding]
    ) -> None:
        """Where SGLang asks for the logits of stock's rows, make those of the fast ones as well."""

        def all_of(processor: Callable[..., Any]) -> Callable[..., Any]:
            def forward(input_ids: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
                self._shadows.close()
                expected = processor(input_ids, hidden_states, *args, **kwargs)
                logits = expected.next_token_logits.clone()  # it may lie in a buffer of all calls
                compared = list(found)
                if forced is not None:
                    again = processor(input_ids, forced, *args, **kwargs)
                    compared += _logits_compared(forced, logits, expected, again)
                fast_answer = processor(input_ids, fast, *args, **kwargs)
                if self._judge(plan, compared, _changes(logits, fast_answer.next_token_logits)):
                    return fast_answer
                expected.next_token_logits = logits
                return expected

            return forward

        self._shadows.add(self._processor, "forward", all_of)

    # -- verdict -------------------------------------------------------------------------------

    def _judge(self, plan: Plan, found: list[Finding], changes: int) -> bool:
        worst = rounding.worst(found)
        excess = ranks.largest(worst.excess)
        agrees = excess <= 1
        log.audited(excess, agrees=agrees, greedy_changes=changes)
        if not agrees:
            self._say(plan, worst if not worst.is_rounding else rounding.defect(ANOTHERS))
            if self._turns_off:
                self._known.refuse(DIFFERED)
                log.server_refused(DIFFERED, logging.ERROR)
        return agrees

    def _say(self, plan: Plan, worst: Finding) -> None:
        self._lines += 1
        if self._lines > _MOST_LINES:
            return
        batch = plan.batch
        starts = batch.extend_logprob_start_lens_cpu if batch.return_logprob else None
        run = "skipped" if plan.tail.unread else "launched" if plan.replay is None else "replayed"
        if plan.front_replayed:
            run += ", front replayed"
        log.error(
            f"Gemma 4 fast prefill: an audited prefill differs from stock's: {worst}; new tokens "
            f"{batch.extend_seq_lens_cpu}, cached {batch.extend_prefix_lens_cpu}, logprobs from "
            f"{starts}, tail {run}"
        )


def _logits_compared(
    rows: torch.Tensor, logits: torch.Tensor, stock: Any, forced: Any
) -> list[Finding]:
    """What SGLang makes of the rows, for the sampler and for those who want log-probabilities.

    Args:
        rows: those that ``forced`` is made of; their type is what rounds, whatever logits are of.
    """
    size = logits.float().square().mean(dim=-1, keepdim=True).sqrt()
    found: Any = {"size": size, "rounded": rows}
    compared = [Comparison.of("logits", logits, forced.next_token_logits, _OF_LOGITS, **found)]
    logprobs = stock.input_token_logprobs
    if logprobs is not None and logprobs.numel():
        compared.append(
            Comparison.of(
                "input log-probabilities",
                logprobs[:, None],
                forced.input_token_logprobs[:, None],
                _OF_LOGPROBS,
                size=size.mean(dim=0, keepdim=True),
                rounded=rows,
            )
        )
    return rounding.findings(compared)


def _changes(expected: torch.Tensor, found: torch.Tensor) -> int:
    return int((expected.argmax(dim=-1) != found.argmax(dim=-1)).sum())


def _with_rows(output: Any, rows: torch.Tensor) -> Any:
    return (rows, *output[1:]) if isinstance(output, tuple) else rows
