"""SGLang's classes of text models whose prefills can be cut, and the file that knows each."""

from typing import Any

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.core.model import TextModel
from sglang_gemma4_yoco.models import gemma3n, gemma4

TEXT_MODELS: dict[type, TextModel] = {
    compat.layers.gemma4_causal.Gemma4TextModel: gemma4,
    compat.layers.gemma3n_causal.Gemma3nTextModel: gemma3n,
}


def find_kind(model: Any) -> TextModel:
    """The file that knows a model of one of these classes, or of a class derived from one."""
    for known, kind in TEXT_MODELS.items():
        if isinstance(model, known):
            return kind
    raise TypeError(f"{type(model).__name__} is not a text model that is known")


def find_kind_of_type(model_type: str) -> TextModel | None:
    """Return the file that knows the models whose config has this ``model_type``, or None."""
    for kind in TEXT_MODELS.values():
        if model_type in kind.MODEL_TYPES:
            return kind
    return None
