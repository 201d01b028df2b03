"""The moment when SGLang's runner captures its graphs: keep those of prefills only if they are cut.

This concerns prefill graphs that ``SGLANG_GEMMA4_YOCO_PREFILL_GRAPHS=1`` has turned on
(``arguments_resolved``). A server that is refused captures none, and neither does one whose capture
fails: it starts as if the setting were unset. Graphs that a flag names are the operator's.
"""

import functools
import traceback

from sglang_gemma4_yoco import compat, log, settings
from sglang_gemma4_yoco.metrics import NO_MODEL
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.prefill_exits import exit_setup
from sglang_gemma4_yoco.startup.arguments_resolved import say_without_effect
from sglang_gemma4_yoco.startup.guard import guarded

_FAILED = "YOCO fast prefill: keeping or dropping captured prefills failed"
NOT_CAPTURED = "SGLang's capture of CUDA graphs failed"


def keep_if_cut(stock: compat.Method) -> compat.Method:
    """Return ``ModelRunner.init_cuda_graphs``, which may be wrapped already, wrapped as above."""
    if not settings.current.prefill_graphs:
        return stock

    @functools.wraps(stock)
    def method(self: compat.ModelRunner, *args: object, **kwargs: object) -> object:
        with guarded(_FAILED):
            _drop_unless_cut(self)
        try:
            result = stock(self, *args, **kwargs)
        except Exception as failure:
            if not _are_on(self) or not compat.server.is_single_rank():
                raise
            log.log_failure("YOCO fast prefill: the capture of CUDA graphs failed", failure)
            # They keep what was captured alive. SGLang raises another exception for an error. No
            # loop follows the contexts, which may form a circle.
            for error in (failure, failure.__context__):
                if error:
                    traceback.clear_frames(error.__traceback__)
            # PyTorch rejects a pool whose graphs are gone.
            compat.captured_prefills.set_global_graph_memory_pool(None)
            _drop(self, NOT_CAPTURED)
            result = stock(self, *args, **kwargs)
        with guarded(_FAILED):
            _drop_unless_cut(self)
        return result

    return method


def _are_on(runner: compat.ModelRunner) -> bool:
    """Return True if prefill graphs of this runner are on because of the setting."""
    return (
        not getattr(runner, "is_draft_worker", False)
        and compat.resolution.turns_prefills_on()
        and bool(compat.server.get_cuda_graph_backend("prefill"))
    )


def _drop_unless_cut(runner: compat.ModelRunner) -> None:
    """Drop prefill graphs if no prefill is cut, before their capture or after it."""
    if not _are_on(runner):
        return
    reason: object | None = NO_MODEL
    for model in registry.list_served_models(runner):
        reason = exit_setup.find_uncut_reason(runner, model)
    if reason:
        _drop(runner, reason)


def _drop(runner: compat.ModelRunner, reason: object) -> None:
    compat.captured_prefills.drop(runner)
    say_without_effect(f"SGLang keeps no captured prefill: {reason}")
