"""The CPU platform's calls of SGLang, and the differences between 0.5.22 and 0.5.23.

No other module of this distribution asks which release is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


def _replace_everywhere(owner: str, name: str, replacement: Any) -> None:
    """Replace a function in its module and in all that have imported it by name."""
    original = getattr(import_module(owner), name)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)


def enable_graphs(captures: Callable[[str], bool]) -> None:
    """Make SGLang's code for CUDA graphs run on a CPU.

    Args:
        captures: returns, when a server starts, whether SGLang captures its own steps of this kind:
            ``decode`` or ``prefill``.
    """
    import torch

    from sglang_gemma4_reference import graph_backend, recorder

    device: Any = torch.cpu  # SGLang's module of this device
    device.graph_pool_handle = graph_backend.Pool
    device.is_current_stream_capturing = recorder.is_recording
    # With a PyTorch for CUDA it queries CUDA for the stream of the current device.
    stream, replacement = "get_current_device_stream_fast", lambda: torch.cpu.current_stream()
    _replace_everywhere("sglang.srt.utils.common", stream, replacement)
    setup = import_module("sglang.srt.model_executor.model_runner_components.cuda_graph_setup")
    stock, stock_prefill = setup.capture_decode_graph, setup.capture_prefill_graph

    def capture_decode_graph(*, model_runner: Any) -> Any:
        with ExitStack() as span:
            # On a CPU SGLang asks for the compiler alone, and not for the backend as on a GPU.
            is_off = setup.check_cuda_graph_backend(setup.Phase.DECODE, setup.Backend.DISABLED)
            if captures("decode") and not is_off:
                span.enter_context(as_if_compiled())
            return stock(model_runner=model_runner)

    def capture_prefill_graph(**how: Any) -> Any:
        if captures("prefill"):
            from sglang_gemma4_reference import prefill_graphs

            prefill_graphs.install()
        return stock_prefill(**how)

    for function in (capture_decode_graph, capture_prefill_graph):
        _replace_everywhere(setup.__name__, function.__name__, function)


def records_prefills() -> bool:
    """Return True if ``prefill_graphs`` supports this release: tried with 0.5.23."""
    return _is_at_least("0.5.23")


def _is_at_least(release: str) -> bool:
    return Version(version("sglang")) >= Version(release)


def enable_host_cache() -> None:
    """Make SGLang's hierarchical cache run on a CPU; ``host_cache`` was tried with 0.5.23."""
    if _is_at_least("0.5.23"):
        from sglang_gemma4_reference import host_cache

        host_cache.install()


def as_if_compiled() -> AbstractContextManager[Any]:
    """Let SGLang capture a CPU's decode steps in the ``with`` block.

    It does so only where it compiles them.
    """
    from sglang.srt.runtime_context import get_flags

    flag: AbstractContextManager[Any] = get_flags().capture.override(enable_torch_compile=True)
    return flag


def record_decode_steps(runner: ModelRunner) -> None:
    """Capture the runner's decode steps, as a server does when it starts."""
    import torch

    with ExitStack() as span:
        span.enter_context(torch.no_grad())
        if runner.device == "cpu":
            span.enter_context(as_if_compiled())
        runner.init_decode_cuda_graph()


def load_model(args: ServerArgs, rank: int) -> ModelRunner:
    """Return a ``ModelRunner`` that is ready to run, made as in SGLang's benchmark of one batch.

    The process-wide configuration and process groups are those of this runner afterwards.
    """
    from sglang.benchmark import one_batch
    from sglang.srt.distributed import parallel_state
    from sglang.srt.server_args import PortArgs

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    _forget_the_graphs_memory()
    configure_process(args, rank)
    loaded, _ = one_batch.load_model(args, PortArgs.init_new(args), gpu_id=rank, tp_rank=rank)
    return loaded.torch_runner


def configure_process(args: ServerArgs, rank: int = 0) -> None:
    """Publish these arguments in this process, as a server does before it loads a model."""
    from sglang.benchmark import one_batch
    from sglang.srt import runtime_context

    args.resolve_once()
    ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()


def _forget_the_graphs_memory() -> None:
    """Drop the pool that SGLang keeps for all graphs of a process.

    It is freed with the graphs of an earlier engine; PyTorch then refuses to capture into it.
    """
    from sglang.srt.model_executor import runner

    runner.set_global_graph_memory_pool(None)


@contextmanager
def serving(args: ServerArgs) -> Iterator[None]:
    """Make the process one of a server that was started with ``args``, in the ``with`` block.

    SGLang itself resolves, checks and publishes them.
    """
    from sglang.srt import runtime_context

    args.resolve_once()
    args.check_server_args()
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    context = runtime_context.create_context(args, role="scheduler", ranks=ranks)
    with runtime_context.use_context(context):
        yield


def forward_batch(batch: ScheduleBatch, runner: ModelRunner) -> ForwardBatch:
    """Return the batch as the model sees it."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)


def placeholders(item: Any, count: int) -> list[int]:
    """Return the token ids that stand for ``count`` rows of an image or sound in a prompt."""
    if hasattr(item, "padding_sequence"):  # 0.5.23
        ids: list[int] = item.padding_sequence(count)
        return ids
    return [item.pad_value] * count


def unknown_arguments(names: Iterable[str]) -> list[str]:
    """Return those of these server arguments that this SGLang does not have."""
    from sglang.srt.server_args import ServerArgs

    return sorted(set(names) - set(ServerArgs.__struct_fields__))


@contextmanager
def published(**arguments: Any) -> Iterator[None]:
    """Publish these server arguments in the ``with`` block."""
    from sglang.srt import runtime_context

    with runtime_context.get_context().override_server_args(**arguments):
        yield


@contextmanager
def unpublished() -> Iterator[None]:
    """Remove the published server arguments in the ``with`` block, as if no server was started."""
    from sglang.srt import runtime_context

    context = runtime_context.get_context()
    previous, context._server_args = context._server_args, None
    try:
        yield
    finally:
        context._server_args = previous


def marks_intermediate() -> bool:
    """Return True if SGLang marks batches in which no request finishes its prompt (0.5.23)."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return "contains_last_prefill_chunk" in ForwardBatch.__dataclass_fields__
