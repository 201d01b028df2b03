"""One prefill forward: cut if it has a plan; stock if it has none or if the cut fails.

An exception in a forward ends SGLang's scheduler, and with it the server. So after a failure of the
fast path, planning included, the batch falls back to stock, and only time is lost. That run starts
from the same state as the first: the batch's fields, the attention state and the model have been
restored; K and V go to the same slots with the same values; and the input embeddings, which layer
0's fused add-norm overwrites, are restored here. If stock fails too, its exception goes to the
scheduler, as without this package. Only ``serve_forward`` counts failures; after ``LIMIT`` in a row
the fast path is off.

With several ranks there is no second run: the others wait in collectives, which this rank would
enter with other rows.
"""

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.compat.batch import ForwardBatch, ForwardMode
from sglang_gemma4_yoco.compat.text_model import Method, ModelOutput, TextModel
from sglang_gemma4_yoco.core import cut, eligibility, planning
from sglang_gemma4_yoco.core.interfaces import Forward
from sglang_gemma4_yoco.core.model import NotCuttableError
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import STATE_ENTRY, ModelState
from sglang_gemma4_yoco.refusal import ServerRefusal

LIMIT = 8
GIVEN_UP = ServerRefusal(
    f"it failed {LIMIT} times in a row and is off in this process", level=logging.ERROR
)


def wrap_model_forward(stock: Method) -> Method:
    """Return a text model's forward, wrapped to cut prefills of models that have a state."""

    @wraps(stock)
    def forward(
        self: TextModel,
        input_ids: object,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> Any:
        try:  # models without a state may be third-party, and their batches too
            mode = forward_batch.forward_mode
            is_stock = (
                mode is ForwardMode.DECODE  # first: most forwards are decode steps
                or torch.compiler.is_compiling()
                or STATE_ENTRY not in self.__dict__
                or not eligibility.is_prefill(mode)
            )
        except Exception as failure:  # noqa: BLE001 - any failure falls back to stock
            counters.log_failed_forward(failure)
            is_stock = True
        if is_stock:
            return stock(self, input_ids, positions, forward_batch, input_embeds, *args, **kwargs)
        state = self.__dict__[STATE_ENTRY]
        run = partial(
            stock, self, input_ids, positions, forward_batch, input_embeds, *args, **kwargs
        )
        return serve_forward(
            state, forward_batch, EagerForward(state, positions, input_embeds, run)
        )

    return forward


def is_wrapped(function: object) -> bool:
    """Return True if a text model's forward is this package's wrapper."""
    return getattr(function, "__globals__", None) is globals()


def serve_forward(state: ModelState, forward_batch: ForwardBatch, forward: Forward) -> ModelOutput:
    """Run a forward on the path chosen for its batch, and return the model's output."""
    rows = getattr(forward_batch, "extend_num_tokens", None) or 0
    state.planned_rows = None
    try:
        decided = planning.take_plan(state, forward_batch)
        if isinstance(decided, Plan):
            return _serve_cut(state, decided, forward)
        state.counters.count_ineligible(decided, rows)
    except NotCuttableError as late:  # the same on all ranks, like any refusal
        refusal = ServerRefusal(str(late), level=logging.ERROR)
        state.turn_off(refusal)
        state.counters.count_ineligible(refusal, rows)
    except Exception as failure:
        if not compat.server.is_single_rank():
            raise
        state.counters.count_failure(failure, rows)
        state.failures_in_a_row += 1
        if state.failures_in_a_row == LIMIT:
            state.turn_off(GIVEN_UP)
        # The traceback keeps the first run's tensors alive, and the second run needs the memory.
        traceback.clear_frames(failure.__traceback__)
        return forward.stock()
    return forward.stock()


def _serve_cut(state: ModelState, plan: Plan, forward: Forward) -> ModelOutput:
    output = forward.fast(plan)
    if state.after_cut:
        output = state.after_cut(forward, plan, output)
    kept = plan.kept_batch.kept
    computed = 0
    if plan.runner:
        computed = kept.count
    state.counters.count_cut(
        lambda: f"{type(state.model).__name__}, {state.describe()}",
        plan.outcome,
        computed=computed,
        skipped=kept.total - computed,
    )
    state.failures_in_a_row = 0  # reset only after everything that can raise
    return output


@dataclass
class EagerForward:
    """A forward that the model's own code runs eagerly.

    Attributes:
        positions: [T], the model's argument.
        embeds: [T, hidden], the input embeddings it was called with, or None.
        run: the model's own forward.
        copy: the embeddings before the fast path ran.
    """

    state: ModelState
    positions: Tensor
    embeds: Tensor | None
    run: Callable[[], ModelOutput]
    copy: Tensor | None = None

    def fast(self, plan: Plan) -> ModelOutput:
        """Run it on the fast path."""
        if self.embeds is not None:
            self.copy = self.embeds.clone()
        return cut.run_prefill(self.state, plan, self.positions, self.run)

    def stock(self) -> ModelOutput:
        """Run it as stock, on the original embeddings."""
        if self.embeds is not None and self.copy is not None:
            self.embeds.copy_(self.copy)
        return self.run()
