"""A prefill that left SGLang's recording by the door, beside the same recording run to its end.

Up to the door both are the very same recording of the same bucket: there is no rounding between
them. So what can go wrong is what happens at the door, and each of it is compared:

- is what lies there what should? K and V of layer K-1 are made once more of the rows at the door
  and of their positions, and must be those that lie there, but for rounding (``rounding``);
- K and V in the pool must be those that the recording writes when it runs to its end;
- the recorded tail must give what its layers give when they are launched on the same rows.

How far the last rows are apart end to end says nothing in bf16 (``layerwise``).
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.checking import layerwise, proof, rounding
from sglang_gemma4_yoco.checking.rounding import Finding
from sglang_gemma4_yoco.cutting.forward import ReplayedFront
from sglang_gemma4_yoco.cutting.gate import Plan
from sglang_gemma4_yoco.cutting.served import ServedModel
from sglang_gemma4_yoco.tail import donor
from sglang_gemma4_yoco.tail.graphs import Inputs


@torch.no_grad()
def findings(
    known: ServedModel, plan: Plan, fast: torch.Tensor, front: ReplayedFront
) -> list[Finding]:
    """What differs; the recording has run to its end when this returns, and stock's K and V are
    in the pool.

    Args:
        plan: of the batch, which has left by the door.
        fast: [B, hidden], the kept rows that it was given; of an unread chunk not looked at.
        front: the forward, which nothing has run since.
    """
    found: list[Finding] = []
    written: list[torch.Tensor] | None = None
    if front.door is None:
        return [rounding.defect("the door was not reached")]
    if front.door.keys is not None:
        found += _at_the_door(known, plan, front)
        written = _in_the_pool(known, plan)
    if plan.replay is not None:
        found.append(_tail(known, plan, plan.replay.inputs, fast))
    front.stock()
    if written is not None:
        where = f"layer {known.first_cut} in the pool"
        stock = _in_the_pool(known, plan)
        found += rounding.findings(layerwise.keys_and_values_compared(where, stock, written))
    return found


def _at_the_door(known: ServedModel, plan: Plan, front: ReplayedFront) -> list[Finding]:
    door, rows = front.door, plan.tail.kept.total
    assert door is not None
    assert door.keys is not None
    assert door.values is not None
    layer = known.model.layers[known.first_cut]
    normed = layer.input_layernorm(door.rows[:rows])
    made = donor.keys_and_values(layer.self_attn, normed, front.positions[:rows])
    lying = door.keys[:rows], door.values[:rows]
    where = f"layer {known.first_cut} at the door"
    return rounding.findings(layerwise.keys_and_values_compared(where, made, lying))


def _in_the_pool(known: ServedModel, plan: Plan) -> list[torch.Tensor]:
    layer = known.model.layers[known.first_cut].self_attn.attn.layer_id
    buffers, slots = seams.cache_of(plan.attention.tail, layer, plan.batch.out_cache_loc)
    return [buffer[slots] for buffer in buffers]


def _tail(known: ServedModel, plan: Plan, given: Inputs, fast: torch.Tensor) -> Finding:
    tail = known.graphs
    assert tail is not None, "it has just been replayed"
    size, rows = tail.size_for(plan.tail.kept), len(plan.tail.kept.lens)
    assert size is not None

    def fill(inputs: Inputs) -> None:
        for name, tensor in vars(given).items():
            if tensor is not None:
                getattr(inputs, name).copy_(tensor)

    launched = tail.launched(tail.inputs_for(size, rows, fill))[:rows]
    return proof.difference(launched, fast)


class Witness:
    """In the place of an auditor: what was found of each batch that left by the door."""

    def __init__(self, known: ServedModel) -> None:
        self._known = known
        self.found: list[Finding] = []
        self.seen = 0

    def is_due(self) -> bool:
        """All of them are looked at."""
        return True

    def audit(self, _: Any, output: Any, __: Any) -> Any:
        """A forward that was no replay: nothing is seen of it."""
        return output

    def audit_replayed(
        self, plan: Plan, output: torch.Tensor, front: ReplayedFront
    ) -> torch.Tensor:
        """Compare it."""
        self.seen += 1
        fast = output.index_select(0, plan.tail.index)
        self.found += findings(self._known, plan, fast, front)
        return output
