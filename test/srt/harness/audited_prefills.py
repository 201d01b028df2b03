"""Prefills of an engine that are audited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import log, settings
from sglang_gemma4_yoco.checking import audit
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.loading import start


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
