"""SGLang's resolution of the server arguments, in the process that launches the server."""

from contextlib import AbstractContextManager

from sglang.srt.arg_groups.overrides import declare_resolution, resolution_result
from sglang.srt.arg_groups.overrides import model_config_of as model_config_of
from sglang.srt.arg_groups.resolution_hooks import (
    register_resolution_hook as register_resolution_hook,
)
from sglang.srt.configs.model_config import ModelConfig as ModelConfig
from sglang.srt.model_executor import cuda_graph_config as cuda_graph_config
from sglang.srt.server_args import ServerArgs as ServerArgs

from sglang_gemma4_yoco.compat import server
from sglang_gemma4_yoco.compat.captured_prefills import BREAKABLE
from sglang_gemma4_yoco.patched import patched

# The source of this package's declarations, which SGLang keeps with the arguments, also in the
# processes that it starts.
_SOURCE = "sglang_gemma4_yoco"


def reading(args: ServerArgs) -> AbstractContextManager[None]:
    """Let ``server.read_argument`` read these arguments in the ``with`` block."""
    return patched(server, find_server_args=lambda: args)


def as_on_cuda() -> AbstractContextManager[None]:
    """Let SGLang choose the backend of captured prefills as on CUDA in the ``with`` block."""
    return patched(cuda_graph_config, default_prefill_backend=lambda: BREAKABLE)


def admit_multimodal(config: ModelConfig) -> AbstractContextManager[None]:
    """Let SGLang capture prefills of this multimodal model by default in the ``with`` block.

    Unnecessary once SGLang itself can capture prefills of this model.
    """
    return patched(config, is_multimodal_breakable_cuda_graph_supported=True)


def declare_graphs(args: ServerArgs, graphs: object) -> None:
    """Note with the arguments that the hook turns prefills on, with this configuration."""
    declare_resolution(args, _SOURCE, cuda_graph_config=graphs)


def turns_prefills_on(args: ServerArgs | None = None) -> bool:
    """Return True if captured prefills are on, if they are, because of the hook and of no flag.

    Args:
        args: the arguments; those of this server by default.
    """
    args = args or server.find_server_args()
    declared = dict(getattr(args, "_resolved_overrides", ()))
    named = getattr(args, "_cuda_graph_config_locked", ())
    return _SOURCE in declared and ("prefill", "backend") not in named


def bound_prefills(args: ServerArgs, largest: int) -> bool:
    """Limit captured prefills to ``largest`` tokens and to a chunk; keep sizes that flags name.

    Returns:
        False if captured prefills are off, or if a flag names their backend.
    """
    config = resolution_result(args, "cuda_graph_config")
    prefill, chunk = config.prefill, resolution_result(args, "chunked_prefill_size")
    if prefill.backend != BREAKABLE or not turns_prefills_on(args):
        return False
    if prefill.max_bs or prefill.bs:
        return True
    if chunk and chunk > 0:  # -1: prompts are not divided
        largest = min(largest, chunk)
    declare_graphs(args, cuda_graph_config.with_phase(config, "prefill", max_bs=largest))
    return True
