"""The registry of text models whose prefills can be cut, with their adapters."""

from typing import Any

from sglang_gemma4_yoco.compat import names
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.compat.text_model import TextModel
from sglang_gemma4_yoco.core.model import Adapter
from sglang_gemma4_yoco.core.state import first_shared_layer
from sglang_gemma4_yoco.models import gemma3n, gemma4

#: The adapters, one per model.
MODELS: list[Adapter] = [gemma4, gemma3n]


def list_text_models() -> dict[type[TextModel], Adapter]:
    """Return SGLang's text model classes and their adapters, even if it lacks other symbols."""
    found = {}
    for adapter in MODELS:
        text_model = names.find_object(adapter.SGLANG.text_model)
        if text_model:
            found[text_model] = adapter
    return found


def list_cuttable_models() -> list[type[TextModel]]:
    """Return the text model classes whose symbols SGLang has."""
    known = list_text_models().items()
    return [model for model, adapter in known if names.find_missing(adapter.SGLANG) is None]


def find_adapter(model: TextModel) -> Adapter:
    """Return the adapter of a model of one of these classes, or of a derived class.

    Raises:
        TypeError: there is no adapter.
    """
    for known, adapter in list_text_models().items():
        if isinstance(model, known):
            return adapter
    raise TypeError(f"{type(model).__name__} has no adapter in models/registry.py")


def find_adapter_by_type(model_type: str) -> Adapter | None:
    """Return the adapter of models whose config has this ``model_type``, or None."""
    for adapter in MODELS:
        if model_type in adapter.MODEL_TYPES:
            return adapter
    return None


def list_served_models(runner: ModelRunner) -> list[TextModel]:
    """Return the text models of a runner that have a KV-shared tail; none of a draft worker."""
    if getattr(runner, "is_draft_worker", False):
        return []
    modules: Any = getattr(runner.model, "modules", list)  # on MLX it is not a PyTorch module
    known: Any = tuple(list_text_models())
    return [
        model
        for model in modules()
        if isinstance(model, known) and first_shared_layer(model.config)
    ]
