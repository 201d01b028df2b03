"""The check at start, made by hand, and what it makes a model run; prefills that are audited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harness.layer_rows import LAYERS
from sglang_gemma4_reference.engine import Engine, settings_changed
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.checking import audit
from sglang_gemma4_yoco.checking import start as check
from sglang_gemma4_yoco.checking.start import Checked
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.loading import start

REQUESTS = 3
NEW = [7, 6, 5]  # tokens of each, with pages of one


def checked(engine: Engine) -> Checked:
    """The check of this engine's model."""
    return check.check_model(engine.runner, start.get_state(engine.text_model))


@contextmanager
def counted(engine: Engine) -> Iterator[list[list[int]]]:
    """Rows of each layer's FFN, for every forward in the span."""
    forwards: list[list[int]] = []
    hooks = [engine.text_model.register_forward_pre_hook(lambda *_: forwards.append([0] * LAYERS))]

    def counter(number: int) -> Callable[..., None]:
        def count(_: Any, args: tuple[Any, ...]) -> None:
            forwards[-1][number] += args[0].shape[0]

        return count

    layers = enumerate(engine.text_model.layers)
    hooks += [layer.mlp.register_forward_pre_hook(counter(n)) for n, layer in layers]
    try:
        yield forwards
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def audited(engine: Engine, every: int = 1, *, strict: bool = False) -> Iterator[ModelState]:
    """Prefills of the engine are audited in the span."""
    state = start.get_state(engine.text_model)
    reason = state.unsupported
    with settings_changed(audit=every, audit_strict=strict):
        state.after_cut = audit.make_auditor(engine.runner, state)
    try:
        yield state
    finally:
        state.after_cut = None
        state.unsupported = reason


@contextmanager
def tensors_unchanged(engine: Engine) -> Iterator[None]:
    """The span leaves tables and pools, and what is free in them, as they were."""
    runner = engine.runner
    allocator = runner.token_to_kv_pool_allocator
    parts = []
    for n in ("full", "swa"):
        parts.append(getattr(allocator, f"{n}_attn_allocator", None))
    pool_map = getattr(runner.token_to_kv_pool, "full_to_swa_index_mapping", None)

    def everything() -> list[torch.Tensor]:
        free = []
        for part in parts:
            if part is not None:
                free.append(part.free_pages)
        tables = [runner.req_to_token_pool.req_to_token, *([] if pool_map is None else [pool_map])]
        pools = []
        for buffers in engine.kv_buffers():
            for buffer in buffers:
                pools.append(buffer)
        found: list[torch.Tensor] = []
        for tensor in (*tables, *free, *pools):
            found.append(tensor.clone())
        return found

    before = everything()
    yield
    assert all(map(torch.equal, before, everything()))


def counts() -> tuple[int, int]:
    """Of all audits so far, those that agree and those that found a defect."""
    return counters.audits.agree, counters.audits.differ
