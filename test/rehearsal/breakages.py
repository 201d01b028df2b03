"""Host code of the package, broken on purpose: whether the rehearsal sees each breakage.

On a CPU all but a few of them would change nothing: no answer, no row. A breakage is a replacement
of text in a function, in this process alone.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from sglang.kernels.ops.layernorm import gemma4_fused_ops

from rehearsal import batches_served, kernels
from rehearsal.batches_served import CAPTURED, EAGER, STOCK, prompt
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.checking import tail_graphs
from sglang_gemma4_yoco.core import tail_batch
from sglang_gemma4_yoco.core.state import find_state
from sglang_gemma4_yoco.replaced import replaced

#: Each batch with the way in which it is served.
BATCHES = {
    "captured": (CAPTURED, [prompt(0, 40)]),
    "eager": (EAGER, [prompt(0, 300)]),
    "suffixes": (
        CAPTURED,
        [prompt(0, 1200, start=1190), prompt(0, 5, start=4), prompt(0, 7, start=6)],
    ),
    "chunk": (CAPTURED, [prompt(0, 40, to_come=20)]),
}
#: SGLang's own, in every forward of a model with a sliding window.
OF_STOCK = "update_sliding_window_buffer"


UNALIGNED = "numbers that begin at no multiple of 16 bytes"
NOT_COMPILED = "the kernels of K and V are not compiled at start"


def read_breakages() -> list[dict[str, Any]]:
    """In ``function`` of a module, or of a class in it, ``old`` becomes ``new``.

    The tail is captured anew where ``captures`` is true.
    """
    breakages: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return breakages


@contextmanager
def _broken(breakage: dict[str, Any]) -> Iterator[None]:
    module = import_module(f"sglang_gemma4_yoco.{breakage['module']}")
    owner, _, name = breakage["function"].rpartition(".")
    holder = getattr(module, owner) if owner else module
    known = vars(holder)[name]
    function = inspect.unwrap(getattr(known, "__func__", known))
    text = textwrap.dedent(inspect.getsource(function))
    if breakage["old"] not in text:
        raise ValueError(f"{breakage['name']}: {name} has no {breakage['old']!r}")
    text = text.replace(breakage["old"], breakage["new"], 1)
    made = dict(vars(module))
    source = f"from __future__ import annotations\n{text}"
    exec(compile(source, f"broken {module.__name__}", "exec"), made)
    setattr(holder, name, made[name])
    try:
        yield
    finally:
        setattr(holder, name, known)


def look(engine: Engine, *, captures: bool) -> list[str]:
    """What is wrong in the batches of this module; empty when all is well."""
    state = find_state(engine.text_model)
    assert state is not None
    state.failures_in_a_row = 0
    state.unsupported = None
    found: list[str] = []
    if captures:
        lifecycle.capture_tail(engine.runner, state, tail_graphs.check_graphs, can_be_captured=True)
        if state.captured is None:
            found.append(f"capture: {state.report['tail']}")
    for name, (way, prompts) in BATCHES.items():
        batch = engine.schedule(prompts)
        cost = batches_served.serve(engine, batch, way, is_chunk=name == "chunk")
        if cost.failure is not None:
            found.append(f"{name}: {cost.failure.splitlines()[0]}")
        found += [f"{name}: the host waits: {w}" for w in cost.waits if OF_STOCK not in w]
        found += [f"{name}: compiled in a request: {kernel}" for kernel in cost.compiled]
    return found


def _forget_the_norms() -> None:
    """As if none of their variants had been compiled."""
    name = "_gemma_qkv_rmsnorm_kernel"
    getattr(gemma4_fused_ops, name).device_caches.clear()
    for compiled in [known for known in kernels.compiled if known.startswith(name)]:
        del kernels.compiled[compiled]


def _serve_as_stock(engine: Engine) -> None:
    for _, prompts in BATCHES.values():
        batches_served.serve(engine, engine.schedule(prompts), STOCK)


def find_all(engine: Engine) -> dict[str, list[str]]:
    """By breakage what was found; by ``""`` what was found without any."""
    _serve_as_stock(engine)
    look(engine, captures=False)  # compiles what the first requests compile
    found = {"": look(engine, captures=True)}
    for breakage in read_breakages():
        with _broken(breakage):
            found[breakage["name"]] = look(engine, captures=breakage["captures"])
    with replaced(tail_batch, _ALIGNMENT=1):
        found[UNALIGNED] = look(engine, captures=False)
    found["after them"] = look(engine, captures=True)
    _forget_the_norms()
    _serve_as_stock(engine)
    found[NOT_COMPILED] = look(engine, captures=False)
    return found
