"""Host code of the package, broken on purpose: whether the rehearsal sees each breakage.

On a CPU all but a few of them would change nothing: no answer, no row. A breakage is a replacement
of text in a function, in this process alone.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sglang.kernels.ops.layernorm import gemma4_fused_ops

from rehearsal import batches_served, kernels
from rehearsal.batches_served import CAPTURED, EAGER, STOCK, prompt
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco.captured import graphs, proof
from sglang_gemma4_yoco.core import cut, donor, gate, kept, per_layer
from sglang_gemma4_yoco.core.replaced import replaced
from sglang_gemma4_yoco.core.state import find

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


@dataclass(frozen=True)
class Breakage:
    """``old`` becomes ``new`` in ``function``, of a module or of its class ``owner``.

    Attributes:
        captures: the tail is captured anew with it.
    """

    name: str
    module: ModuleType
    owner: str
    function: str
    old: str
    new: str
    captures: bool = True


_NORMED = "normed: torch.Tensor = state.model.norm(rows)"
_CLONED = "rows = inputs.rows.clone()"
_FILLED = "inputs.fill(requests=live.req_pool_indices, lengths=live.seq_lens)"
_SLICED = "return functional.linear(normed, projection.weight[start:])"
_COLUMNS = "weight = self._model.per_layer_model_projection.weight[self._columns]"
_QUERIES = "torch.zeros_like(k), k)"
BREAKAGES = [
    Breakage(
        "the index of the kept rows stays on the CPU",
        *(kept, "TailBatch", "of", "packed = packed.to(device, non_blocking=True)", "pass", False),
    ),
    Breakage(
        "the kept rows' numbers are copied from pageable memory",
        *(kept, "TailBatch", "of", "packed = packed.pin_memory()", "pass", False),
    ),
    Breakage(
        "a value is read after the last layer",
        *(cut, "", "run_layers", _NORMED, f"{_NORMED}; float(normed.sum())"),
    ),
    Breakage(
        "the lengths are read from the device",
        *(gate, "", "kept_rows", "forward_batch.extend_seq_lens_cpu,"),
        *("forward_batch.extend_seq_lens.tolist(),", False),
    ),
    Breakage(
        "rows in fp32 where the model has bf16",
        *(graphs, "Inputs", "of", "rows=zeros(hidden),"),
        "rows=zeros(hidden, dtype=torch.float32),",
    ),
    Breakage(
        "the graph's positions on the CPU",
        *(graphs, "Inputs", "of", "positions=zeros(dtype=torch.int64),"),
        "positions=torch.zeros(rows, dtype=torch.int64),",
    ),
    Breakage(
        "keys in fp32 at the rotary embedding",
        *(donor, "", "keys_and_values", _QUERIES, "torch.zeros_like(k), k.float())", False),
    ),
    Breakage(
        "one row of queries at the rotary embedding",
        *(donor, "", "keys_and_values", _QUERIES, "torch.zeros_like(k)[:1], k)", False),
    ),
    Breakage(
        "a synchronisation while capturing",
        *(graphs, "TailGraphs", "_layers", _CLONED, f"{_CLONED}; torch.cuda.synchronize()"),
    ),
    Breakage(
        "a host number is copied to the device while capturing",
        *(graphs, "TailGraphs", "_layers", _CLONED),
        f"{_CLONED}; torch.tensor([1.0], device=rows.device)",
    ),
    Breakage(
        "the requests go through the host",
        *(graphs, "TailGraphs", "_plan", _FILLED),
        "inputs.fill(requests=live.req_pool_indices.cpu(), lengths=live.seq_lens)",
    ),
    Breakage(
        "a length is read while planning",
        *(graphs, "TailGraphs", "_plan", "self._plan_captured(bucket, live)"),
        "self._plan_captured(bucket, live); self._inputs.lengths.max().item()",
    ),
    Breakage(
        "keys and values that are not contiguous in a row",
        *(donor, "", "_projected", _SLICED, f"{_SLICED}.T.contiguous().T", False),
    ),
    Breakage(
        "a weight on the CPU",
        *(per_layer, "_SomeLayers", "per_layer_model_projection", _COLUMNS, f"{_COLUMNS}.cpu()"),
    ),
]
UNALIGNED = "numbers that begin at no multiple of 16 bytes"
NOT_COMPILED = "the kernels of K and V are not compiled at start"
NAMES = [breakage.name for breakage in BREAKAGES] + [UNALIGNED, NOT_COMPILED]


@contextmanager
def _broken(breakage: Breakage) -> Iterator[None]:
    module: Any = breakage.module
    owner = getattr(module, breakage.owner) if breakage.owner else module
    known = vars(owner)[breakage.function]
    function = inspect.unwrap(getattr(known, "__func__", known))
    text = textwrap.dedent(inspect.getsource(function))
    if breakage.old not in text:
        raise ValueError(f"{breakage.name}: {breakage.function} has no {breakage.old!r}")
    source = "from __future__ import annotations\n" + text.replace(breakage.old, breakage.new, 1)
    made = dict(vars(module))
    exec(compile(source, f"broken {module.__name__}", "exec"), made)
    setattr(owner, breakage.function, made[breakage.function])
    try:
        yield
    finally:
        setattr(owner, breakage.function, known)


def look(engine: Engine, *, captures: bool) -> list[str]:
    """What is wrong in the batches of this module; empty when all is well."""
    state = find(engine.text_model)
    assert state is not None
    state.failures_in_a_row = 0
    state.refused = None
    found: list[str] = []
    if captures:
        graphs.capture(engine.runner, state, proof.prove, can_be_captured=True)
        if state.captured is None:
            found.append(f"capture: {state.facts['tail']}")
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
    for breakage in BREAKAGES:
        with _broken(breakage):
            found[breakage.name] = look(engine, captures=breakage.captures)
    with replaced(kept, _ALIGNMENT=1):
        found[UNALIGNED] = look(engine, captures=False)
    found["after them"] = look(engine, captures=True)
    _forget_the_norms()
    _serve_as_stock(engine)
    found[NOT_COMPILED] = look(engine, captures=False)
    return found
