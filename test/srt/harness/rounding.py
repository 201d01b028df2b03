"""How much rounding alone makes two forwards differ, whatever the model.

End to end that depends on the model: where a head attends to few keys, one rounding can make it
attend to others. So there are two measures. ``rounded_otherwise`` has stock itself round otherwise,
and its answers show how far that takes them. ``layer_errors`` gives each layer of the tail the rows
that stock's was given: then rounding is that of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from harness.batches import kept_rows
from harness.observe import run
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import compat

# In units of the type's eps, of what a layer adds. It is the sum of three results, each rounded,
# and so are the three sums on the way: by eps / 2 at most, eps / 12**0.5 in the mean square.
# Stock's and the fast path's, 12 in all, make 1 if each is independent; four times that is none.
_ROUNDING_OF_A_LAYER = 4.0


@contextmanager
def rounded_otherwise(engine: Engine, seed: int) -> Iterator[None]:
    """In the tail's layers attention and FFN round otherwise: by up to eps / 2 more."""
    draw = torch.Generator().manual_seed(seed)

    def rounded(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        share = torch.rand(output.shape, generator=draw) - 0.5
        return (output.float() * (1 + share * torch.finfo(output.dtype).eps)).to(output.dtype)

    with ExitStack() as hooks:
        for _, layer in _tail_layers(engine):
            for part in (layer.self_attn, layer.mlp):
                hooks.callback(part.register_forward_hook(rounded).remove)
        yield


def layer_errors(engine: Engine, scheduled: Any, prompts: Sequence[Prompt]) -> dict[int, float]:
    """By layer, the fast path's largest error of a kept row, relative to what the layer adds.

    Every layer is given stock's own rows. An error is the root mean square over the channels, each
    relative to what stock's layer adds to it: channels differ by far in some models.

    Args:
        scheduled: the batch of ``prompts``.
    """
    ends = accumulate(len(prompt.new) for prompt in prompts)
    counts = kept_rows(prompts)
    kept = []
    for end, m in zip(ends, counts, strict=True):
        for n in range(end - m, end):
            kept.append(n)
    before: dict[int, torch.Tensor] = {}
    after: dict[int, torch.Tensor] = {}
    fast: dict[int, torch.Tensor] = {}

    def watched(number: int, _: Any, args: Any, kwargs: Any) -> None:
        before[number] = kwargs["hidden_states"].clone()

    def given_stocks(number: int, _: Any, args: Any, kwargs: Any) -> Any:
        rows = before[number][kept].clone()
        compat.layers.write_residual(kwargs["forward_batch"], rows)
        return args, {**kwargs, "hidden_states": rows}

    def returned(found: dict[int, torch.Tensor], number: int, _: Any, __: Any, out: Any) -> None:
        found[number] = compat.layers.get_rows(out).clone()

    for switch, given, found in (("0", watched, after), ("1", given_stocks, fast)):
        with ExitStack() as hooks:
            for number, layer in _tail_layers(engine):
                hook = layer.register_forward_pre_hook(partial(given, number), with_kwargs=True)
                hooks.enter_context(hook)
                hooks.enter_context(layer.register_forward_hook(partial(returned, found, number)))
            run(engine, scheduled, switch)
    errors = {}
    for number, rows in after.items():
        added = rows.double() - before[number].double()
        apart = fast[number].double() - rows[kept].double()
        scale = added.square().mean(0).sqrt()
        errors[number] = float((apart / scale).square().mean(-1).sqrt().max())
    return errors


def assert_layers_agree(engine: Engine, scheduled: Any, prompts: Sequence[Prompt]) -> None:
    """Given stock's rows, each layer of the tail adds what stock's adds, but for its rounding."""
    errors = layer_errors(engine, scheduled, prompts)
    allowed = _ROUNDING_OF_A_LAYER * torch.finfo(engine.runner.dtype).eps
    assert max(errors.values()) <= allowed, errors


def _tail_layers(engine: Engine) -> list[tuple[int, Any]]:
    """By number, the donor, which is cut, and the layers that share K and V."""
    config = engine.text_model.config
    first = config.num_hidden_layers - config.num_kv_shared_layers
    return list(enumerate(engine.text_model.layers))[first - 1 :]
