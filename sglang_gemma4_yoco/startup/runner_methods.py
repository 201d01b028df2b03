"""Wrapped methods of SGLang's runner: those in which it builds backends and captures graphs."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.compat.text_model import Method, TextModel
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.startup import backends_built, graphs_captured, prefills_captured
from sglang_gemma4_yoco.startup.guard import Wrap, guarded

_FAILED = "YOCO fast prefill: its setup failed"


def _set_up_around(
    *,
    after: Callable[[ModelRunner, TextModel], None],
    during: Callable[[ModelRunner, TextModel], AbstractContextManager[None]] = lambda *_: (
        nullcontext()
    ),
) -> Wrap:
    """Return a wrapper of a runner's method that sets up each text model of the runner.

    Args:
        after: called with the runner and the model when the method has returned.
        during: returns a context in which the method runs; it may only restore what it has changed,
            since it also ends if the method raises.
    """

    def wrap(stock: Method) -> Method:
        @functools.wraps(stock)
        def method(self: ModelRunner, *args: object, **kwargs: object) -> object:
            models: list[TextModel] = []
            with ExitStack() as contexts:
                with guarded(_FAILED, models):
                    models += registry.list_served_models(self)
                    for model in models:
                        contexts.enter_context(during(self, model))
                result = stock(self, *args, **kwargs)
            with guarded(_FAILED, models):
                for model in models:
                    after(self, model)
            return result

        return method

    return wrap


_SET_UP = _set_up_around(
    during=graphs_captured.prepare_capture,
    after=graphs_captured.set_up,
)
#: (class, attribute) -> its wrapper, with the reason and the change in SGLang that would make it
#: unnecessary.
WRAPPED: dict[tuple[type, str], Wrap] = {
    # Builds the tail's backend after the runner's, and observes each batch whose metadata exists.
    # Unnecessary once one backend can hold the metadata of two batches (docs/upstream.md,
    # change 3).
    (ModelRunner, "init_attention_backends"): _set_up_around(after=backends_built.start_model),
    # Captures the tail after SGLang's own graphs, and checks it before it serves; weight updates
    # and changes of role capture decode steps alone, by the second. Unnecessary once SGLang's
    # runner captures arbitrary functions of few rows, and has a plugin hook before serving.
    # Keeps prefill graphs that the setting has turned on only if their prefills are cut.
    # Unnecessary once SGLang captures prefills of these models by default.
    (ModelRunner, "init_cuda_graphs"): lambda stock: prefills_captured.keep_if_cut(_SET_UP(stock)),
    (ModelRunner, "init_decode_cuda_graph"): _SET_UP,
}
