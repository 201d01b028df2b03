"""Prefills of an engine that are audited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import log, settings
from sglang_gemma4_yoco.checking import audit
from sglang_gemma4_yoco.cutting.served import ServedModel
from sglang_gemma4_yoco.loading import starting


@contextmanager
def audited(engine: Engine, every: int = 1, *, strict: bool = False) -> Iterator[ServedModel]:
    """Prefills of the engine are audited in the span."""
    known = starting.of(engine.text_model)
    reason = known.constant_reason
    with settings.changed(audit=every, audit_strict=strict):
        known.auditor = audit.auditor(engine.runner, known)
    try:
        yield known
    finally:
        known.auditor = None
        known.constant_reason = reason


def counts() -> tuple[int, int]:
    """Of all audits so far, those that agree and those that found a defect."""
    return log.audits.agree, log.audits.differ
