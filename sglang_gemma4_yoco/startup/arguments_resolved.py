"""The moment when SGLang resolves the server arguments: turn prefill graphs on, if that is asked.

SGLang captures prefills by default on CUDA, but not those of multimodal models, except for listed
architectures. With ``SGLANG_GEMMA4_YOCO_PREFILL_GRAPHS=1`` this hook lifts that rule for a model
whose captured prefills are cut; SGLang's other rules stand. What only a scheduler can know is
judged before the capture (``prefills_captured``).
"""

import logging

from sglang_gemma4_yoco import compat, log, settings
from sglang_gemma4_yoco.admission import arguments
from sglang_gemma4_yoco.core import worth
from sglang_gemma4_yoco.core.state import first_shared_layer
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.startup.guard import guarded

VARIABLE = f"{settings.name_of('prefill_graphs')}=1"
_FAILED = f"YOCO fast prefill: {VARIABLE} failed"
NOT_THERE = "in this release of SGLang captured prefills are not cut"
NOT_CUDA = "SGLang captures prefills by default on CUDA only"
STANDALONE = "with STANDALONE SGLang would capture prefills of the draft model too"
NOT_CHOSEN = "the flags, or SGLang's rules for them, choose the backend"
# SGLang makes these FROZEN_KV_MTP in a later step if the draft model is Gemma 4's assistant.
_MAY_BE_MTP = ("EAGLE", "NEXTN")


def register_hook() -> None:
    """Register the hook in this process if the setting asks for it. Never raises."""
    if settings.current.prefill_graphs:
        with guarded(_FAILED):
            compat.resolution.register_resolution_hook(compat.resolution.STEP)(resolve)


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
        largest = worth.find_largest_capture(config.hf_text_config.hidden_size)
        sizes = compat.resolution.bound_prefills(args, largest)
        fact = f"has no effect: {NOT_CHOSEN}"
        if sizes is not None:
            fact = f"turns SGLang's CUDA graphs on for prefills of {sizes}; SGLang reserves 8 MB "
            fact += "of GPU memory for each captured size"
        _say(fact)


def _admit(args: compat.resolution.ServerArgs) -> compat.resolution.ModelConfig | None:
    """Return the config of a model whose captured prefills may be cut; if not, say why."""
    compat.resolution.note_hook(args)
    config: compat.resolution.ModelConfig = compat.resolution.model_config_of(args)
    text = config.hf_text_config
    adapter = registry.find_adapter_by_type(text.model_type)
    if adapter is None or not adapter.LEAVES_CAPTURED_PREFILLS or first_shared_layer(text) is None:
        return None
    with compat.resolution.reading(args):
        reason = find_reason()
        graphs = compat.server.read_argument(compat.resolution.GRAPHS)
    if reason is not None:
        _say(f"has no effect: {reason}")
        return None
    compat.resolution.note_hook(args, cuda_graph_config=graphs)
    return config


def find_reason() -> object | None:
    """Return why captured prefills of this server would not be cut, as far as is known, or None."""
    algorithm = compat.server.read_argument("speculative_algorithm")
    default = compat.resolution.cuda_graph_config.default_prefill_backend()
    if not compat.release.has_exits():
        return NOT_THERE
    if default != compat.captured_prefills.BREAKABLE:
        return NOT_CUDA
    if compat.server.read_variable(compat.server.POSITIONS_VARIABLE):
        return arguments.WRONG_REPLAYS
    if algorithm == "STANDALONE":
        return STANDALONE
    reason = arguments.find_server_reason()
    if reason is arguments.DRAFTS and algorithm in _MAY_BE_MTP:
        return None
    return reason


def _say(fact: str) -> None:
    # A warning: logging may not be configured yet.
    log.log_once(f"YOCO fast prefill: {VARIABLE} {fact}", logging.WARNING)
