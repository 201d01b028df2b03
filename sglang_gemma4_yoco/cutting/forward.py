"""One prefill forward: cut if its plan says so, served by stock if not, or if the cut fails.

There are two kinds: those that the model runs layer by layer (``prefill``), and those that SGLang
replays from its own recording (``replayed_prefill``), which leave it by a door (``doors``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang_gemma4_yoco import log, seams
from sglang_gemma4_yoco.cutting import fallback, gate
from sglang_gemma4_yoco.cutting.cut import Cut, LateRefusalError
from sglang_gemma4_yoco.cutting.doors import Door
from sglang_gemma4_yoco.cutting.gate import Plan, at_the_forward
from sglang_gemma4_yoco.cutting.served import Auditor, ServedModel
from sglang_gemma4_yoco.tail.graphs import Inputs, ReplayError


class _Kind(Protocol):
    """A forward that can be run on either path, again and again."""

    def fast(self, plan: Plan) -> Any:
        """Run it on the fast path; what the model goes on with."""
        ...

    def stock(self) -> Any:
        """Run it as stock, all as it was before it ran."""
        ...

    def audited(self, auditor: Auditor, plan: Plan, output: Any) -> Any:
        """Have it compared with stock; what the model goes on with."""
        ...


@dataclass(frozen=True)
class Forwards:
    """How a forward is run again, all as it was before it ran.

    Attributes:
        stock: runs it as stock; returns what the model does, [T, hidden] or a tuple that begins so.
        cut: runs it on the fast path, by a plan; returns the rows alone, [T, hidden].
    """

    stock: Callable[[], Any]
    cut: Callable[[Plan], torch.Tensor]


def prefill(
    known: ServedModel,
    forward_batch: Any,
    positions: torch.Tensor,
    embeds: torch.Tensor | None,
    run: Callable[[], Any],
) -> Any:
    """Run one forward that is no decode step.

    Args:
        known: what is known of the model.
        positions: [T], what the model was called with.
        embeds: [T, hidden], the input embeddings that the model was called with, or None.
        run: the stock forward, which the cut makes fast.
    """
    return _served(known, forward_batch, _Launched(known, positions, embeds, run))


def replayed_prefill(
    known: ServedModel, bucket: Any, static_batch: Any, run: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Run one forward of which SGLang has a recording.

    Args:
        bucket: which recording.
        static_batch: the batch that it reads, padded to the bucket.
        run: runs the recording to its end.

    Returns:
        [bucket, hidden], SGLang's output, which the next replay overwrites.
    """
    rows: torch.Tensor = _served(
        known, known.replaying, ReplayedFront(known, bucket, static_batch, run)
    )
    return rows


def _served(known: ServedModel, forward_batch: Any, kind: _Kind) -> Any:
    rows = getattr(forward_batch, "extend_num_tokens", None) or 0  # some modes have no new tokens
    try:
        decided = at_the_forward(known, forward_batch)
        if isinstance(decided, Plan):
            output = _cut(known, decided, kind)
            if known.auditor is not None and known.auditor.is_due():
                return kind.audited(known.auditor, decided, output)
            return output
        known.release()
        reason = decided.reason
    except LateRefusalError as late:
        reason = str(late)  # on all ranks alike, as any refusal
    except Exception as failure:
        if not fallback.is_alone():
            raise
        fallback.failed(failure, rows)
        if isinstance(failure, ReplayError):
            known.drop_graphs(f"a replay failed: {type(failure.__cause__).__name__}")
        return kind.stock()
    log.batch_refused(reason, rows, logged=gate.is_news(reason))
    return kind.stock()


def _cut(known: ServedModel, plan: Plan, kind: _Kind) -> Any:
    """The output of one forward that is cut."""
    try:
        output = kind.fast(plan)
    finally:
        known.release()
    kept = plan.tail.kept
    computed = 0 if plan.tail.unread else kept.count
    log.active(
        known.model,
        lambda: _description(known, plan),
        _outcome(plan),
        computed=computed,
        skipped=kept.total - computed,
    )
    fallback.succeeded()
    return output


def _outcome(plan: Plan) -> str:
    if plan.tail.unread:
        return log.EXIT_SKIPPED if plan.front_replayed else log.TAIL_SKIPPED
    if plan.front_replayed:
        return log.EXIT_CAPTURED
    return log.TAIL_EAGER if plan.replay is None else log.TAIL_CAPTURED


def _description(known: ServedModel, plan: Plan) -> str:
    model = known.model
    front = ", front replayed from SGLang's recording" if plan.front_replayed else ""
    return (
        f"{type(model).__name__} with hidden size {model.config.hidden_size}, "
        f"{known.attends()}{front}, tail {known.runs_its_tail()}"
    )


# -- launched layer by layer -----------------------------------------------------------------------


class _Launched:
    """A forward that the model's own code runs."""

    def __init__(
        self,
        known: ServedModel,
        positions: torch.Tensor,
        embeds: torch.Tensor | None,
        run: Callable[[], Any],
    ) -> None:
        self._known = known
        self._positions = positions
        self._embeds = embeds
        self._run = run
        self._copy: torch.Tensor | None = None  # of the embeddings, before the first try

    def fast(self, plan: Plan) -> Any:
        """Run it on the fast path."""
        if self._copy is None:
            self._copy = fallback.copy_of(self._embeds)
        with Cut(self._known, plan, self._positions):
            return self._run()

    def stock(self) -> Any:
        """Run it as stock, given the embeddings that it was given."""
        fallback.put_back(self._embeds, self._copy)
        return self._run()

    def audited(self, auditor: Auditor, plan: Plan, output: Any) -> Any:
        """Have it run again in both ways."""
        return auditor.audit(plan, output, Forwards(stock=self.stock, cut=self._again))

    def _again(self, plan: Plan) -> torch.Tensor:
        """The rows [T, hidden] of a forward that is cut once more, which nobody counts."""
        fallback.put_back(self._embeds, self._copy)
        try:
            # The embeddings are the residual, and with it the output, where a layer behind the
            # first one is the first to run.
            return seams.layer_rows(self.fast(plan)).clone()
        finally:
            self._known.release()
            fallback.put_back(self._embeds, self._copy)


# -- replayed --------------------------------------------------------------------------------------


class ReplayedFront:
    """A forward whose front SGLang has recorded; a batch that is cut leaves it by the door.

    Attributes:
        positions: [bucket], those of the batch first.
        door: what was alive at the door, until the next replay; None before the fast path has run.
    """

    def __init__(
        self,
        known: ServedModel,
        bucket: Any,
        static_batch: Any,
        run: Callable[[], torch.Tensor],
    ) -> None:
        self._known = known
        self._bucket = bucket
        self._static = static_batch
        self._run = run
        self.positions: torch.Tensor = static_batch.positions
        self.door: Door | None = None

    def fast(self, plan: Plan) -> torch.Tensor:
        """Run it up to the door, write K and V, and replay the tail: [bucket, hidden]."""
        known, rows = self._known, plan.tail.kept.total
        self.door, output = known.doors.reach(self._bucket)
        if self.door.keys is not None and self.door.values is not None:
            # Rows behind those of the batch are padding, of which nothing may be written.
            attention = known.model.layers[known.first_cut].self_attn.attn
            keys, values = self.door.keys[:rows], self.door.values[:rows]
            plan.attention.write_keys_and_values(attention, plan.batch, keys, values)
        if plan.replay is not None:
            self._fill(plan, plan.replay.inputs, self.door)
            output.index_copy_(0, plan.tail.index, plan.replay.run())
        return output

    def _fill(self, plan: Plan, inputs: Inputs, door: Door) -> None:
        model, index = self._known.model, plan.tail.index
        torch.index_select(door.rows, 0, index, out=inputs.rows)
        # Gemma 4 has added 1 to these by now, in place.
        torch.index_select(self.positions, 0, index, out=inputs.positions)
        if inputs.embeds is None:
            return
        # The recording's own have been overwritten at the door.
        ids = self._static.input_ids.index_select(0, index)
        inputs.embeds.copy_(model.embed_tokens(ids))
        if inputs.embedded is not None:
            behind = model.get_per_layer_inputs(ids)[:, self._known.first_cut :]
            inputs.embedded.copy_(behind)

    def stock(self) -> torch.Tensor:
        """Run the recording to its end; its inputs are as they were."""
        return self._run()

    def audited(self, auditor: Auditor, plan: Plan, output: torch.Tensor) -> torch.Tensor:
        """Have it run to its end as well."""
        rows: torch.Tensor = auditor.audit_replayed(plan, output, self)
        return rows
