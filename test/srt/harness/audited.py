"""Audit of the interpreter: opened files, imports, and entered functions of the package."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.observe import run
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import settings

_EVENTS = frozenset({"open", "import", "os.listdir", "os.scandir"})

_recorded: list[Counter[tuple[str, str]]] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        for seen in _recorded:
            seen[event, str(args[0])] += 1


sys.addaudithook(_hook)  # permanently: Python removes none


@contextmanager
def audited() -> Iterator[Counter[tuple[str, str]]]:
    """Count each (event, file or module) in the ``with`` block."""
    seen: Counter[tuple[str, str]] = Counter()
    _recorded.append(seen)
    try:
        yield seen
    finally:
        _recorded.remove(seen)


class Operations(TorchDispatchMode):
    """Mode that records the operations that run, with their names and arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch gives it no annotations
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))


def functions_entered(engine: Engine, prompts: Sequence[Prompt]) -> set[tuple[str, str, int]]:
    """Return file, name and line of the package's functions in a prefill other than the first.

    Planning is included; lambdas and generators are functions too.
    """
    package, entered = Path(settings.__file__).parent, set[tuple[str, str, int]]()
    scheduled = engine.schedule(prompts)
    run(engine, scheduled, "1")  # the first one is logged
    batch = releases.forward_batch(scheduled, engine.runner)

    def entering(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(package):
            entered.add((code.co_filename, code.co_name, code.co_firstlineno))

    with torch.no_grad():
        sys.setprofile(entering)
        try:
            engine.runner.forward(batch)
        finally:
            sys.setprofile(None)
    return entered
