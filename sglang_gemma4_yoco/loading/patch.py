"""Wrap SGLang's methods, and add the two helpers of ``published`` to Gemma 4.

The methods are the forwards of text models, and those in ``WRAPPED`` and ``OPTIONAL``. A text model
for which SGLang lacks a symbol is left unpatched; the others are patched.

Methods are replaced, not classes, so modules that imported a class by name are patched too. An
SGLang with its own fast prefill keeps its own helpers, which it uses if its flag is set.

These methods run in every server, whatever model it serves. So each calls this package inside
``runner_setup.guarded``, which contains errors. ``core`` guards a text model's forward.
"""

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from sglang_gemma4_yoco import compat, log
from sglang_gemma4_yoco.core import forward
from sglang_gemma4_yoco.core.state import first_shared_layer
from sglang_gemma4_yoco.loading import metrics, published, runner_setup, third_party
from sglang_gemma4_yoco.models import gemma4, registry

_Runner = compat.names.ModelRunner
_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

#: True once SGLang is patched in this process.
installed = False


def _call_after(failed: str, call: Callable[[Any, Any], object]) -> _Wrap:
    """Return a method wrapper that calls ``call(self, result)`` afterwards.

    Args:
        failed: the line that is logged if the call fails.
    """

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = stock(self, *args, **kwargs)
            with runner_setup.guarded(failed):
                call(self, result)
            return result

        return method

    return wrap


def _enclose(part: Callable[[Any, Any], AbstractContextManager[None]]) -> _Wrap:
    """Return a wrapper that runs a runner's method inside ``part(runner, model)`` of each model."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            models: list[Any] = []
            with ExitStack() as parts:
                with runner_setup.guarded("Gemma 4 fast prefill: its setup failed", models):
                    models += _find_text_models(self)
                    for model in models:
                        parts.enter_context(part(self, model))
                result = stock(self, *args, **kwargs)
                with runner_setup.guarded("Gemma 4 fast prefill: its setup failed", models):
                    parts.close()
            return result

        return method

    return wrap


def _find_text_models(runner: Any) -> list[Any]:
    """Return the text models of a runner that have a KV-shared tail; none of a draft worker."""
    if getattr(runner, "is_draft_worker", False):
        return []
    modules: Any = getattr(runner.model, "modules", list)  # on MLX it is not a PyTorch module
    known: Any = tuple(registry.list_text_models())
    models = list[Any]()
    for model in modules():
        if isinstance(model, known) and first_shared_layer(model.config) is not None:
            models.append(model)
    return models


_SET_UP = _enclose(runner_setup.set_up_after_capture)
#: (class, attribute) -> its wrapper, with the reason and the change in SGLang that would make it
#: unnecessary. The forwards of text models are wrapped too.
WRAPPED: dict[tuple[type, str], _Wrap] = {
    # Builds the tail's backend after the runner's, and observes each planned batch. Unnecessary
    # once one backend can hold two plans.
    (_Runner, "init_attention_backends"): _enclose(runner_setup.start_model),
    # Captures the tail after SGLang's own graphs, and checks it before it serves; weight updates
    # and changes of role capture decode steps alone, by the second. Unnecessary once SGLang's
    # runner captures arbitrary functions of few rows, and has a plugin hook before serving.
    (_Runner, "init_cuda_graphs"): _SET_UP,
    (_Runner, "init_decode_cuda_graph"): _SET_UP,
}
#: The same for reporting, with classes by name: SGLang may lack these.
OPTIONAL: dict[tuple[str, str], _Wrap] = {
    # Adds the state to /server_info. Unnecessary once plugins can extend it.
    ("sglang.srt.managers.scheduler.Scheduler", "get_internal_state"): _call_after(
        "Gemma 4 fast prefill: adding its state to /server_info failed",
        lambda _, state: metrics.add_to_server_info(state),
    ),
    # Counts with the labels of SGLang's own metrics. Unnecessary once plugins receive these.
    (
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector",
        "__init__",
    ): _call_after(
        "Gemma 4 fast prefill: its metrics are not collected",
        lambda collector, _: metrics.collect_metrics(collector.labels),
    ),
}


def patch_sglang() -> None:
    """Patch SGLang's classes in this process.

    Raises:
        compat.release.IncompatibleError: the installed SGLang is not supported, or already
            patched; nothing is changed.
    """
    global installed
    compat.names.check_names()
    # Look up all of them first: if SGLang lacks one, nothing is changed.
    methods = dict[tuple[type, str], Callable[..., Any]]()
    for model in _find_cuttable_models():
        methods[model, "forward"] = wrap_forward(model)
    for (owner, name), wrap in WRAPPED.items():
        methods[owner, name] = wrap(getattr(owner, name))
    for (owner, name), method in (methods | _list_helpers()).items():
        setattr(owner, name, method)
    _wrap_optional()
    installed = True


def _find_cuttable_models() -> list[Any]:
    """Return the text models whose symbols SGLang has; log what the others lack."""
    models = registry.list_cuttable_models()
    names = [adapter.SGLANG for adapter in registry.MODELS]
    reasons = list(filter(None, map(compat.names.find_missing, names)))
    if not models:
        raise compat.release.IncompatibleError(" ".join(map(str, reasons)))
    for reason in reasons:
        log.log_once(f"Gemma 4 fast prefill is off for one model: {reason}", logging.WARNING)
    return models


def wrap_forward(model: Any) -> Callable[..., Any]:
    """Return the forward of a text model's class, wrapped to cut prefills.

    Unnecessary once the model itself keeps only the rows that are read (#27183).

    Raises:
        compat.release.IncompatibleError: it is already wrapped.
    """
    if third_party.is_ours(model.forward):
        raise compat.release.IncompatibleError(f"{model.__name__}.forward is patched already")
    return forward.wrap_model_forward(model.forward)


def _list_helpers() -> dict[tuple[type, str], Callable[..., Any]]:
    """Return the helpers to add to Gemma 4, by class and name."""
    if compat.server.has_fast_prefill() or compat.names.find_missing(gemma4.SGLANG) is not None:
        return {}
    model: Any = compat.names.find_object(gemma4.SGLANG.text_model)
    for helper in published.HELPERS:
        if hasattr(model, helper.__name__):
            why = f"{model.__name__} already has {helper.__name__}: remove the patch that adds it"
            raise compat.release.IncompatibleError(why)
    return {(model, helper.__name__): helper for helper in published.HELPERS}


def _wrap_optional() -> None:
    for (path, name), wrap in OPTIONAL.items():
        owner = compat.names.find_object(path)
        if owner is not None and hasattr(owner, name):
            setattr(owner, name, wrap(getattr(owner, name)))
            continue
        missing = f"{path}.{name}"
        log.log_once(
            f"Gemma 4 fast prefill: SGLang {compat.release.INSTALLED} lacks {missing}, so "
            "/server_info, which status reads, or /metrics lacks its state; prefills are cut all "
            "the same. Install a supported SGLang, or a newer sglang-gemma4-yoco",
            logging.WARNING,
        )
