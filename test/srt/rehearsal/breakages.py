"""Defects in the package's host code, injected to see that the rehearsal finds each.

On a CPU all but a few of them would change nothing: no answer, no row. A breakage is a replacement
of text in a function, in this process alone: in ``function`` of a module of the package, or of a
class in it, ``old`` becomes ``new``. The tail is captured anew where ``captures`` is true.
"""

from __future__ import annotations

import inspect
import logging
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from harness.forwards import state_of
from rehearsal import device, serving
from rehearsal.device import Answer
from rehearsal.serving import CAPTURED, EAGER, STOCK
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.checking import tail_graphs

BREAKAGES: list[Answer] = device.read_table("breakages")
#: Each batch with the way in which it is served.
SERVED = {
    "40 tokens": CAPTURED,
    "257 tokens": EAGER,
    "log-probabilities": CAPTURED,
    "chunk": CAPTURED,
}


@contextmanager
def _broken(breakage: Answer) -> Iterator[None]:
    module = import_module(f"sglang_gemma4_yoco.{breakage['module']}")
    owner, _, name = breakage["function"].rpartition(".")
    holder = getattr(module, owner) if owner else module
    known = vars(holder)[name]
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(holder, name))))
    assert breakage["old"] in text, breakage["name"]
    text = text.replace(breakage["old"], breakage["new"], 1)
    made = dict(vars(module))
    source = f"from __future__ import annotations\n{text}"
    exec(compile(source, f"broken {module.__name__}", "exec"), made)
    setattr(holder, name, made[name])
    try:
        yield
    finally:
        setattr(holder, name, known)


def _look(engine: Engine, costs: Answer, *, captures: bool = False) -> list[str]:
    """Return the problems in this module's batches, of which stock's costs are given."""
    state = state_of(engine)
    state.failures_in_a_row = 0
    state.off_because = None
    found: list[str] = []
    if captures:
        lifecycle.capture_tail(engine.runner, state, tail_graphs.check_graphs)
        if state.captured is None:
            found.append(f"capture: {state.report.tail_mode}")
    for name, way in SERVED.items():
        cost = serving.serve(engine, name, way)
        if cost["failure"] is not None:
            found.append(f"{name}: {cost['failure'].splitlines()[0]}")
        waits = cost["waits"].keys() - costs[name][STOCK]["waits"].keys()
        for place in waits:
            found.append(f"{name}: the host waits: {place}")
        for kernel in cost["compiled"]:
            found.append(f"{name}: compiled in a request: {kernel}")
    return found


def break_each(engine: Engine) -> Answer:
    """Return the findings by breakage; under ``""`` those without any."""
    logging.disable(logging.CRITICAL)  # each breakage is logged, as it should be
    costs = serving.serve_all(engine, [STOCK], SERVED)
    _look(engine, costs)  # compiles the kernels of the first requests
    found = {"": _look(engine, costs, captures=True)}
    for breakage in BREAKAGES:
        with _broken(breakage):
            found[breakage["name"]] = _look(engine, costs, captures=breakage["captures"])
    found["after them"] = _look(engine, costs, captures=True)
    return found
