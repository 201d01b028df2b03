"""The captured tail's lifecycle: capture at start and for new weights, drop after a failure."""

from collections.abc import Callable

import torch

from sglang_gemma4_yoco import compat, log, settings
from sglang_gemma4_yoco.captured import graphs
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.core.state import ModelState

NOT_YET = "it is not captured yet"
GRAPHS_OFF = f"{settings.name_of('graph_rows')}=0"
NO_GRAPHS = "SGLang has no full CUDA graphs for decode"
NO_GRAPHS_BY_ROLE = (
    f"{NO_GRAPHS}: in this role set --cuda-graph-backend-decode=full --cuda-graph-max-bs-decode=32"
)
NOT_DECODING = "it runs as an extend batch, since this release of SGLang was not tested"
QUANTISED = "the per-layer inputs are quantised"
SHARED = "disaggregation's transfers read and write K and V while the server runs"
LOADED_MEANWHILE = "another thread writes or reads K and V of layers while they run"
HOST_CACHE = f"enable_hierarchical_cache: {LOADED_MEANWHILE}"
# Arguments and (in capitals) environment variables with which a replay may differ -> the reason.
_UNSUPPORTED = {
    "enable_memory_saver": "GPU memory may be released and resumed",
    "enable_symm_mem": "collectives need memory of their own",
    "disable_cuda_graph_padding": "rows must not be padded",
    # It lends the memory while it replays none of its own graphs.
    "SGLANG_ENABLE_GRAPH_POOL_BORROW": "SGLang lends the memory of its graphs",
}


_Check = Callable[[graphs.TailGraphs, ModelRunner], str | None]


def find_known_reason() -> str | None:
    """Return why a server with these arguments and settings captures no tail, or None."""
    if settings.current.graph_rows == 0:
        return GRAPHS_OFF
    for name, reason in _UNSUPPORTED.items():
        if compat.server.read_argument(name) or compat.server.read_variable(name):
            return f"{name}: {reason}"
    if compat.server.get_cuda_graph_backend("decode") == "full":
        return None
    if compat.server.read_argument("disaggregation_mode") == "prefill":
        return NO_GRAPHS_BY_ROLE
    return NO_GRAPHS


def find_eager_reason(runner: ModelRunner, state: ModelState) -> str | None:
    """Return why the tail of this server is not captured, or None."""
    known = find_known_reason()
    if known:
        return known
    if compat.decode_graphs.get_captured_steps(runner) is None:
        return NO_GRAPHS
    backends = state.get_backends()
    if not backends.decodes:
        return NOT_DECODING
    has_inputs = getattr(state.model, "per_layer_model_projection", None) is not None
    if has_inputs and not state.splits_per_layer_inputs:
        return QUANTISED
    # SGLang's own cache registers its counter after the capture at start: one that is there by then
    # is a plugin's, and what it orders is not known.
    if compat.pools.waits_for_loads(backends.tail_backend.token_to_kv_pool):
        return LOADED_MEANWHILE
    # SGLang recaptures in its scheduler's thread, between two batches; paused requests keep their K
    # and V. The check of the graphs temporarily writes KV slots: nothing else uses the pools then,
    # except for work that the scheduler does not launch: disaggregation's transfers, and copies to
    # and from the host.
    if state.serves and compat.server.read_argument("disaggregation_mode") != "null":
        return SHARED
    if state.serves and compat.server.read_argument("enable_hierarchical_cache"):
        return HOST_CACHE
    return compat.decode_graphs.find_memory_reason(torch.device(runner.device))


def drop_tail(state: ModelState, reason: str = NOT_YET) -> None:
    """Free the captured tail, and run the tail eagerly from now on, for this reason."""
    captured, state.captured = state.captured, None
    state.report.tail_mode = f"eager ({reason})"
    if captured is not None:
        captured.close()


def capture_tail(runner: ModelRunner, state: ModelState, check_graphs: _Check) -> None:
    """Capture the tail and check its graphs, on all ranks or on none.

    Args:
        check_graphs: returns the reason why they must not be used, or None.

    Raises:
        Exception: the capture failed, and other ranks wait for this one.
    """
    try:
        drop_tail(state)
        reason = find_eager_reason(runner, state)
        reason = ranks.find_difference(f"captured: {reason}") or reason
        if reason is None:
            reason = _capture_and_check(runner, state, check_graphs)
    except BaseException as failure:
        drop_tail(state)
        if not isinstance(failure, Exception) or not compat.server.is_single_rank():
            raise
        log.log_failure("YOCO fast prefill: capturing the tail failed", failure)
        reason = f"capturing failed: {type(failure).__name__}"
    if reason is not None:
        drop_tail(state, reason)
        log.log_once(f"YOCO fast prefill: the tail runs eagerly: {reason}")


def _capture_and_check(runner: ModelRunner, state: ModelState, check_graphs: _Check) -> str | None:
    """Capture the tail, and return the reason why it is not used, or None."""
    state.captured = captured = graphs.TailGraphs(runner, state)
    captured.capture()
    reason = check_graphs(captured, runner)
    # All ranks replay the same graphs: otherwise they would add up different rows.
    reason = ranks.find_difference(f"replayed: {captured.sizes}, {reason}") or reason
    if reason is not None:
        return reason
    state.report.tail_mode = f"captured for up to {captured.sizes[-1]} rows"
    log.log_once(f"YOCO fast prefill: the tail is {state.report.tail_mode}")
    return None
