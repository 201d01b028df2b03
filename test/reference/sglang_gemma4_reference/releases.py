"""What differs between the SGLang releases that the CPU platform serves: 0.5.17 and later.

Each function names the first release that does it in the way that is tried first. No other
module of this distribution has such branches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from unittest import mock

from packaging.version import Version

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


def capabilities(*, supports_triton: bool, graph_capture: bool) -> Any:
    """The platform's ``capabilities``, or None where a platform declares none (up to 0.5.21)."""
    from sglang.srt.platforms import interface

    if not hasattr(interface, "PlatformCapabilities"):
        return None
    return interface.PlatformCapabilities(
        supports_triton=supports_triton, graph_capture=graph_capture
    )


def take_in_tree_paths(*, supports_triton: bool) -> None:
    """Make the choices that a platform without capabilities cannot make (up to 0.5.21)."""
    from sglang.srt.platforms import interface

    if hasattr(interface, "PlatformCapabilities"):
        return
    pools: Any = import_module("sglang.srt.mem_cache.kv_cache_configurator")
    # An out-of-tree platform gets one pool for all layers there, which has no window. Everything
    # that is built for any other platform without kernels of its own is plain PyTorch.
    pools.current_platform = interface.SRTPlatform()
    if not supports_triton:
        _replace_everywhere("sglang.srt.utils.common", "support_triton", lambda _: False)
    processors: Any = import_module("sglang.srt.multimodal.processors.base_processor")
    processors._is_cpu = True  # images: up to 0.5.20 whatever is no other device is a GPU
    update_config: Any = import_module("sglang.srt.configs.update_config")
    update_config.update_intermediate_size = _padding_what_there_is(
        update_config.update_intermediate_size
    )


def _padding_what_there_is(stock: Callable[[Any, str, int], Any]) -> Callable[[Any, str, int], Any]:
    """The CPU's padding of FFN widths, for a model that has no experts to pad."""

    def update_intermediate_size(model_config: Any, name: str, multiple: int) -> Any:
        config = model_config.hf_config
        config = getattr(config, "text_config", config)
        if getattr(config, name, multiple) is None:
            return model_config
        return stock(model_config, name, multiple)

    return update_intermediate_size


def _replace_everywhere(owner: str, name: str, replacement: Any) -> None:
    """Replace a function in its module and in all that have imported it by name."""
    original = getattr(import_module(owner), name)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)


def take_graphs(captures: Callable[[str], bool]) -> None:
    """Have SGLang's machinery of CUDA graphs run on a CPU, where it queries a platform (0.5.23).

    Args:
        captures: returns, when a server starts, whether SGLang captures its own steps of this kind:
            ``decode`` or ``prefill``.
    """
    import torch
    from sglang.srt.platforms import interface

    if not hasattr(interface.SRTPlatform, "get_full_graph_backend_cls"):
        if captures("decode") or captures("prefill"):
            raise RuntimeError("graphs are captured by SGLang 0.5.23 and later")
        return
    from sglang_gemma4_reference import graph_backend

    graph_backend.give_graphs_to_torch_cpu()
    # With a PyTorch for CUDA it queries CUDA for the stream of the current device.
    stream, replacement = "get_current_device_stream_fast", lambda: torch.cpu.current_stream()
    _replace_everywhere("sglang.srt.utils.common", stream, replacement)
    setup: Any = import_module("sglang.srt.model_executor.model_runner_components.cuda_graph_setup")
    stock, stock_prefill = setup.capture_decode_graph, setup.capture_prefill_graph
    compiled = as_if_compiled(stock)

    def capture_decode_graph(*, model_runner: Any) -> Any:
        return (compiled if captures("decode") else stock)(model_runner=model_runner)

    def capture_prefill_graph(**how: Any) -> Any:
        if captures("prefill"):
            from sglang_gemma4_reference import prefill_graphs

            prefill_graphs.install()
        return stock_prefill(**how)

    for function in (capture_decode_graph, capture_prefill_graph):
        _replace_everywhere(setup.__name__, function.__name__, function)


def records_prefills() -> bool:
    """Whether ``prefill_graphs`` supports this release: tried with 0.5.23."""
    return _is_at_least("0.5.23")


def _is_at_least(release: str) -> bool:
    return Version(version("sglang")) >= Version(release)


def take_host_cache() -> None:
    """Have SGLang's hierarchical cache run on a CPU: ``host_cache`` was tried with 0.5.23."""
    if _is_at_least("0.5.23"):
        from sglang_gemma4_reference import host_cache

        host_cache.install()


def as_if_compiled(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Have a CPU's decode steps captured, which SGLang does only where it compiles them."""
    from sglang.srt.runtime_context import get_flags

    def capture_decode_graph(*, model_runner: Any) -> Any:
        capture = get_flags().capture
        before, capture.enable_torch_compile = capture.enable_torch_compile, True
        try:
            return stock(model_runner=model_runner)
        finally:
            capture.enable_torch_compile = before

    return capture_decode_graph


def compile_no_decode_steps() -> None:
    """Have decode steps captured as they are (0.5.23 and later)."""
    from sglang.srt.runtime_context import get_flags

    get_flags().capture.enable_torch_compile = False


def record_decode_steps(runner: ModelRunner) -> None:
    """Have SGLang capture the runner's decode steps, as a server does when it starts."""
    import torch
    from sglang.srt.model_executor import model_runner

    capture = model_runner.capture_decode_graph
    if runner.device == "cpu":
        capture = as_if_compiled(capture)
    with torch.no_grad(), mock.patch.object(model_runner, "capture_decode_graph", capture):
        runner.init_decode_cuda_graph()


def load_model(args: ServerArgs, rank: int) -> ModelRunner:
    """A ``ModelRunner`` that is ready to run, made as SGLang's own benchmark of one batch does it.

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
    """Make these arguments the process's, as a server's processes do before they load a model."""
    from sglang.benchmark import one_batch

    _resolve(args)
    _publish(args, rank)
    if hasattr(one_batch, "_init_process_global_configs"):  # 0.5.22
        one_batch._init_process_global_configs()


def _forget_the_graphs_memory() -> None:
    """SGLang keeps one pool for the graphs of a process (0.5.23).

    It dies with the graphs of an engine that is gone, and PyTorch then refuses to capture into it.
    """
    runners: Any = import_module("sglang.srt.model_executor.runner")
    forget = getattr(runners, "set_global_graph_memory_pool", None)
    if forget is not None:
        forget(None)


def _resolve(args: ServerArgs) -> None:
    if hasattr(args, "resolve_once"):  # 0.5.20; before, the constructor does it
        args.resolve_once()


def _publish(args: ServerArgs, rank: int) -> None:
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "SpawnRanks"):  # 0.5.21
        ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank)
        runtime_context.publish(args, role="scheduler", ranks=ranks)
    else:
        runtime_context.publish(args, role="scheduler")


@contextmanager
def serving(args: ServerArgs) -> Iterator[None]:
    """The process as one of a server that was started with ``args``, for the span.

    SGLang itself resolves, checks and publishes them.
    """
    from sglang.srt import runtime_context

    _resolve(args)
    args.check_server_args()
    if hasattr(runtime_context, "use_context"):  # 0.5.22
        ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
        context = runtime_context.create_context(args, role="scheduler", ranks=ranks)
        with runtime_context.use_context(context):
            yield
        return
    previous = None
    with suppress(ValueError):  # none is published where no engine has been built yet
        previous = runtime_context.get_server_args()
    try:
        with _groups_set_aside(args):
            _publish(args, 0)
            yield
    finally:
        if previous is not None:
            _publish(previous, 0)


@contextmanager
def _groups_set_aside(args: ServerArgs) -> Iterator[None]:
    """Let a server of several ranks be published in a process that has groups of one rank.

    0.5.21 refuses that: it compares a server's sizes with the process's groups.
    """
    from sglang.srt import runtime_context

    if args.tp_size == 1 or not hasattr(runtime_context, "SpawnRanks"):
        yield
        return
    parallel = runtime_context.get_parallel()
    built, parallel._stamp = parallel._stamp, {}
    try:
        yield
    finally:
        parallel._stamp = built


def extend(req: Req, runner: ModelRunner, start: int, end: int) -> None:
    """Let the next prefill of ``req`` run its tokens [start, end); the ones before are cached."""
    if hasattr(req, "extend_end"):  # 0.5.22
        req.prefix_len, req.extend_end = start, end
        return
    if start:
        slots = runner.req_to_token_pool.req_to_token[row(req), :start]
        req.prefix_indices = slots.to(req.prefix_indices.dtype)
    req.set_extend_range(start, end)


def row(req: Req) -> int:
    """The request's row in the table of slots."""
    owner = req if hasattr(req, "req_pool_idx") else req.kv  # 0.5.18: on the latter
    index: int = owner.req_pool_idx
    return index


def forward_batch(batch: ScheduleBatch, runner: ModelRunner) -> ForwardBatch:
    """The batch as the model sees it."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)


def placeholders(item: Any, count: int) -> list[int]:
    """The token ids that stand for ``count`` rows of an image or sound in a prompt."""
    if hasattr(item, "padding_sequence"):  # 0.5.23
        ids: list[int] = item.padding_sequence(count)
        return ids
    return [item.pad_value] * count


def unknown_arguments(names: Iterable[str]) -> list[str]:
    """Those of these server arguments that this SGLang does not have."""
    from sglang.srt.server_args import ServerArgs

    known = getattr(ServerArgs, "__struct_fields__", None)  # 0.5.20; before, a dataclass
    return sorted(set(names) - set(known or ServerArgs.__dataclass_fields__))


@contextmanager
def published(**arguments: Any) -> Iterator[None]:
    """A process whose server was started with these arguments, for the span."""
    from sglang.srt import runtime_context

    with runtime_context.get_context().override_server_args(**arguments):
        yield


@contextmanager
def unpublished() -> Iterator[None]:
    """A process in which no server was started, for the span."""
    from sglang.srt import runtime_context

    context = runtime_context.get_context()
    previous, context._server_args = context._server_args, None
    try:
        yield
    finally:
        context._server_args = previous


def allocates_pages_without_triton() -> bool:
    """Whether slots can be allocated in pages where no Triton kernel runs (0.5.22)."""
    return _is_at_least("0.5.22")


def marks_intermediate() -> bool:
    """Whether a forward's batch has a mark that no request finishes its prompt (0.5.23)."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return "contains_last_prefill_chunk" in ForwardBatch.__dataclass_fields__
