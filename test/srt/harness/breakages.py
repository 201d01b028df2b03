"""Defects of the fast path, injected to see that checks find them.

Each is a context manager around forwards of one model; stock's own forwards are not touched. It
yields False if it does not apply to the model (no layer with a window, no captured tail).
"""

from __future__ import annotations

import copy
import inspect
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.captured.graphs import TailGraphs
from sglang_gemma4_yoco.core import cut
from sglang_gemma4_yoco.core.kept_batch import KeptRows
from sglang_gemma4_yoco.core.per_layer import PerLayerInputs
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.patched import patched

Breakage = Callable[[ModelState], AbstractContextManager[bool]]


def _is_triton(backend: Any) -> bool:
    kind: type = type(backend)
    return compat.attention.is_triton(kind)


@contextmanager
def _window(state: ModelState, *, more: int, layers: int | None = None) -> Iterator[bool]:
    """Change the windows of the tail's first ``layers``, or of all, by ``more`` keys."""
    assert state.backends is not None
    attentions = [layer.self_attn.attn for layer in state.tail_layers[:layers]]
    broken = set(filter(compat.attention.count_keys_in_window, attentions))
    tail, whole_window = state.backends.tail_backend, compat.attention.widen_window
    on_triton = _is_triton(tail)
    if not broken or (on_triton and layers):  # whose metadata is that of all layers
        yield False
        return

    def resized(stock: Callable[..., Any]) -> Callable[..., Any]:
        def forward(q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
            if layer in broken:
                layer = copy.copy(layer)
                layer.sliding_window_size += more
            return stock(q, k, v, layer, *args, **kwargs)

        return forward

    @contextmanager
    def resized_all(backend: Any) -> Iterator[None]:  # Triton's windows are in its metadata
        with whole_window(backend):
            backend.sliding_window_size += more
            try:
                yield
            finally:
                backend.sliding_window_size -= more

    span: AbstractContextManager[object]
    if on_triton:
        span = mock.patch.object(compat.attention, "widen_window", resized_all)
    else:
        decode, extend = resized(tail.forward_decode), resized(tail.forward_extend)
        span = patched(tail, forward_decode=decode, forward_extend=extend)
    with span:
        yield True


@contextmanager
def _other_pool(state: ModelState) -> Iterator[bool]:
    """Use slots of the full pool in the window's pool; on Triton, shift the window's by one."""
    assert state.backends is not None
    tail = state.backends.tail_backend
    if not hasattr(tail.token_to_kv_pool, "full_to_swa_index_mapping"):
        yield False
        return
    init = compat.attention.init_tail_metadata

    def untranslated(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        cache, *others = stock(*args, **kwargs)
        if cache.window_slots is not None:
            same = torch.arange(len(cache.window_slots)) % len(cache.keys)
            cache = cache._replace(window_slots=same)
        return cache, *others

    def shifted(backend: Any, batch: Any) -> None:
        init(backend, batch)
        metadata = backend.forward_metadata
        # After the last request's slots the buffer holds arbitrary values.
        slots, count = metadata.window_kv_indices.clone(), int(metadata.window_kv_indptr[-1])
        slots[:count] = slots[:count].roll(1)
        metadata.window_kv_indices = slots

    span: AbstractContextManager[object]
    if _is_triton(tail):
        span = mock.patch.object(compat.attention, "init_tail_metadata", shifted)
    else:
        span = patched(tail, _write=partial(untranslated, tail._write))
    with span:
        yield True


def _wrong(owner: Any, name: str, wrong: Callable[..., Any]) -> Breakage:
    """Return a breakage: ``wrong`` replaces a function, and gets it before the arguments."""

    @contextmanager
    def breakage(state: ModelState) -> Iterator[bool]:
        stock = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return wrong(stock, *args, **kwargs)

        with mock.patch.object(owner, name, call):
            yield owner is not PerLayerInputs or state.model.hidden_size_per_layer_input > 0

    return breakage


def _layers_run(wrong: Callable[..., Any]) -> Breakage:
    """Return a breakage: ``wrong`` gets the arguments of ``run_tail`` by name."""
    names = inspect.signature(gemma4.run_tail)

    def run(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return wrong(stock, **names.bind(*args, **kwargs).arguments)

    return _wrong(gemma4, "run_tail", run)


def _positions(stock: Callable[..., Any], positions: torch.Tensor, **others: Any) -> Any:
    return stock(positions=positions + 1, **others)


def _next_request(stock: Callable[..., KeptRows], *args: Any) -> KeptRows:
    right = stock(*args)
    last = right.indices[-1]
    return replace(right, indices=array("q", [min(row + 1, last) for row in right.indices]))


def _keys(stock: Callable[..., Any], *args: Any, k: float, v: float) -> Any:
    keys, values = stock(*args)
    return keys * k, values * v


def _inputs(stock: Callable[..., Any], inputs: PerLayerInputs, dim: int) -> torch.Tensor | None:
    """Return the tail's per-layer inputs, [B, layers, width], shifted by one row or layer."""
    right = stock(inputs)
    return None if right is None else right.roll(1, dim)


def _no_norm(stock: Callable[..., Any], model: Any, **others: Any) -> Any:
    with patched(model.norm, forward=lambda rows: rows):
        return stock(model=model, **others)


def _scattered(
    stock: Callable[..., None], state: ModelState, plan: Any, output: torch.Tensor, *args: Any
) -> None:
    """Scatter the rows of the tail one row too early."""
    stock(state, plan, output, *args)
    if plan.runner is not None:
        index = plan.kept_batch.index
        kept = output.index_select(0, index)
        output.index_fill_(0, index, 0).index_copy_(0, (index - 1).clamp_min(0), kept)


def _skipped_layer(stock: Callable[..., Any], layers: list[Any], **others: Any) -> Any:
    def skipping(*_: Any, **kwargs: Any) -> Any:
        return kwargs["hidden_states"]

    with patched(layers[2], forward=skipping):
        return stock(layers=layers, **others)


def _never_written(stock: Callable[..., Any], state: ModelState, plan: Any, *args: Any) -> None:
    """Leave out the K and V of intermediate chunks."""
    if plan.runner is not None:
        stock(state, plan, *args)


def _scaled(k: float = 1.0, v: float = 1.0) -> Breakage:
    return _wrong(gemma4, "compute_keys_and_values", partial(_keys, k=k, v=v))


@contextmanager
def _stale(state: ModelState, name: str) -> Iterator[bool]:
    """Leave a static input stale, for any number of requests."""
    tail = state.captured
    if not isinstance(tail, TailGraphs) or getattr(tail.inputs[-1], name) is None:
        yield False
        return
    static, right = getattr(tail.inputs[-1], name), tail.inputs
    static.fill_(1 if name == "lengths" else 0)  # of another batch
    tail.inputs = [replace(rows, **{name: getattr(rows, name).clone()}) for rows in right]
    try:
        yield True
    finally:
        tail.inputs = right


BREAKAGES: Mapping[str, Breakage] = {
    "windows one key short": partial(_window, more=-1),
    "windows one key long": partial(_window, more=1),
    "the donor's window one key short": partial(_window, more=-1, layers=1),
    "the donor's window one key long": partial(_window, more=1, layers=1),
    "slots of the other pool": _other_pool,
    "positions one too high": _layers_run(_positions),
    "rows of the next request": _wrong(KeptRows, "suffixes", _next_request),
    "keys doubled": _scaled(k=2.0),
    "keys 2 % too large": _scaled(k=1.02),
    "values doubled": _scaled(v=2.0),
    "values 2 % too large": _scaled(v=1.02),
    "per-layer inputs of another layer": _wrong(
        PerLayerInputs, "get_kept", partial(_inputs, dim=1)
    ),
    "per-layer inputs of another row": _wrong(PerLayerInputs, "get_kept", partial(_inputs, dim=0)),
    "the norm left out": _layers_run(_no_norm),
    "scattered one row off": _wrong(cut, "finish_prefill", _scattered),
    "one layer skipped": _layers_run(_skipped_layer),
    "chunks' keys and values not written": _wrong(
        cut, "write_donor_keys_and_values", _never_written
    ),
    **{
        f"a stale input of graphs: {name}": partial(_stale, name=name)
        for name in ("rows", "positions", "requests", "lengths", "embeds", "embedded")
    },
}
