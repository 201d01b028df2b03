"""The running server: its arguments and environment variables, its ranks, its device."""

from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.debug_utils.dumper import dumper as dumper
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler import Scheduler as Scheduler
from sglang.srt.model_executor.model_runner import ModelRunner as ModelRunner
from sglang.srt.model_executor.runner.eager_runner import EagerRunner
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import (
    PrefillCudaGraphRunner as PrefillCudaGraphRunner,
)
from sglang.srt.observability.metrics_collector import (
    SchedulerMetricsCollector as SchedulerMetricsCollector,
)
from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.srt.server_args import ServerArgs

#: If set, Gemma 4 adds 1 to a copy of the positions; captured prefills read the original.
POSITIONS_VARIABLE = "SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION"
BARRIER_VARIABLE = "SGLANG_FORCE_COARSE_WAR_BARRIER"
#: The argument that turns SGLang's own fast prefill on, if present (its change #27183).
FAST_PREFILL = "kv_sharing_fast_prefill"


def read_argument(name: str) -> Any | None:
    """Return a resolved argument of the running server.

    None outside of a server, or if this SGLang lacks the argument.
    """
    args = find_server_args()
    if not hasattr(args, name):
        return None
    # SGLang stores the arguments as given, and their resolved values separately.
    return resolution_result(args, name)


def has_name(name: str) -> bool:
    """Return True if this SGLang has a server argument or (in capitals) variable of this name."""
    if name.isupper():
        return hasattr(envs, name)
    return hasattr(ServerArgs, name)


def read_variable(name: str) -> Any | None:
    """Return the value of an SGLang environment variable; None if this SGLang lacks it."""
    if not hasattr(envs, name):
        return None
    return getattr(envs, name).get()


def find_server_args() -> ServerArgs | None:
    """Return the server arguments as SGLang published them, or None."""
    try:
        return get_server_args()
    except (AttributeError, ValueError, RuntimeError):  # nothing published yet
        return None


def is_single_rank() -> bool:
    """Return True if no other rank takes part in the forward."""
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def get_tensor_parallel_group() -> GroupCoordinator:
    """Return SGLang's tensor-parallel group coordinator."""
    group: GroupCoordinator = get_parallel().tp_group
    return group


def get_cuda_graph_backend(phase: str) -> str | None:
    """Return this server's CUDA graph backend for a phase, "prefill" or "decode", or None."""
    config = getattr(read_argument("cuda_graph_config"), phase, None)
    name: str | None = getattr(config, "backend", None)
    if name == "disabled":
        return None
    return name


def get_captured_prefills(runner: ModelRunner) -> PrefillCudaGraphRunner | None:
    """Return SGLang's prefill graph runner, or None: SGLang may ignore the flags."""
    prefills: PrefillCudaGraphRunner | None = getattr(runner, "prefill_cuda_graph_runner", None)
    if isinstance(prefills, EagerRunner):
        return None
    return prefills


def wait_for_device(device: str) -> None:
    """Synchronize all streams of the device; no-op on a CPU."""
    torch.get_device_module(device).synchronize()
