"""Somebody else's code where rows pass: classes, methods, functions, hooks.

SGLang's own code reads only the kept rows of what the text model returns. Other code may read any
row, and those that are not kept were never computed. So code that is not known refuses a server,
unless its operator trusts it. Code is known by the module that defines it. ``functools.wraps``
copies a function's name, but not its globals, so these say where it is from.

All is judged when a runner starts. What functions call in turn, such as kernels, is not looked at.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

from torch.nn.modules import module as torch_module

from sglang_gemma4_yoco import compat, log, settings
from sglang_gemma4_yoco.core import forward

#: The models around a text model that were read: they give its rows to their logits processor.
OUTER_MODELS = {
    "sglang.srt.models.gemma4_causal.Gemma4ForCausalLM",
    "sglang.srt.models.gemma4_mm.Gemma4ForConditionalGeneration",
    "sglang.srt.models.gemma4_unified.Gemma4UnifiedForConditionalGeneration",
}
LOGITS_PROCESSOR = "sglang.srt.layers.logits_processor.LogitsProcessor"
#: Their parts that run before the text model, and see none of its rows.
TOWERS = {"vision_tower", "audio_tower", "vision_embedder", "embed_vision", "embed_audio"}

#: Modules of SGLang whose functions are judged, and classes in them whose methods are, before there
#: is a model: rows pass through them in all models. Not every release has all of them.
CLASSES: Mapping[str, tuple[str, ...]] = {
    "sglang.srt.models.gemma4_causal": (
        *("Gemma4TextModel", "Gemma4DecoderLayer", "Gemma4Attention"),
    ),
    "sglang.srt.models.gemma4_mm": (),
    "sglang.srt.models.gemma4_unified": (),
    "sglang.srt.models.gemma3_causal": ("Gemma3MLP", "Gemma3TextScaledWordEmbedding"),
    "sglang.srt.layers.activation": ("GeluAndMul",),
    "sglang.srt.layers.layernorm": ("RMSNorm", "Gemma4RMSNorm"),
    "sglang.srt.layers.layer_boundary.residual.batch": (),
    "sglang.srt.layers.layer_boundary.residual.stream": ("ResidualStream",),
    "sglang.srt.layers.layer_boundary.stage": ("StageBoundary",),
    "sglang.srt.layers.linear": (
        *("ReplicatedLinear", "QKVParallelLinear", "MergedColumnParallelLinear"),
        "RowParallelLinear",
    ),
    "sglang.srt.layers.logits_processor": ("LogitsProcessor", "LogitsMetadata"),
    "sglang.srt.layers.logprob_processor": ("InputLogprobProcessor",),
    "sglang.srt.layers.quantization.unquant": ("UnquantizedLinearMethod",),
    "sglang.srt.layers.radix_attention": ("RadixAttention",),
    "sglang.srt.layers.rotary_embedding.base": ("RotaryEmbedding",),
}
#: Attributes of these classes that see no rows, whoever has replaced them.
WITHOUT_ROWS = {
    *("__init__", "__new__", "config_class", "load_weights", "pad_input_ids", "post_init"),
    *("tie_weights", "get_image_feature", "get_video_feature", "get_audio_feature"),
}
#: Packages whose code is known: SGLang, what the modules above import, and this one. The standard
#: library's as well, but for its mocks, which hide what they call.
PACKAGES = {
    *("sglang", "sglang_gemma4_yoco", "torch", "triton", "transformers", "huggingface_hub"),
    *("sgl_kernel", "flashinfer", "numpy", "msgspec", "einops"),
    *("aiter", "vllm", "torch_npu", "sgl_kernel_npu", "xielu"),
    *(sys.stdlib_module_names - {"unittest"}),
}
VARIABLE = settings.name_of("trust")
REPLACED = "Gemma4TextModel.forward is no longer this package's: something else is in its place"


class Unknown(NamedTuple):
    """Code that is not known: where it is, with a verb; its module; its name there."""

    place: str
    module: str
    name: str

    def is_meant_by(self, trusted: str) -> bool:
        """Whether a name in the setting is its module's, or its own."""
        return trusted in (self.module, f"{self.module}.{self.name}")


def why_not(runner: Any) -> str | None:
    """Why rows may be read that this runner's model has not computed, or None."""
    model = runner.model
    found = [*find_unknown(type(model), _list_objects(model))]
    found += _find_in_backend(runner.attn_backend)
    unmatched = find_unmatched(found)
    if unmatched:
        log.once(
            f"Gemma 4 fast prefill: {VARIABLE} has {', '.join(unmatched)}, but nothing of that "
            "name is in this server's model: is it misspelt?",
            logging.WARNING,
        )
    return give_reason(found)


def find_unmatched(found: Iterable[Unknown]) -> list[str]:
    """The names in the setting that mean nothing of this."""
    names = settings.current.trust
    return [name for name in names if not any(one.is_meant_by(name) for one in found)]


def give_reason(found: Iterable[Unknown]) -> str | None:
    """Why this code refuses a server; None if all of it is trusted."""
    refused = [one for one in found if not any(map(one.is_meant_by, settings.current.trust))]
    if not refused:
        return None if _is_wrapped() else REPLACED
    first, modules = refused[0], dict.fromkeys(one.module for one in refused)
    return (
        f"{first.place} {first.module}.{first.name}, which may read rows that are not computed: "
        f"see docs/help.md; {VARIABLE}={','.join(modules)} accepts it"
    )


def _is_wrapped() -> bool:
    """Whether the text model's forward is this package's, or one that is wrapped around it."""
    function = compat.gemma4_causal.Gemma4TextModel.forward
    while function is not None:
        if getattr(function, "__globals__", None) is vars(forward):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def find_unknown(outer: type, objects: Mapping[str, Any]) -> Iterator[Unknown]:
    """The code that is not known where rows pass.

    Args:
        outer: the class of the model around the text model.
        objects: what the model has, by where it is; empty where none is loaded.
    """
    if _name_of(outer) not in OUTER_MODELS:
        yield Unknown("the model is a", outer.__module__, outer.__qualname__)
    processor = type(objects.get("logits_processor"))
    if objects and _name_of(processor) != LOGITS_PROCESSOR:
        yield Unknown("its logits processor is a", processor.__module__, processor.__qualname__)
    classes = {type(part): place for place, part in objects.items()} | {outer: "the model"}
    for name, kinds in CLASSES.items():
        module = sys.modules.get(name)  # what a release does not have, nothing can call
        classes |= {getattr(module, kind, object): kind for kind in kinds}
        yield from _find_in(name, module)
    for kind, place in classes.items():
        for base in kind.__mro__:
            if _is_known(base.__module__):
                yield from _find_in(base.__qualname__, base)
            else:
                yield Unknown(f"{place} is a", base.__module__, base.__qualname__)
    for place, part in objects.items():
        yield from _find_in(place, part)
        for hooks in ("_forward_pre_hooks", "_forward_hooks"):
            yield from _find_in_values(f"a hook of {place}", getattr(part, hooks, {}))
    for hooks in ("_global_forward_pre_hooks", "_global_forward_hooks"):
        yield from _find_in_values("a hook of all modules", getattr(torch_module, hooks))


def _list_objects(model: Any) -> dict[str, Any]:
    """What rows pass through, by where it is: the modules, and SGLang's objects in them."""
    objects = {}
    for name, module in model.named_modules():
        if name.partition(".")[0] in TOWERS:
            continue
        place = name or "the model"
        objects[place] = module
        for attribute, value in vars(module).items():
            if any(base.__module__.startswith("sglang.") for base in type(value).__mro__):
                objects[f"{place}.{attribute}"] = value
    return objects


def _find_in_backend(backend: Any) -> Iterator[Unknown]:
    """The code that is not known in an attention backend; ``limits`` judges its class itself."""
    for name in (None, "prefill_backend", "decode_backend"):
        part = backend if name is None else getattr(backend, name, None)
        yield from _find_in(type(part).__name__, part)
        for base in type(part).__mro__:
            if _is_known(base.__module__):
                yield from _find_in(base.__qualname__, base)


def _find_in(place: str, owner: Any) -> Iterator[Unknown]:
    """The code that is not known in the attributes of a module, a class or an object."""
    for name, value in getattr(owner, "__dict__", {}).items():
        if name not in WITHOUT_ROWS:
            yield from _find_in_values(f"{place}.{name}", {name: value})


def _find_in_values(place: str, values: Mapping[Any, Any]) -> Iterator[Unknown]:
    """The code that is not known among what these values are or call.

    A wrapper has what it wraps, and the hooks that it calls, in its closure or its attributes.
    """
    pending, seen = [*values.values()], dict[int, Any]()
    while pending:
        part = pending.pop()
        if id(part) in seen or not (callable(part) or hasattr(type(part), "__get__")):
            continue
        seen[id(part)] = part  # kept, so that no other object gets its id
        module, name = _definition_of(part)
        if _is_known(module):
            pending += _list_called(part)
        else:
            yield Unknown(f"{place} runs", module, name)


def _definition_of(part: Any) -> tuple[str, str]:
    """The module in which a function or class is defined, or else its class; and its name."""
    kind = type(part)  # ``isinstance`` asks the object, and a proxy answers for what is in it
    if kind is FunctionType:
        return str(part.__globals__.get("__name__")), part.__code__.co_name
    if issubclass(kind, type):
        return part.__module__, part.__qualname__
    if kind is BuiltinFunctionType and part.__module__ is not None:
        return part.__module__, part.__name__
    return kind.__module__, kind.__qualname__


def _list_called(part: Any) -> Iterator[Any]:
    """What a function, a method or an object may call, as far as it has it."""
    kind = type(part)
    if issubclass(kind, type):
        return
    yield from getattr(part, "__dict__", {}).values()
    if kind.__module__ not in ("builtins", "functools"):
        return
    for name in ("__func__", "func", "fget", "fset"):
        yield getattr(part, name, None)
    yield from getattr(part, "args", ())
    yield from getattr(part, "keywords", {}).values()
    for cell in getattr(part, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
