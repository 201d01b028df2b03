"""The check at start, made by hand, and what it makes a model run; prefills that are audited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from layer_rows import LAYERS
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import log, settings
from sglang_gemma4_yoco.checking import audit
from sglang_gemma4_yoco.checking import start as check
from sglang_gemma4_yoco.checking.start import Checked
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.loading import start

REQUESTS = 3
NEW = [7, 6, 5]  # tokens of each, with pages of one


def checked(engine: Engine) -> Checked:
    """The check of this engine's model."""
    return check.check(engine.runner, start.of(engine.text_model))


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
    state = start.of(engine.text_model)
    reason = state.refused
    with settings.changed(audit=every, audit_strict=strict):
        state.after_cut = audit.auditor(engine.runner, state)
    try:
        yield state
    finally:
        state.after_cut = None
        state.refused = reason


def counts() -> tuple[int, int]:
    """Of all audits so far, those that agree and those that found a defect."""
    return log.audits.agree, log.audits.differ
