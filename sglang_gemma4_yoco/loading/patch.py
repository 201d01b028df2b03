"""Wrap SGLang's methods, ``WRAPPED``, and add the two helpers of ``published``.

No class is replaced, so models that imported one by name are patched too. An SGLang with a fast
prefill of its own keeps its helpers: they are what its flag calls.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.core import forward
from sglang_gemma4_yoco.core.state import first_shared_layer
from sglang_gemma4_yoco.loading import classes, metrics, published, start
from sglang_gemma4_yoco.models import registry

_Model, _Runner = compat.layers.gemma4_causal.Gemma4TextModel, compat.names.ModelRunner
_TEXT_MODELS: tuple[Any, ...] = tuple(registry.TEXT_MODELS)

#: Whether this process's SGLang is patched by this package.
installed = False


def _call_after(call: Callable[[Any, Any], object]) -> Callable[..., Callable[..., Any]]:
    """What wraps a method so that ``call(self, result)`` is called after it."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = stock(self, *args, **kwargs)
            call(self, result)
            return result

        return method

    return wrap


def _wrap_capture(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Capture the tail after SGLang's own graphs, at start and again for new weights."""

    @functools.wraps(stock)
    def capture_graphs(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for model in _find_text_models(self):
                stack.enter_context(start.set_up_after_capture(self, model))
            return stock(self, *args, **kwargs)

    return capture_graphs


def _find_text_models(runner: Any) -> list[Any]:
    """The text models of a runner that have a KV-shared tail; a draft model's is left alone."""
    if getattr(runner, "is_draft_worker", False):
        return []
    models = [model for model in runner.model.modules() if isinstance(model, _TEXT_MODELS)]
    return [model for model in models if first_shared_layer(model.config) is not None]


def _start_models(runner: Any, _: Any) -> None:
    for model in _find_text_models(runner):
        start.start_model(runner, model)


#: (class, attribute) -> what wraps it. Beside each: why, and what of SGLang's would replace it.
WRAPPED: dict[tuple[type, str], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    # To cut the layers. Needless when the model itself keeps the rows that are read (#27183).
    **{(model, "forward"): forward.wrap_model_forward for model in _TEXT_MODELS},
    # To build the tail's backend after the runner's, and to see each batch that is planned.
    # Needless when one backend can hold two plans.
    (_Runner, "init_attention_backends"): _call_after(_start_models),
    # To capture the tail after SGLang's own graphs, and to check it before it serves; the other two
    # are called by themselves for new weights. Needless when SGLang's runner captures any function
    # of few rows, and calls plugins when it is ready to serve.
    (_Runner, "init_cuda_graphs"): _wrap_capture,
    (_Runner, "init_decode_cuda_graph"): _wrap_capture,
    (_Runner, "init_prefill_cuda_graph"): _wrap_capture,
    # To say in /server_info what is active. Needless when plugins can add to it.
    (compat.names.Scheduler, "get_internal_state"): _call_after(
        lambda _, state: metrics.add_to_server_info(state)
    ),
    # To count with the labels of SGLang's own metrics. Needless when plugins are given these.
    (compat.names.SchedulerMetricsCollector, "__init__"): _call_after(
        lambda collector, _: metrics.collect_metrics(collector.labels)
    ),
}


def patch_sglang() -> None:
    """Patch SGLang's classes in this process.

    Raises:
        compat.release.IncompatibleError: the installed SGLang is not supported, or is patched
            already; nothing is changed.
    """
    global installed
    compat.names.check_names()
    if classes.is_ours(_Model.forward):
        raise compat.release.IncompatibleError("Gemma4TextModel.forward is patched already")
    helpers = published.HELPERS
    if compat.server.has_fast_prefill():
        helpers = ()
    for helper in helpers:
        if hasattr(_Model, helper.__name__):
            why = f"Gemma4TextModel has a {helper.__name__} of its own"
            raise compat.release.IncompatibleError(why)
    # All of them first: where SGLang lacks one, nothing is changed.
    wrapped = {(owner, name): wrap(getattr(owner, name)) for (owner, name), wrap in WRAPPED.items()}
    for (owner, name), method in wrapped.items():
        setattr(owner, name, method)
    for helper in helpers:
        setattr(_Model, helper.__name__, helper)
    installed = True
