"""Ways in which the fast path could be wrong, for whoever wants to see that checks notice.

Each is a context manager around forwards of one model; stock's own forwards are not touched. Where
a model has no place for one (no layer with a window, no recorded tail) it yields False.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.cutting import cut
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.core.kept import KeptRows
from sglang_gemma4_yoco.tail import donor, layers, per_layer
from sglang_gemma4_yoco.core.replaced import replaced

Breakage = Callable[[ModelState], AbstractContextManager[bool]]


@contextmanager
def _window(known: ModelState, *, more: int, donor_alone: bool = False) -> Iterator[bool]:
    """The tail's rows see so many keys more in their windows."""
    attention, layers = known.attention, known.model.layers[known.first_shared - 1 :]
    assert attention is not None
    broken = {
        layer.self_attn.attn
        for layer in (layers[:1] if donor_alone else layers)
        if seams.keys_in_window(layer.self_attn.attn)
    }
    tail, whole_window = attention.tail, seams.whole_window
    on_triton = seams._triton_class(tail) is not None
    if not broken or (on_triton and donor_alone):  # whose windows are planned for all layers
        yield False
        return

    def narrower(stock: Callable[..., Any]) -> Callable[..., Any]:
        def forward(q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
            if layer in broken:
                layer = copy.copy(layer)
                layer.sliding_window_size += more
            return stock(q, k, v, layer, *args, **kwargs)

        return forward

    @contextmanager
    def planned(backend: Any) -> Iterator[None]:  # Triton's windows are what was planned
        with whole_window(backend):
            backend.sliding_window_size += more
            try:
                yield
            finally:
                backend.sliding_window_size -= more

    with ExitStack() as stack:
        if on_triton:
            stack.enter_context(mock.patch.object(seams, "whole_window", planned))
        else:
            shadows = stack.enter_context(Shadows())
            for name in ("forward_decode", "forward_extend"):
                shadows.add(tail, name, narrower)
        yield True


@contextmanager
def _other_pool(known: ModelState) -> Iterator[bool]:
    """Slots of the full pool are looked up in the window's."""
    assert known.attention is not None
    tail = known.attention.tail
    if not hasattr(tail.token_to_kv_pool, "full_to_swa_index_mapping"):
        yield False
        return
    plan = seams.plan

    def untranslated(stock: Callable[..., Any]) -> Callable[..., Any]:
        def written(*args: Any) -> Any:
            cache = stock(*args)
            if cache.window_slots is None:
                return cache
            same = torch.arange(len(cache.window_slots)) % len(cache.keys)
            return cache._replace(window_slots=same)

        return written

    def planned(backend: Any, batch: Any) -> None:
        plan(backend, batch)
        metadata = backend.forward_metadata
        # Behind the last request's the buffer holds no slots, but whatever was there.
        slots, count = metadata.window_kv_indices.clone(), int(metadata.window_kv_indptr[-1])
        slots[:count] = slots[:count].roll(1)
        metadata.window_kv_indices = slots

    with ExitStack() as stack:
        if seams._triton_class(tail) is not None:
            stack.enter_context(mock.patch.object(seams, "plan", planned))
        else:
            stack.enter_context(Shadows()).add(tail, "_written", untranslated)
        yield True


def _layers_run(wrong: Callable[..., Any]) -> Breakage:
    """``wrong`` is called with what runs the layers behind the cut, and its arguments by name."""

    @contextmanager
    def breakage(_: ModelState) -> Iterator[bool]:
        stock = layers.run
        names = inspect.signature(stock)

        def run(*args: Any, **kwargs: Any) -> Any:
            return wrong(stock, **names.bind(*args, **kwargs).arguments)

        with mock.patch.object(layers, "run", run):
            yield True

    return breakage


def _positions(stock: Callable[..., Any], positions: torch.Tensor, **others: Any) -> Any:
    return stock(positions=positions + 1, **others)


@contextmanager
def _next_request(_: ModelState) -> Iterator[bool]:
    stock = KeptRows.indices

    def indices(kept: KeptRows) -> list[int]:
        right = stock(kept)
        return [min(row + 1, right[-1]) for row in right]

    with mock.patch.object(KeptRows, "indices", indices):
        yield True


@contextmanager
def _keys(_: ModelState, *, k: float = 1.0, v: float = 1.0) -> Iterator[bool]:
    stock = donor.keys_and_values

    def keys_and_values(*args: Any) -> Any:
        keys, values = stock(*args)
        return keys * k, values * v

    with mock.patch.object(donor, "keys_and_values", keys_and_values):
        yield True


@contextmanager
def _inputs(known: ModelState, wrong: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[bool]:
    """``wrong`` is called with the tail's per-layer inputs, [B, layers, width]."""
    stock = per_layer.SplitInputs.kept
    with mock.patch.object(per_layer.SplitInputs, "kept", lambda inputs: wrong(stock(inputs))):
        yield known.model.hidden_size_per_layer_input > 0


def _other_layer(right: torch.Tensor) -> torch.Tensor:
    return right.roll(1, 1)


def _other_row(right: torch.Tensor) -> torch.Tensor:
    return right.roll(1, 0)


def _no_norm(stock: Callable[..., Any], **given: Any) -> Any:
    return stock(**given | {"norm": lambda rows: rows})


@contextmanager
def _scattered(_: ModelState) -> Iterator[bool]:
    def scatter(this: Any, front: torch.Tensor, rows: torch.Tensor) -> None:
        front.index_copy_(0, (this.plan.tail.index - 1).clamp_min(0), rows)

    with mock.patch.object(cut.Cut, "scatter", scatter):
        yield True


def as_returned(rows: torch.Tensor) -> Any:
    """``rows`` as a decoder layer returns them: up to SGLang 0.5.21 in a pair with None."""
    return rows if seams.HAS_RESIDUAL_STREAM else (rows, None)


def _skipped_layer(stock: Callable[..., Any], model: Any, first: int, **others: Any) -> Any:
    def skipping(_: Any) -> Any:
        return lambda *_, **kwargs: as_returned(kwargs["hidden_states"])

    with Shadows() as shadows:
        shadows.add(model.layers[first + 2], "forward", skipping)
        return stock(model=model, first=first, **others)


@contextmanager
def _never_written(_: ModelState) -> Iterator[bool]:
    """K and V of chunks that nobody reads."""
    stock = cut.Cut.write_keys_and_values

    def write(this: Any, front: torch.Tensor) -> None:
        if not this.plan.tail.unread:
            stock(this, front)

    with mock.patch.object(cut.Cut, "write_keys_and_values", write):
        yield True


@contextmanager
def _stale(known: ModelState, name: str) -> Iterator[bool]:
    """A static input is never filled in, for any number of requests."""
    tail = known.captured
    if tail is None or getattr(tail._inputs, name) is None:
        yield False
        return
    static, right = getattr(tail._inputs, name), tail._of_first
    static.fill_(1 if name == "lengths" else 0)  # of another batch
    tail._of_first = [replace(rows, **{name: getattr(rows, name).clone()}) for rows in right]
    tail._replays.clear()
    try:
        yield True
    finally:
        tail._of_first = right
        tail._replays.clear()


BREAKAGES: Mapping[str, Breakage] = {
    "windows one key short": partial(_window, more=-1),
    "windows one key long": partial(_window, more=1),
    "the donor's window one key short": partial(_window, more=-1, donor_alone=True),
    "the donor's window one key long": partial(_window, more=1, donor_alone=True),
    "slots of the other pool": _other_pool,
    "positions one too high": _layers_run(_positions),
    "rows of the next request": _next_request,
    "keys doubled": partial(_keys, k=2.0),
    "keys 2 % too large": partial(_keys, k=1.02),
    "values doubled": partial(_keys, v=2.0),
    "values 2 % too large": partial(_keys, v=1.02),
    "per-layer inputs of another layer": partial(_inputs, wrong=_other_layer),
    "per-layer inputs of another row": partial(_inputs, wrong=_other_row),
    "the norm left out": _layers_run(_no_norm),
    "scattered one row off": _scattered,
    "one layer skipped": _layers_run(_skipped_layer),
    "unread keys and values not written": _never_written,
    **{
        f"a stale input of graphs: {name}": partial(_stale, name=name)
        for name in ("rows", "positions", "requests", "lengths", "embeds", "embedded")
    },
}
