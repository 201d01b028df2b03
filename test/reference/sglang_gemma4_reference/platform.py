"""An out-of-tree SGLang platform that serves Gemma 4 on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_gemma4_reference import releases, roles

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner


CAPTURED = "GEMMA4_CPU_GRAPHS"

# Names that Gemma 4 accepts. For the first one SGLang requires pages of 64 or 128 tokens.
FRONT_NAMES = ("intel_xpu", "fa4")


def triton_is_interpreted() -> bool:
    """Return True if Triton kernels run in Triton's interpreter, which accepts CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def captures(kind: str) -> bool:
    """Return True if SGLang captures ``decode`` steps, or can capture a ``prefill``.

    Raises:
        ValueError: ``GEMMA4_CPU_GRAPHS`` has another value.
    """
    value = os.environ.get(CAPTURED, "")
    found = set(filter(None, value.split(",")))
    if not found <= {"decode", "prefill"}:
        raise ValueError(f"{CAPTURED}={value!r}: only 'decode' and 'prefill' are known")
    return kind in found


class Gemma4CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """The CPU as an out-of-tree device: every fused operation takes its PyTorch path.

    The attention backend named ``triton`` is ``WindowedTorchNativeBackend``, unless
    ``TRITON_INTERPRET=1`` selects the real one in Triton's interpreter.
    Under the names ``FRONT_NAMES`` there is ``FrontBackend``, always.

    Graphs are captured and replayed by ``graph_backend``; with ``GEMMA4_CPU_GRAPHS=decode`` SGLang
    does so with its own decode steps. With ``decode,prefill`` it also does so with prefills if
    its arguments resolve to the backend ``breakable``, which is the default then, as on CUDA:
    ``prefill_graphs``.
    """

    _enum = PlatformEnum.OOT
    device_name = "gemma4_cpu"

    def __init__(self) -> None:
        from sglang.srt.model_executor import cuda_graph_config

        super().__init__()
        stock = cuda_graph_config.default_prefill_backend
        cuda_graph_config.default_prefill_backend = lambda: (
            "breakable" if captures("prefill") else stock()
        )

    @property
    def capabilities(self) -> Any:
        """Capabilities, read at each call: a process may be forked with another environment."""
        return PlatformCapabilities(
            supports_triton=triton_is_interpreted(), graph_capture=captures("decode")
        )

    def get_default_attention_backend(self) -> str:
        return "triton"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set defaults for a CPU and a reference.

        ``sleep_on_idle``, and an attention backend not in ``FRONT_NAMES``, are always replaced.
        """
        # SGLang has put its own default for a CPU here by now, which Gemma 4 does not accept.
        if server_args.attention_backend not in FRONT_NAMES:
            server_args.attention_backend = "triton"
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        # SGLang would take most of the host's memory, and write to all of it before serving.
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = 65536
        if server_args.max_running_requests is None:
            server_args.max_running_requests = 32
        # An idle scheduler would keep one of the few cores busy.
        server_args.sleep_on_idle = True
        # The same for threads that wait for one another, in the processes started from here:
        # while other programs compete for the cores, spinning makes decoding four times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        roles.choose(server_args)
        _deal_out_cores(server_args.dp_size * server_args.tp_size * server_args.pp_size)

    def get_full_graph_backend_cls(self) -> type[Any]:
        from sglang_gemma4_reference import graph_backend

        return graph_backend.RecordedGraphBackend

    def get_graph_runner_cls(self) -> Callable[[Any], Any]:
        from sglang_gemma4_reference import graph_backend

        return graph_backend.runner_of_decode_steps

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        from sglang_gemma4_reference import speculation

        return speculation.draft_slots

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:  # noqa: ARG002 - SGLang's
        """Return None, which keeps SGLang's worker; install the CPU's functions for it first."""
        from sglang_gemma4_reference import speculation

        speculation.install()
        return None

    def init_backend(self) -> None:
        """Install the PyTorch implementations for which SGLang has no platform hook.

        SGLang calls this once, at the end of the imports of ``model_runner``.
        """
        from sglang.srt.layers import logits_processor
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.model_executor import model_runner

        releases.enable_graphs(captures)
        # On a CPU heads that tensor parallelism cannot split evenly are padded, for kernels
        # that this platform does not have; on a GPU each rank gets a copy of its K/V head.
        model_runner.adjust_config_with_unaligned_cpu_tp = lambda config, *_: config
        releases.enable_host_cache()
        if roles.are_wanted():
            roles.install()
        logits_processor._is_cpu = True  # else the softcap is a kernel of Triton's
        # Gemma 4 accepts a fixed list of backend names, and torch_native is not on it.
        if not triton_is_interpreted():
            ATTENTION_BACKENDS["triton"] = partial(_backend, "WindowedTorchNativeBackend")
        for name in FRONT_NAMES:
            ATTENTION_BACKENDS[name] = partial(_backend, "FrontBackend")


def _deal_out_cores(processes: int) -> None:
    """Assign each model process its own cores, or one core that it shares."""
    if processes == 1:
        return
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[i::processes] or [cores[i % len(cores)]] for i in range(processes)]
    listed = "|".join(",".join(map(str, share)) for share in shares)
    # Without it SGLang needs a NUMA node for each of them.
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", listed)


def _backend(kind: str, runner: ModelRunner) -> AttentionBackend:
    """Return a new backend of this class."""
    from sglang_gemma4_reference import attention

    attention.register_as_proven()
    return getattr(attention, kind)(runner)
