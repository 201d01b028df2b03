"""The guard around every call from a wrapped method of SGLang, apart from a model's forward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sglang_gemma4_yoco import compat, log
from sglang_gemma4_yoco.compat.text_model import Method, TextModel
from sglang_gemma4_yoco.core import planning
from sglang_gemma4_yoco.core.state import ModelState, find_state
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.refusal import ServerRefusal

#: Wraps a method of SGLang.
Wrap = Callable[[Method], Method]

NOT_SET_UP = ServerRefusal("it could not be set up", is_logged=False)


@contextmanager
def guarded(failed: str, models: Sequence[TextModel] = ()) -> Iterator[None]:
    """If the block fails, log one line and let SGLang continue.

    With several ranks and ``models`` the failure is raised: the other ranks wait for this one.

    Args:
        failed: the line.
        models: the text models that are set up in the block; on failure they fall back to stock.
    """
    try:
        yield
    except Exception as failure:
        if models and not compat.server.is_single_rank():
            raise
        log.log_failure(failed, failure)
        for model in models:
            state = find_state(model)
            if not state:
                state = ModelState(model, registry.find_adapter(model), NOT_SET_UP)
                state.attach(planning.plan_batch)
            state.turn_off_after(type(failure).__name__, NOT_SET_UP)
