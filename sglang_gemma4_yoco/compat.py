"""Everything that depends on the installed SGLang, and the check that it is there.

Supported is SGLang 0.5.17 and later; ``plugin`` checks that before it imports this module. Where
these releases differ, the difference is handled here.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from importlib.metadata import version
from types import ModuleType
from typing import Any

import msgspec
import torch
from packaging.version import Version
from sglang.srt.debug_utils.dumper import DumperConfig
from sglang.srt.debug_utils.dumper import dumper as dumper
from sglang.srt.environ import EnvField, envs
from sglang.srt.kv_canary.runner.canary_manager import CanaryManager as CanaryManager
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.linear import LinearBase as LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.managers.scheduler import Scheduler as Scheduler
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor import forward_batch_info, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner as ModelRunner
from sglang.srt.model_executor.runner.eager_runner import EagerRunner
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    is_in_tc_piecewise_cuda_graph,
)
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.models import gemma4_causal as gemma4_causal
from sglang.srt.observability import metrics_collector
from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.srt.server_args import ServerArgs

try:
    # 0.5.20 and later: the record keeps arguments as given, the resolved ones are kept apart.
    from sglang.srt.arg_groups.overrides import resolution_result
except ImportError:
    resolution_result = None

CaptureHiddenMode = forward_batch_info.CaptureHiddenMode
ForwardBatch, ForwardMode = forward_batch_info.ForwardBatch, forward_batch_info.ForwardMode
SchedulerMetricsCollector = metrics_collector.SchedulerMetricsCollector

# From 0.5.22 on Gemma 4's layers pass a residual stream on in the batch. In 0.5.21 only other
# models' layers do.
residual_batch: Any = getattr(gemma4_causal, "residual_batch", None)
HAS_RESIDUAL_STREAM = residual_batch is not None
LAST_TESTED = Version("0.5.23")
_WINDOW_PLANNER = "update_sliding_window_buffer"  # a function of Triton's backend
#: Set, Gemma 4 adds 1 to a copy of the positions; captured prefills read the original.
POSITIONS_VARIABLE = "SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION"
BARRIER_VARIABLE = "SGLANG_FORCE_COARSE_WAR_BARRIER"
#: The tail's attention backend, by its name in SGLang's registry.
TAIL_BACKEND = "triton"
PUBLISHED_HELPERS = ("_yoco_eligibility", "_yoco_truncate_to_last_tokens")


# Names that are used, by their owner. Of a batch: what the tail rewrites, or the gate must see.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "ForwardBatch": (
        "batch_size",
        "capture_hidden_mode",
        "extend_logprob_start_lens_cpu",
        "extend_num_tokens",
        "extend_prefix_lens",
        "extend_prefix_lens_cpu",
        "extend_seq_lens",
        "extend_seq_lens_cpu",
        "extend_start_loc",
        "forward_mode",
        "full_prefill_cuda_graph_capture",
        "input_embeds",
        "input_ids",
        "kv_loc_cols",
        "lora_ids",
        "mm_input_embeds",
        "mm_inputs",
        "multi_item_delimiter_indices",
        "out_cache_loc",
        "positions",
        "replace_embeds",
        "req_pool_indices",
        "residual_stream",
        "return_hidden_states_before_norm",
        "return_logprob",
        "seq_lens",
        "seq_lens_sum",
        "spec_algorithm",
        "spec_info",
        "token_indices_to_pool",
    ),
    "ForwardMode": (
        "DECODE",
        "EXTEND",
        "MIXED",
    ),
    "CanaryManager": ("model_forward_bracket_scope",),
    "DumperConfig": ("from_env",),
    "EnvField": (
        "get",
        "is_set",
    ),
    "ModelRunner": (
        "init_attention_backends",
        "init_cuda_graphs",
        "init_decode_cuda_graph",
        "init_prefill_cuda_graph",
    ),
    "dumper": ("may_enable",),
    "forward_context": (
        "forward_context",
        "get_forward_context",
        "has_forward_context",
    ),
    "residual_batch": (
        "set_written",
        "start",
    ),
}
# The first release that has one of these, if it is not in all that are supported.
_SINCE = {
    "ForwardBatch.full_prefill_cuda_graph_capture": Version("0.5.22"),
    "ForwardBatch.kv_loc_cols": Version("0.5.22"),
    "ForwardBatch.residual_stream": Version("0.5.22"),
    "ForwardBatch.token_indices_to_pool": Version("0.5.21"),
    "residual_batch.set_written": Version("0.5.22"),
    "residual_batch.start": Version("0.5.22"),
}


class IncompatibleError(RuntimeError):
    """The installed SGLang is not one that this package can patch."""


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _missing() -> Iterator[str]:
    """Name everything that this package needs and the installed SGLang lacks."""
    model = gemma4_causal.Gemma4TextModel
    for name in PUBLISHED_HELPERS:
        if hasattr(model, name):
            yield f"a Gemma4TextModel without a {name} of its own (is it patched already?)"
    layer = gemma4_causal.Gemma4DecoderLayer
    for owner, name, wanted in (
        (model, "forward", "self, input_ids, positions, forward_batch, input_embeds, ..."),
        (layer, "forward", "self, positions, hidden_states, per_layer_input, forward_batch, ..."),
        (AttentionBackend, "init_forward_metadata", "self, forward_batch"),
    ):
        parameters = _parameters(getattr(owner, name))
        if wanted.endswith("..."):
            parameters[wanted.count(",") :] = ["..."]
        if ", ".join(parameters) != wanted:
            yield f"{owner.__name__}.{name}({wanted})"
    if "end_layer" not in inspect.unwrap(model.forward).__code__.co_names:
        yield "Gemma4TextModel.forward's loop up to self.end_layer"
    installed = Version(version("sglang"))
    for part, names in _NAMES.items():
        owner = globals()[part]
        present = {*dir(owner), *getattr(owner, "__dataclass_fields__", ())}
        for name in names:
            missing = f"{part}.{name}"
            if name not in present and installed >= _SINCE.get(missing, installed):
                yield missing


def check() -> None:
    """Raise IncompatibleError, with what is missing and the remedy, unless all is there."""
    missing = list(_missing())
    if missing:
        raise IncompatibleError(
            f"SGLang {version('sglang')} lacks {'; '.join(missing)}. "
            "Install a supported SGLang, or a newer sglang-gemma4-yoco"
        )


_INSTALLED = Version(version("sglang"))  # it is read from a file, and needed with every batch


def is_newer_than_tested() -> bool:
    """Whether the installed SGLang came out after the last release that was tested."""
    return _INSTALLED > LAST_TESTED


def server_arguments() -> Callable[[str], Any] | None:
    """Look-up of the running server's resolved arguments; None outside of a server.

    An argument that this SGLang does not have is None.
    """
    args = _published()
    if args is None:
        return None
    read = resolution_result or getattr

    def argument(name: str) -> Any:
        if hasattr(args, name):
            return read(args, name)
        return None

    return argument


def arguments_set() -> dict[str, bool]:
    """Every argument of the installed SGLang, and whether the running server was given it.

    Raises:
        IncompatibleError: they cannot be listed.
    """
    if not issubclass(ServerArgs, msgspec.Struct):  # 0.5.21 and later; only newer ones matter
        raise IncompatibleError("the server's arguments are no record whose fields can be listed")
    args, given = _published(), {}
    for field in msgspec.structs.fields(ServerArgs):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        given[field.name] = getattr(args, field.name, default) != default
    return given


def variables_set() -> dict[str, bool]:
    """Every environment variable of SGLang and of its dumper, and whether it is set here.

    One that is set to its default is not: SGLang sets some itself.
    """
    given = {}
    for name, field in vars(type(envs)).items():
        if isinstance(field, EnvField):
            given[name] = field.is_set() and field.get() != field.default
    config = DumperConfig.from_env()
    for option in dataclasses.fields(DumperConfig):
        given[f"DUMPER_{option.name.upper()}"] = getattr(config, option.name) != option.default
    return given


def variable(name: str) -> Any | None:
    """The value of an environment variable of SGLang's; None if this SGLang does not have it."""
    if not hasattr(envs, name):
        return None
    return getattr(envs, name).get()


def _published() -> Any | None:
    try:
        return get_server_args()
    except (AttributeError, ValueError, RuntimeError):  # nothing published yet
        return None


def is_single_rank() -> bool:
    """Whether no other rank computes its part of the same forward."""
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def tensor_parallel_group() -> Any | None:
    """SGLang's coordinator of the ranks that share this rank's layers; None for a rank alone."""
    argument = server_arguments()
    if argument is None or (argument("tp_size") or 1) == 1:
        return None
    return get_parallel().tp_group


def cuda_graph_backend(of: str) -> str | None:
    """The CUDA graph backend with which this server replays "prefill" or "decode", or None."""
    argument = server_arguments()
    if argument is None:
        return None
    of_phase = getattr(argument("cuda_graph_config"), of, None)
    name: str | None = getattr(of_phase, "backend", None)
    if name == "disabled":
        return None
    return name


def captured_prefills(runner: Any) -> Any | None:
    """What replays captured prefills of ``runner``. SGLang may leave out what the flags ask for."""
    captured = getattr(runner, "prefill_cuda_graph_runner", None)
    if isinstance(captured, EagerRunner):
        return None
    return captured


def wait_for_device(device: str) -> None:
    """Wait until all has run that was launched on it, on whichever stream; a CPU has no such."""
    torch.get_device_module(device).synchronize()


def is_capturing() -> bool:
    """Whether this forward is being captured into a CUDA graph, or is replayed around one.

    A captured forward runs its Python once, for a padded batch. What was decided for that batch
    would be replayed for all others.
    """
    return bool(capture_mode.get_is_capture_mode() or is_in_tc_piecewise_cuda_graph())


def current_attn_backend() -> Any | None:
    """The attention backend that this forward uses, or None outside of a forward."""
    if not forward_context.has_forward_context():
        return None
    return forward_context.get_forward_context().attn_backend


def attn_backend_switched(backend: Any) -> AbstractContextManager[None]:
    """In the span ``backend`` is the current one."""
    if forward_context.has_forward_context():
        before = forward_context.get_forward_context()
        current = dataclasses.replace(before, attn_backend=backend)
    else:
        current = forward_context.ForwardContext(attn_backend=backend)
    switched: AbstractContextManager[None] = forward_context.forward_context(current)
    return switched


def frees_tables_early(backend: Any) -> bool:
    """Whether SGLang's scheduler may rewrite its tables once ``backend`` has planned a prefill.

    Backends declare it, in 0.5.17 none; the scheduler waits for the whole forward of the others.
    """
    ends = getattr(backend, "shared_read_ends", None)
    early = ends is not None and ends(ForwardMode.EXTEND).name == "PRE_REPLAY"
    return early and not variable(BARRIER_VARIABLE)


def build_attn_backend(runner: Any) -> Any:
    """A second attention backend over the runner's memory pools: what is registered as Triton's."""
    backend = ATTENTION_BACKENDS[TAIL_BACKEND](runner)
    for name in ("prefill_attention_backend_str", "decode_attention_backend_str"):
        if name in vars(runner.attn_backend):
            setattr(backend, name, "triton")
    return backend


@cache
def _triton_class(kind: type) -> type | None:
    return next((base for base in kind.__mro__ if base.__name__ == "TritonAttnBackend"), None)


def _counts_the_window_short(backend: Any) -> bool:
    """Whether a decode step of ``backend`` sees one key fewer in its window than an extend row.

    Triton's planner takes min(length, W - 1) keys for a window of W. In extend these are the cached
    keys before the row, which itself is the W-th; in decode the row's own key is among them. With
    W = 3, the row at position 5 sees keys 3, 4, 5 in extend and 4, 5 in decode.
    """
    windowed = (getattr(backend, "sliding_window_size", None) or 0) > 0
    return windowed and _triton_class(backend.__class__) is not None


def decodes_like_extend(backend: Any) -> bool:
    """Whether ``plan`` makes a decode step of ``backend`` see what an extend row sees.

    In a release newer than the last one that was tested the planner may count differently.
    """
    return not _counts_the_window_short(backend) or not is_newer_than_tested()


def plan(backend: Any, forward_batch: Any) -> None:
    """Build ``backend``'s attention metadata for the tail's batch, over the whole window.

    From 0.5.22 on this reads nothing from the device. Before, Triton's planner reads two sizes.
    """
    with ExitStack() as span:
        if forward_batch.forward_mode is ForwardMode.DECODE:
            span.enter_context(whole_window(backend))
        planner = _window_planner(backend.__class__)
        if planner is not None and _counts_the_window_short(backend):
            span.enter_context(_allocated_windows(backend, planner, forward_batch.batch_size))
        backend.init_forward_metadata(forward_batch)


@contextmanager
def whole_window(backend: Any) -> Iterator[None]:
    """Let a decode step that is planned in the span see in its window what an extend row sees."""
    if not _counts_the_window_short(backend):
        yield
        return
    window = backend.sliding_window_size
    backend.sliding_window_size = window + 1
    try:
        yield
    finally:
        backend.sliding_window_size = window


@cache
def _window_planner(kind: type) -> ModuleType | None:
    """The module whose function plans windows, if it writes into a buffer that it is given."""
    triton = _triton_class(kind)
    if triton is None:
        return None
    module = sys.modules[triton.__module__]
    function = getattr(module, _WINDOW_PLANNER, None)
    if function is None or "window_kv_indices" not in _parameters(function):
        return None
    return module


@contextmanager
def _allocated_windows(backend: Any, planner: ModuleType, requests: int) -> Iterator[None]:
    """Have the windows' keys written into a buffer that is large enough for any.

    Without one, the planner reads from the device how many keys there are, to allocate as much.
    It writes request after request and notes where each begins, so the rest is not read. SGLang
    itself gives it a buffer in this way when it captures a CUDA graph.
    """
    stock = getattr(planner, _WINDOW_PLANNER)
    room = requests * backend.sliding_window_size
    buffer = torch.empty(room, dtype=torch.int64, device=backend.device)
    setattr(planner, _WINDOW_PLANNER, partial(stock, window_kv_indices=buffer))
    try:
        yield
    finally:
        setattr(planner, _WINDOW_PLANNER, stock)


def decode_batch(**fields: Any) -> Any:
    """A decode step whose layers write no K and V; its residual is not started."""
    size = fields["req_pool_indices"].shape[0]
    fields |= {"batch_size": size, "seq_lens_sum": size, "out_cache_loc": None}
    return ForwardBatch(forward_mode=ForwardMode.DECODE, **fields)


def keys_in_window(attention: Any) -> int:
    """How many keys a row of this ``RadixAttention`` sees, its own among them; 0 if it sees all."""
    size: int | None = getattr(attention, "sliding_window_size", None)
    if size is None or size < 0:
        return 0
    return size + 1


def is_in_window_pool(pool: Any, layer: int) -> bool:
    """Whether K and V of this layer, by its number in the model, are in the window's pool."""
    return bool(getattr(pool, "layers_mapping", {}).get(layer, (0, False))[1])


def write_keys_and_values(
    main: Any, tail: Any, attention: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write K and V of all rows of a batch to a layer's pool.

    Args:
        main: the front's attention backend, with its plan of this batch.
        tail: the tail's, over the same pools.
        attention: the layer's ``RadixAttention``.
        k, v: [T, kv_heads, head_dim].
    """
    pool, slots = tail.token_to_kv_pool, forward_batch.out_cache_loc
    # Waits until a cache has loaded K and V of the prefix. Stock waits for it in the donor's
    # attention, which an intermediate chunk does not run; the next batch does not wait again.
    pool.get_kv_buffer(attention.layer_id)
    window_slots = None
    if is_in_window_pool(pool, attention.layer_id):
        if _triton_class(main.__class__) is not None:
            window_slots = getattr(main.forward_metadata, "swa_out_cache_loc", None)
        if window_slots is None:
            window_slots = pool.translate_loc_from_full_to_swa(slots)
    if hasattr(KVWriteLoc, "for_batch"):  # 0.5.22 and later: whose ids they are goes with them
        target = KVWriteLoc.for_batch(forward_batch, swa_loc=window_slots)
    else:
        target = KVWriteLoc(slots, window_slots)
    pool.set_kv_buffer(attention, target, k, v)


def cache_of(
    backend: Any, layer: int, slots: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """K and V of a layer, by its number in the model, and where ``slots`` of the full pool are."""
    pool = backend.token_to_kv_pool
    if is_in_window_pool(pool, layer):
        slots = pool.translate_loc_from_full_to_swa(slots)
    return pool.get_kv_buffer(layer), slots


def residual_is_written(forward_batch: Any, hidden_states: torch.Tensor) -> bool:
    """Whether ``hidden_states`` is the whole residual: no update is pending."""
    stream = getattr(forward_batch, "residual_stream", None)
    if stream is None:
        return True  # up to 0.5.21, and stand-ins: layers pass plain tensors
    if stream.pending is not None:
        return False
    return stream.residual is None or stream.residual is hidden_states


def start_residual(forward_batch: Any, hidden_states: torch.Tensor) -> None:
    """Begin the batch's residual stream with ``hidden_states``, where it has streams."""
    if HAS_RESIDUAL_STREAM:
        residual_batch.start(forward_batch)
        residual_batch.set_written(hidden_states, forward_batch)


def write_residual(forward_batch: Any, hidden_states: torch.Tensor) -> None:
    """Put ``hidden_states`` into the batch's residual stream, if it has one."""
    if getattr(forward_batch, "residual_stream", None) is not None:
        residual_batch.set_written(hidden_states, forward_batch)


def end_residual(forward_batch: Any) -> None:
    """Free the residual's memory."""
    if HAS_RESIDUAL_STREAM:
        forward_batch.residual_stream = None


def layer_rows(output: Any) -> torch.Tensor:
    """The hidden states in what a decoder layer returns."""
    if isinstance(output, tuple):
        output = output[0]
    rows: torch.Tensor = output
    return rows


def is_plain_tensor(weight: torch.Tensor) -> bool:
    """Whether these weights are plain, not of a class of their own as torchao's quantised ones.

    ``isinstance(weight, torch.nn.Parameter)`` is true of those, too; their class is not derived.
    """
    kind = type(weight)
    return kind is torch.Tensor or issubclass(kind, torch.nn.Parameter)


def is_plain_linear(projection: Any) -> bool:
    """Whether a linear layer is ``x @ weight.T``, so that its outputs can be sliced."""
    weight = getattr(projection, "weight", None)
    return (
        type(getattr(projection, "quant_method", None)) is UnquantizedLinearMethod
        and isinstance(weight, torch.Tensor)
        and is_plain_tensor(weight)
        and weight.dim() == 2
        and weight.dtype.is_floating_point
        and weight.dtype.itemsize >= 2
        and not getattr(projection, "use_intel_amx_backend", False)  # packed for the CPU
        and projection.bias is None
    )
