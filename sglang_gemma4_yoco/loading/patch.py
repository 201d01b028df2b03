"""Wrap SGLang's methods, on their classes.

- ``Gemma4TextModel.forward``: ``core.forward`` cuts it;
- what builds attention backends and captures graphs in ``ModelRunner``: ``start`` follows;
- what describes a scheduler, and makes its metrics: ``metrics`` adds to both.

Two helpers are added to ``Gemma4TextModel`` (``published``). No class is replaced, so models that
imported it by name are patched too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.core import forward
from sglang_gemma4_yoco.core.state import first_shared_layer
from sglang_gemma4_yoco.loading import metrics, published, start

_Model, _Runner = seams.gemma4_causal.Gemma4TextModel, seams.ModelRunner

# (class, attribute) -> the original, where it is wrapped.
_installed: dict[tuple[type, str], Any] = {}


def _with_start(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def init_attention_backends(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        for model in _text_models(self):
            start.start(self, model)
        return result

    return init_attention_backends


def _with_capture(stock: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's own graphs are captured first, at start and anew for new weights."""

    @functools.wraps(stock)
    def capture_graphs(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as span:
            for model in _text_models(self):
                span.enter_context(start.capturing(self, model))
            return stock(self, *args, **kwargs)

    return capture_graphs


def _with_state(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_internal_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, *args, **kwargs)
        metrics.add_to(output)
        return output

    return get_internal_state


def _with_metrics(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it wraps one
        stock(self, *args, **kwargs)
        metrics.collect(self.labels)

    return __init__


def _text_models(runner: Any) -> list[Any]:
    """The text models of a runner that have a KV-shared tail; a draft model's is left alone."""
    if getattr(runner, "is_draft_worker", False):
        return []
    return [
        model
        for model in runner.model.modules()
        if isinstance(model, _Model) and first_shared_layer(model.config) is not None
    ]


#: (class, attribute) -> what wraps it.
WRAPPED: dict[tuple[type, str], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    (_Model, "forward"): forward.with_fast_prefill,
    (_Runner, "init_attention_backends"): _with_start,
    (_Runner, "init_cuda_graphs"): _with_capture,
    (_Runner, "init_decode_cuda_graph"): _with_capture,
    (_Runner, "init_prefill_cuda_graph"): _with_capture,
    (seams.Scheduler, "get_internal_state"): _with_state,
    (seams.SchedulerMetricsCollector, "__init__"): _with_metrics,
}


def is_installed() -> bool:
    """Whether this process's SGLang is patched by this package."""
    return bool(_installed)


def install() -> None:
    """Patch SGLang's classes in this process.

    Raises:
        seams.SeamError: the installed SGLang is not supported, or is patched already; nothing is
            changed.
    """
    seams.check()
    for (patched, name), wrap in WRAPPED.items():
        stock = getattr(patched, name)
        _installed[patched, name] = stock
        setattr(patched, name, wrap(stock))
    for name in seams.PUBLISHED_HELPERS:
        setattr(_Model, name, getattr(published, name))
