"""What a forward really did: rows per layer, the batch before and after, outputs and K/V.

Looked at from outside, by module hooks and copies of the pools; nothing here asks the product.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from sglang_gemma4_reference.engine import Engine

SWITCH = "SGLANG_GEMMA4_YOCO"


def switched(value: str) -> AbstractContextManager[object]:
    """The switch set to ``value`` for the span."""
    return mock.patch.dict(os.environ, {SWITCH: value})


@dataclass
class Observed:
    """One forward.

    Attributes:
        rows: rows that the FFN of each layer computed, in the order of the layers that ran.
        attention_rows: rows for which each layer projected queries.
        hidden: [T, hidden], what the text model returned.
        output: SGLang's logits output.
        kv: K and V of each layer that owns some.
        before: the fields of the batch as the text model found them.
        after: the fields of the batch as the text model left them.
    """

    rows: list[int] = field(default_factory=list)
    attention_rows: list[int] = field(default_factory=list)
    hidden: torch.Tensor | None = None
    output: Any = None
    kv: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    before: dict[str, object] = field(default_factory=dict)
    after: dict[str, object] = field(default_factory=dict)


def _fields(batch: Any) -> dict[str, object]:
    return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}


@contextmanager
def watching(engine: Engine, seen: Observed) -> Iterator[None]:
    """Record into ``seen`` what the engine's text model does during the span."""
    model = engine.text_model
    hooks = []

    def on_entry(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        seen.before = _fields(batch)

    def on_exit(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        seen.after = _fields(batch)
        # With captured layers the model returns their states beside its own.
        seen.hidden = (output[0] if isinstance(output, tuple) else output).clone()

    hooks.append(model.register_forward_pre_hook(on_entry, with_kwargs=True))
    hooks.append(model.register_forward_hook(on_exit, with_kwargs=True))

    def counting(rows: list[int]) -> Callable[[Any, Any], None]:
        def count(_: Any, args: Any) -> None:
            rows.append(args[0].shape[0])

        return count

    for layer in model.layers:
        hooks.append(layer.mlp.register_forward_pre_hook(counting(seen.rows)))
        o_proj = layer.self_attn.o_proj
        hooks.append(o_proj.register_forward_pre_hook(counting(seen.attention_rows)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run(engine: Engine, batch: Any, switch: str) -> Observed:
    """One forward of a scheduled batch, its cache slots poisoned before, with the switch set."""
    seen = Observed()
    engine.poison(batch)
    with switched(switch), watching(engine, seen):
        seen.output = engine.forward(batch)
    seen.kv = engine.kv()
    return seen


def assert_same_objects(seen: Observed) -> None:
    """The batch's fields are, after the forward, the very objects that they were before it."""
    changed = [name for name, value in seen.before.items() if seen.after[name] is not value]
    assert changed == []


def assert_same_cache(stock: Observed, fast: Observed) -> None:
    """Every layer's K and V are byte for byte the same at every slot."""
    for layer, ((k, v), (k2, v2)) in enumerate(zip(stock.kv, fast.kv, strict=True)):
        assert torch.equal(k, k2), f"K of layer {layer} differs"
        assert torch.equal(v, v2), f"V of layer {layer} differs"


def assert_same_answers(stock: Observed, fast: Observed, tolerance: float) -> None:
    """Next-token logits and all requested log-probabilities agree within ``tolerance``."""
    for name in (
        "next_token_logits",
        "input_token_logprobs",
        "input_top_logprobs_val",
        "input_token_ids_logprobs_val",
    ):
        want, got = getattr(stock.output, name, None), getattr(fast.output, name, None)
        if want is None:
            assert got is None
            continue
        difference = (_flat(got) - _flat(want)).abs()
        assert difference.numel() == 0 or difference.max() <= tolerance, f"{name}: {difference}"


def _flat(values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.float().flatten()
    if isinstance(values, (list, tuple)):
        parts = [_flat(value) for value in values]
        return torch.cat(parts) if parts else torch.empty(0)
    return torch.tensor([float("nan") if values is None else float(values)]).nan_to_num(7.0)
