"""The order in which a server is judged: the first reason found is the one that it reports.

Unknown configurations are refused with a one-line reason, which does not change while the server
runs.
"""

from sglang_gemma4_yoco import __version__, compat, settings
from sglang_gemma4_yoco.admission import arguments, runner_parts, third_party, weights
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.compat.text_model import TextModel
from sglang_gemma4_yoco.core import eligibility, ranks
from sglang_gemma4_yoco.core.backend_pair import BackendPair, build_pair
from sglang_gemma4_yoco.core.state import first_shared_layer
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.refusal import ServerRefusal

NO_SHARED_LAYERS = ServerRefusal("the model has no KV-shared tail")


def find_model_reason(model: TextModel) -> ServerRefusal | None:
    """Return why no batch of this model may be cut with these server arguments, or None."""
    first = first_shared_layer(model.config)
    if not first:
        return NO_SHARED_LAYERS
    return arguments.find_server_reason() or weights.find_linear_reason(model, first)


def find_runner_reason(runner: ModelRunner, model: TextModel) -> ServerRefusal | None:
    """Return why no batch of this runner may be cut, or None; ``model`` is its text model."""
    if not runner.is_generation:
        return arguments.EMBEDDINGS
    if getattr(model, "layers_to_capture", None):  # SGLang sets them once, before it serves
        return ServerRefusal(eligibility.CAPTURED_LAYERS.text)
    adapter = registry.find_adapter(model)
    return (
        find_model_reason(model)
        or compat.names.find_missing(adapter.SGLANG)
        or third_party.find_third_party_code(type(runner.model), runner)
        or adapter.find_unsupported_reason(model)
        or runner_parts.find_backend_reason(runner.attn_backend, adapter.ATTENTION_BACKENDS)
        or runner_parts.find_pool_reason(runner.token_to_kv_pool, runner.dtype)
    )


def admit(
    runner: ModelRunner, model: TextModel
) -> tuple[BackendPair | None, ServerRefusal | None, object]:
    """Return the attention backends of a forward that is cut, or the reason why none is cut.

    And return third-party code that may read unfinished chunks. With several ranks all of them
    return the same reason, or none does and they have the same code.
    """
    backends = readers = None
    refusal = find_runner_reason(runner, model)
    if not refusal:
        readers = third_party.list_chunk_readers(runner)
        backends = build_pair(runner, model, registry.find_adapter(model).ATTENTION_BACKENDS)
        if not backends:
            refusal = runner_parts.NO_TAIL
    # All ranks have the same release, arguments and variables, so all of them compare, or none
    # does. Arguments also refuse servers on several machines, where another machine may lack this
    # package and never answer.
    if not arguments.find_server_reason():
        difference = ranks.find_difference(
            f"{__version__}, off because: {refusal}, {settings.current}, reading chunks: {readers}"
        )
        if difference:
            refusal = ServerRefusal(difference)
    if refusal:
        backends = None
    return backends, refusal, readers
