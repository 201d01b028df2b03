"""The moment when SGLang's runner has built its attention backends: admit the server or not."""

from functools import partial

import torch

from sglang_gemma4_yoco.admission import arguments, order
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.compat import ModelRunner, TextModel
from sglang_gemma4_yoco.core import planning
from sglang_gemma4_yoco.core.state import ModelState, find_state
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.startup.guard import guarded

#: SGLang norms K and V of many rows by another kernel. A self-check runs the one for few.
_MANY = 257


def start_model(runner: ModelRunner, model: TextModel) -> None:
    """Give the model its state, which says whether its prefills may be cut."""
    previous = find_state(model)
    if previous:
        previous.close()
    backends, refusal, readers = order.admit(runner, model)
    state = ModelState(model, registry.find_adapter(model), refusal, backends, readers)
    state.attach(planning.plan_batch)
    state.on_close(partial(lifecycle.drop_tail, state))
    if refusal:
        state.turn_off(refusal)
        return
    arguments.note_untested_release()
    # If this fails, the first long prompt compiles them.
    with guarded("YOCO fast prefill: compiling kernels at start failed"):
        _compile_kernels(runner, state)


@torch.no_grad()
def _compile_kernels(runner: ModelRunner, state: ModelState) -> None:
    """Compile the kernels for K and V without queries, which stock never runs.

    Otherwise the first long prompt would wait for the compiler.
    """
    rows = torch.zeros(
        _MANY,
        *state.adapter.get_row_shape(state.model),
        dtype=runner.dtype,
        device=runner.device,
    )
    positions = torch.zeros(_MANY, dtype=torch.int64, device=runner.device)
    state.adapter.compute_keys_and_values(state.tail_layers[0], rows, positions)
