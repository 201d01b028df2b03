"""The cut of one prefill: the layers before it, K and V, the tail, the scatter.

With T rows, B kept ones and S the first KV-shared layer, the FFNs of the L layers run
on ``[T] * (S - 1) + [B] * (L - S + 1)`` rows. For E2B (S = 15, L = 35) and a prompt of 2048 tokens,
14 layers run on 2048 rows and 21 layers on 1.
"""

from collections.abc import Callable

from torch import Tensor

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.compat.text_model import ModelOutput
from sglang_gemma4_yoco.core.model import OTHER_END, NotCuttableError
from sglang_gemma4_yoco.core.per_layer import PerLayerInputs
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState

OTHER_INPUTS = "the model is called without per-layer embeddings"
OTHER_ROWS = "the model's rows are not those of the batch"


def run_prefill(
    state: ModelState, plan: Plan, positions: Tensor, stock: Callable[[], ModelOutput]
) -> ModelOutput:
    """Run one forward that is cut.

    Args:
        positions: [T].
        stock: the model's own forward.

    Returns:
        The output of ``stock``: [T, hidden], or a tuple that begins with it. Rows that are not
        kept are finite, and never read.

    Raises:
        NotCuttableError: the batch must fall back to stock.
    """
    inputs = make_inputs(state, plan)
    with state.adapter.stop_before_cut(state.model, state.cut_layer, inputs.project) as cut_rows:
        output = stock()
    if len(cut_rows) != 1:
        raise NotCuttableError(OTHER_END)
    [rows] = cut_rows
    if rows.shape[0] != plan.kept_batch.kept.total:
        raise NotCuttableError(OTHER_ROWS)
    finish_prefill(state, plan, compat.layers.get_rows(output), rows, positions, inputs)
    return output


def make_inputs(state: ModelState, plan: Plan) -> PerLayerInputs:
    """Return the per-layer inputs of this forward, split at the cut."""
    buffers = None
    if plan.runner:
        buffers = plan.runner.buffers
    return PerLayerInputs(
        state.model,
        state.cut_layer,
        plan.kept_batch.index,
        buffers,
        split=state.splits_per_layer_inputs,
    )


def finish_prefill(
    state: ModelState,
    plan: Plan,
    output: Tensor,
    rows: Tensor,
    positions: Tensor,
    inputs: PerLayerInputs,
) -> None:
    """Write K and V of the donor, and run the tail.

    Args:
        output: [T, hidden]; its kept rows are overwritten with those after the norm. Gemma 4 ends
            its loop at the cut, so ``output`` and ``rows`` are one tensor: nothing may read
            ``rows`` after the scatter, which therefore comes last.
        rows: [T, ...], the residual at the input of layer S-1.
        positions: [T].

    Raises:
        NotCuttableError: like ``run_prefill``.
    """
    if not inputs.are_complete():
        raise NotCuttableError(OTHER_INPUTS)
    k, v = state.adapter.compute_keys_and_values(state.tail_layers[0], rows, positions)
    write_donor_keys_and_values(state, plan, k, v)
    if plan.runner:
        kept = plan.runner.run(rows, positions, inputs.get_kept)
        output.index_copy_(0, plan.kept_batch.index, kept)


def write_donor_keys_and_values(state: ModelState, plan: Plan, k: Tensor, v: Tensor) -> None:
    """Write K and V of layer S-1 for all rows, each [T, kv_heads, head_dim]."""
    compat.pools.write_keys_and_values(
        plan.backends.main_backend,
        plan.backends.tail_backend.token_to_kv_pool,
        state.tail_layers[0].self_attn.attn,
        plan.kept_batch.batch,
        k,
        v,
    )
