"""The moment when SGLang resolves the server arguments: turn prefill graphs on, if that is asked.

SGLang captures prefills by default on CUDA, but not those of multimodal models, except for listed
architectures. With ``SGLANG_GEMMA4_YOCO_PREFILL_GRAPHS=1`` this hook lifts that rule for a model
whose captured prefills are cut; SGLang's other rules stand. What only a scheduler can know is
judged before the capture (``prefills_captured``).
"""

import os

from sglang_gemma4_yoco import compat, log, settings
from sglang_gemma4_yoco.admission import arguments
from sglang_gemma4_yoco.core.state import first_shared_layer
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.startup.guard import guarded

_VARIABLE = f"{settings.name_of('prefill_graphs')}=1"
_FAILED = f"YOCO fast prefill: {_VARIABLE} failed"
NOT_THERE = "in this release of SGLang captured prefills are not cut"
NOT_CUDA = "SGLang captures prefills by default on CUDA only"
STANDALONE = "with STANDALONE SGLang would capture prefills of the draft model too"
NOT_CHOSEN = "the flags, or SGLang's rules for them, choose the backend"
# SGLang's variables with which prefills must not be captured, and why.
_VARIABLES = {
    compat.server.POSITIONS_VARIABLE: arguments.WRONG_REPLAYS,
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "SGLang's memory saver rejects captured prefills",
}
# The tokens of the largest prefill that is captured, for the hidden size of E2B and for wider
# models. Predicted (benchmark/predicted.json): above these the device is slower than the host's
# launches of the layers before the cut, so a replay saves nothing.
_WIDTH_OF_E2B = 1536
_LARGEST_OF_E2B = 2048
_LARGEST = 1024


def register_hook() -> None:
    """Register the hook in this process if the setting asks for it. Never raises."""
    if settings.current.prefill_graphs:
        with guarded(_FAILED):
            # From now on ``resolve`` runs in place of this step: SGLang cannot unregister it.
            compat.resolution.register_resolution_hook("handle_cuda_graph_config")(resolve)


def resolve(args: compat.resolution.ServerArgs, previous: compat.Method) -> None:
    """Run SGLang's step ``previous``, with prefill graphs on if their prefills may be cut."""
    config: compat.resolution.ModelConfig | None = None
    with guarded(_FAILED):
        config = _admit(args)
    if config is None:
        previous(args)
        return
    with compat.resolution.admit_multimodal(config):
        previous(args)
    with guarded(_FAILED):
        largest = _LARGEST
        if config.hf_text_config.hidden_size <= _WIDTH_OF_E2B:
            largest = _LARGEST_OF_E2B
        if not compat.resolution.bound_prefills(args, largest):
            say_without_effect(NOT_CHOSEN)
            return
        log.log_warning(
            f"YOCO fast prefill: {_VARIABLE} turns SGLang's CUDA graphs on for prefills; SGLang "
            "reserves 8 MB of GPU memory for each captured size"
        )


def _admit(args: compat.resolution.ServerArgs) -> compat.resolution.ModelConfig | None:
    """Return the config of a model whose captured prefills may be cut; if not, say why."""
    config: compat.resolution.ModelConfig = compat.resolution.model_config_of(args)
    text = config.hf_text_config
    adapter = registry.find_adapter_by_type(text.model_type)
    if (
        adapter is None
        or not adapter.LEAVES_CAPTURED_PREFILLS
        or first_shared_layer(text) is None
        # The settings of now: a later server of this program may run as stock.
        or not settings.read(os.environ).prefill_graphs
    ):
        return None
    with compat.resolution.reading(args):
        reason = find_reason()
        graphs = compat.server.read_argument("cuda_graph_config")
    if reason:
        say_without_effect(reason)
        return None
    compat.resolution.declare_graphs(args, graphs)
    return config


def find_reason() -> object | None:
    """Return why captured prefills of this server would not be cut, as far as is known, or None."""
    algorithm = compat.server.read_argument("speculative_algorithm")
    default = compat.resolution.cuda_graph_config.default_prefill_backend()
    if not compat.release.has_exits():
        return NOT_THERE
    if default != compat.captured_prefills.BREAKABLE:
        return NOT_CUDA
    for name, wrong in _VARIABLES.items():
        if compat.server.read_variable(name):
            return wrong
    if algorithm == "STANDALONE":
        return STANDALONE
    reason = arguments.find_server_reason()
    # SGLang makes these FROZEN_KV_MTP in a later step if the draft model is Gemma 4's assistant.
    if reason is arguments.DRAFTS and algorithm in ("EAGLE", "NEXTN"):
        return None
    return reason


def say_without_effect(reason: object) -> None:
    """Log why the setting turns no prefill graphs on, or not any more."""
    # Before logging is configured, only warnings are seen.
    log.log_warning(f"YOCO fast prefill: {_VARIABLE} has no effect: {reason}")
