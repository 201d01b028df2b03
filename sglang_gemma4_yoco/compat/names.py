"""SGLang symbols that the package depends on, and the check at load that they exist.

``plugin`` checks the supported range before it imports this folder. Symbols for all models are
listed here, those of one model in its own file, as ``TextModelNames``.
"""

import inspect
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from sglang_gemma4_yoco.compat import attention, batch, release
from sglang_gemma4_yoco.refusal import ServerRefusal

_REMEDY = "Install a supported SGLang, or a newer sglang-gemma4-yoco"


@dataclass(frozen=True, eq=False)  # compared by identity
class TextModelNames:
    """The SGLang symbols that a text model's file uses.

    Attributes:
        text_model: the path of the class of text models.
        loop: the attribute of the model that its forward reads to run its layers, and that
            ``stop_before_cut`` patches to end the loop early: ``end_layer`` if the forward counts
            up to it, ``layers`` if it iterates over them. A forward that does not read it turns the
            model off.
        signatures: the first parameters of functions and classes, by their path below the module of
            the class; ``...`` stands for any others.
        outer_models: modules with the models around it, which pass its rows only to their logits
            processor.
        modules: other model modules with classes or functions that its forward uses.
        towers: parts of the outer models that run before the text model, and see none of its rows.
    """

    text_model: str
    loop: str
    signatures: Mapping[str, str]
    outer_models: tuple[str, ...]
    modules: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()


def find_object(path: str) -> Any | None:
    """Return SGLang's module, class or function of this name, or None if it is missing."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


@cache  # the result at load holds, even if methods are wrapped later
def find_missing(needed: TextModelNames) -> ServerRefusal | None:
    """Return the symbols of a model that SGLang lacks, with the remedy, or None."""
    missing = "; ".join(_find_missing(needed))
    if not missing:
        return None
    name = needed.text_model.rpartition(".")[2]
    return ServerRefusal(
        f"SGLang {release.INSTALLED} lacks {missing}: prefills of {name} run as stock. {_REMEDY}"
    )


def _find_missing(needed: TextModelNames) -> Iterator[str]:
    module, _, name = needed.text_model.rpartition(".")
    model = find_object(needed.text_model)
    if not model:
        yield needed.text_model
        return
    for path, wanted in needed.signatures.items():
        if not _has_signature(find_object(f"{module}.{path}"), wanted):
            yield f"{path}({wanted})"
    if needed.loop not in inspect.unwrap(model.forward).__code__.co_names:
        yield f"{name}.forward's use of self.{needed.loop}"


def _has_signature(function: Any | None, wanted: str) -> bool:
    if not function:
        return False
    parameters = list(inspect.signature(function).parameters)
    if wanted.endswith("..."):
        parameters[wanted.count(",") :] = ["..."]
    return ", ".join(parameters) == wanted


def check_names(fields: Iterable[str]) -> None:
    """Raise ``IncompatibleError``, with the remedy, if a symbol is missing.

    Args:
        fields: those of ``ForwardBatch`` that are read or written by a string with their name. If
            they had another name, nothing would raise an error. Any other missing symbol raises one
            where it is used, at the latest in the check at start, and mypy names it.
    """
    missing = []
    wanted = "self, forward_batch"
    if not _has_signature(attention.AttentionBackend.init_forward_metadata, wanted):
        missing.append(f"AttentionBackend.init_forward_metadata({wanted})")
    for name in fields:
        if name not in batch.ForwardBatch.__dataclass_fields__:
            missing.append(f"ForwardBatch.{name}")
    if missing:
        raise release.IncompatibleError(
            f"SGLang {release.INSTALLED} lacks {'; '.join(missing)}. {_REMEDY}"
        )
