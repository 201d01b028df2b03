"""The text models whose prefills can be cut, and the file that knows each."""

from typing import Any

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.core.model import TextModelAdapter
from sglang_gemma4_yoco.models import gemma3n, gemma4

#: One entry for each model: the file that knows it.
MODELS: list[TextModelAdapter] = [gemma4, gemma3n]


def list_text_models() -> dict[type, TextModelAdapter]:
    """Return SGLang's classes of text models, with their files; of some SGLang may lack a name."""
    found = dict[type, TextModelAdapter]()
    for adapter in MODELS:
        text_model = compat.names.find_object(adapter.SGLANG.text_model)
        if text_model is not None:
            found[text_model] = adapter
    return found


def list_cuttable_models() -> list[Any]:
    """Return the classes of text models of which SGLang lacks nothing."""
    known = list_text_models().items()
    return [model for model, adapter in known if compat.names.find_missing(adapter.SGLANG) is None]


def find_adapter(model: Any) -> TextModelAdapter:
    """Return the file that knows a model of one of these classes, or of a class derived from one.

    Raises:
        TypeError: there is none.
    """
    for known, adapter in list_text_models().items():
        if isinstance(model, known):
            return adapter
    raise TypeError(f"{type(model).__name__} is not a text model that is known")


def find_adapter_by_type(model_type: str) -> TextModelAdapter | None:
    """Return the file that knows the models whose config has this ``model_type``, or None."""
    for adapter in MODELS:
        if model_type in adapter.MODEL_TYPES:
            return adapter
    return None
