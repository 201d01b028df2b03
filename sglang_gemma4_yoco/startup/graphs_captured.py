"""The moment when SGLang's runner captures its CUDA graphs: capture the tail after them."""

from contextlib import AbstractContextManager, nullcontext

from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.checking import tail_graphs
from sglang_gemma4_yoco.compat import ModelRunner, TextModel, server
from sglang_gemma4_yoco.core import kept_batch
from sglang_gemma4_yoco.core.state import find_state
from sglang_gemma4_yoco.prefill_exits import exit_setup
from sglang_gemma4_yoco.startup import checked


def prepare_capture(runner: ModelRunner, model: TextModel) -> AbstractContextManager[None]:
    """Free the tail's graphs, and return a context in which SGLang captures its own."""
    state = find_state(model)
    if not state:
        return nullcontext()
    # The tail's graphs keep SGLang's decode graphs alive. SGLang drops these before it captures
    # again: the device may not have room for both.
    server.wait_for_device(runner.device)
    lifecycle.drop_tail(state)
    return exit_setup.repair_capture(runner, state)


def set_up(runner: ModelRunner, model: TextModel) -> None:
    """Capture the tail; the first time, run the checks too."""
    state = find_state(model)
    if not state:
        return
    exit_setup.add_closed_exits(runner, state)
    if state.off_because:
        return
    # At a recapture the server is already serving. SGLang's scheduler captures between two batches
    # and may have launched the last one on another stream. Synchronize before anything is freed,
    # zeroed or used.
    server.wait_for_device(runner.device)
    lifecycle.capture_tail(runner, state, tail_graphs.check_graphs)
    if not state.serves:
        checked.check_before_serving(runner, state)
    state.serves = True
    if not state.off_because:
        kept_batch.pin_memory(runner.device)
