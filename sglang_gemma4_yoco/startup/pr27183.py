"""The two helpers of sgl-project/sglang#27183, for forwards that cut a batch themselves.

They are added to ``Gemma4TextModel``, under the names in commits of that change, which is proposed
to SGLang. The package does not use them. An SGLang with its own fast prefill keeps its own helpers,
which it uses if its flag is set. Unnecessary once that change is merged.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from sglang_gemma4_yoco import compat, settings
from sglang_gemma4_yoco.admission import order
from sglang_gemma4_yoco.compat import ForwardBatch, Method, TextModel
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.core.kept_batch import KeptBatch, rewrite_batch
from sglang_gemma4_yoco.core.state import ModelState, find_state
from sglang_gemma4_yoco.models import gemma4


def _yoco_eligibility(self: TextModel, forward_batch: ForwardBatch) -> bool:
    """Return True if this forward may skip unused rows in the KV-shared layers.

    Like the one of #27183, it reads ``SGLANG_GEMMA4_YOCO`` on each call.
    """
    if os.environ.get(settings.SWITCH, "1") != "1":
        return False
    state = find_state(self) or ModelState(self, gemma4, order.find_model_reason(self))
    current = compat.attention.get_current_backend()
    eligible = eligibility.check_eligibility(state, forward_batch)
    if not isinstance(eligible, eligibility.Eligible):
        return False
    return current is None or compat.backends.may_run_tail(
        state.adapter.ATTENTION_BACKENDS, current
    )


def _yoco_truncate_to_last_tokens(
    _: object,
    hidden_states: Tensor,
    positions: Tensor,
    per_layer_inputs: Tensor | None,
    forward_batch: ForwardBatch,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Callable[[], None]]:
    """Cut a batch down to the kept rows.

    Args:
        hidden_states, positions: [T, hidden] and [T].
        per_layer_inputs: [T, ...] (of one layer or of all), or None.
        forward_batch: an eligible batch; on return its ``extend_*`` fields, mode, input ids and
            positions describe the kept rows, and the backend has their attention metadata.

    Returns:
        ``(hidden_states [B, hidden], positions [B], per_layer_inputs [B, ...], last_indices [B]
        int64, restore_fn)`` with B kept rows. ``restore_fn()`` restores every field and the
        attention state; a second call is a no-op. If this function raises, all has been restored.
    """
    if not isinstance(hidden_states, Tensor):  # some commits of #27183 have another order
        raise TypeError("expected hidden_states, positions, per_layer_inputs, forward_batch")
    main = compat.attention.get_current_backend()
    assert main, "it is called in a forward"
    kept_batch = KeptBatch.of(
        forward_batch,
        eligibility.find_kept_rows(forward_batch),
        decodes=not compat.release.is_newer_than_tested(),
    )
    if per_layer_inputs is not None:
        per_layer_inputs = per_layer_inputs.index_select(0, kept_batch.index)
    rows = hidden_states.index_select(0, kept_batch.index)
    row_positions = positions.index_select(0, kept_batch.index)
    fields = {**kept_batch.fields, "positions": row_positions}
    with ExitStack() as stack:
        # It drops image masks that a model has written; the layers that need these have run.
        stack.callback(main.init_forward_metadata, forward_batch)
        stack.enter_context(rewrite_batch(forward_batch, fields))
        compat.attention.init_tail_metadata(main, forward_batch)
        if forward_batch.residual_stream is not None:
            compat.layers.start_residual(forward_batch, rows)
        return rows, row_positions, per_layer_inputs, kept_batch.index, stack.pop_all().close


HELPERS: tuple[Method, ...] = (_yoco_eligibility, _yoco_truncate_to_last_tokens)


def list_helpers() -> dict[tuple[type, str], Method]:
    """Return the helpers to add to Gemma 4, by class and name; none if SGLang has its own.

    Raises:
        compat.release.IncompatibleError: another patch has added them.
    """
    has_own = compat.server.has_name(compat.server.FAST_PREFILL)
    if has_own or compat.names.find_missing(gemma4.SGLANG):
        return {}
    model: Any = compat.names.find_object(gemma4.SGLANG.text_model)
    for helper in HELPERS:
        if hasattr(model, helper.__name__):
            raise compat.release.IncompatibleError(
                f"{model.__name__} already has {helper.__name__}: remove the patch that adds it"
            )
    return {(model, helper.__name__): helper for helper in HELPERS}
