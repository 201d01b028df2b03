"""Somebody else's code where rows pass: classes, methods, functions, hooks.

SGLang's own code reads only the kept rows of what the text model returns. Other code may read any
row, and those that are not kept were never computed. So code that is not known refuses a server,
unless its operator trusts it. Code is known by the module that defines it. ``functools.wraps``
copies a function's name, but not its globals, so these say where it is from.

All is judged when a runner starts. What functions call in turn, such as kernels, is not looked at.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from torch.nn.modules import module as torch_module

from sglang_gemma4_yoco import compat, log, settings
from sglang_gemma4_yoco.core import forward
from sglang_gemma4_yoco.models import registry

#: The models around a text model that were read: they give its rows to their logits processor.
OUTER_MODELS = (
    "sglang.srt.models.gemma4_mm.Gemma4ForConditionalGeneration",
    "sglang.srt.models.gemma4_causal.Gemma4ForCausalLM",
    "sglang.srt.models.gemma4_unified.Gemma4UnifiedForConditionalGeneration",
    "sglang.srt.models.gemma3n_mm.Gemma3nForConditionalGeneration",
    "sglang.srt.models.gemma3n_causal.Gemma3nForCausalLM",
)
#: Their parts that run before the text model, and see none of its rows.
TOWERS = {"vision_tower", "audio_tower", "vision_embedder", "embed_vision", "embed_audio"}

#: What rows pass through in all models: SGLang's classes, whose methods are judged before there is
#: a model, and so are the functions of their modules. Not every release has all of them.
CLASSES = (
    *OUTER_MODELS,
    *(
        f"sglang.srt.layers.attention.{module}.{name}"
        for name, module in compat.attention.BACKENDS.items()
    ),
    *Path(__file__).with_name("classes.txt").read_text().split(),
)
#: Attributes of these classes that see no rows, whoever has replaced them.
WITHOUT_ROWS = {
    *("__init__", "__new__", "config_class", "load_weights", "pad_input_ids", "post_init"),
    *("tie_weights", "get_image_feature", "get_video_feature", "get_audio_feature"),
}
#: Attributes of modules, and of torch for all of them, that are hooks by their numbers.
HOOKS = {
    *("_forward_pre_hooks", "_forward_hooks"),
    *("_global_forward_pre_hooks", "_global_forward_hooks"),
}
#: Packages whose code is known: SGLang, what the modules above import, and this one. The standard
#: library's as well, but for its mocks, which hide what they call.
PACKAGES = {
    *("sglang", "sglang_gemma4_yoco", "torch", "triton", "transformers", "huggingface_hub"),
    *("sgl_kernel", "flashinfer", "numpy", "msgspec", "einops", "typing_extensions"),
    *("aiter", "vllm", "torch_npu", "sgl_kernel_npu", "xielu"),
    *(sys.stdlib_module_names - {"unittest"}),
}
VARIABLE = settings.name_of("trust")
REPLACED = "a text model's forward is no longer this package's: something else is in its place"
NOT_JUDGED = "it could not be found out whose code reads the model's rows"


class Unknown(NamedTuple):
    """Code that is not known: where it is, with a verb; its module; its name there."""

    place: str
    module: str
    name: str


def find_reason(runner: Any) -> str | None:
    """Why rows may be read that this runner's model has not computed, or None. Never raises."""
    model, backend = runner.model, runner.attn_backend  # whose class ``limits`` judges
    try:
        of_model = find_unknown(type(model), _list_objects(model))
        return judge_classes([*of_model, *_find_in(type(backend).__name__, vars(backend))])
    except Exception as failure:  # noqa: BLE001 - of objects that are like no others
        log.log_failure("Gemma 4 fast prefill: looking for other people's code failed", failure)
        return NOT_JUDGED


def judge_classes(found: Iterable[Unknown]) -> str | None:
    """Why this code refuses a server, or None."""
    refused = list[Unknown]()
    for one in found:
        names = {one.module, f"{one.module}.{one.name}"}
        if names.isdisjoint(settings.current.trust):
            refused.append(one)
    if refused:
        place, module, name = refused[0]
        modules = ",".join(dict.fromkeys(one.module for one in refused))
        return (
            f"{place} {module}.{name}, which may read rows that are not computed: see "
            f"docs/help.md; {VARIABLE}={modules} accepts it"
        )
    for model in registry.TEXT_MODELS:
        if not is_ours(inspect.unwrap(vars(model)["forward"], stop=is_ours)):
            return REPLACED
    return None


def is_ours(function: Any) -> bool:
    """Whether a text model's forward is this package's wrapper."""
    return getattr(function, "__globals__", None) is vars(forward)


def find_unknown(outer: type, objects: Mapping[str, Any]) -> Iterator[Unknown]:
    """The code that is not known where rows pass.

    Args:
        outer: the class of the model around the text model.
        objects: what the model has, by where it is; empty where none is loaded.
    """
    if f"{outer.__module__}.{outer.__qualname__}" not in OUTER_MODELS:
        yield Unknown("the model is a", outer.__module__, outer.__qualname__)
    classes = [outer, *map(type, objects.values())]
    for name in CLASSES:
        path, _, kind = name.rpartition(".")
        module = sys.modules.get(path)  # what a release does not have, nothing can call
        classes.append(getattr(module, kind, object))
        yield from _find_in(path, getattr(module, "__dict__", {}))
    for base in dict.fromkeys(base for kind in classes for base in kind.__mro__):
        if not _is_known(base.__module__):
            yield Unknown("the model has a", base.__module__, base.__qualname__)
        for one in _find_in(base.__qualname__, vars(base)):
            if one.module != base.__module__:  # a class that is trusted has its own methods
                yield one
    for place, part in objects.items():
        yield from _find_in(place, getattr(part, "__dict__", {}))
    yield from _find_in("all modules", vars(torch_module))


def _list_objects(model: Any) -> dict[str, Any]:
    """What rows pass through, by where it is: the modules, and SGLang's objects in them."""
    objects = {}
    for name, module in model.named_modules():
        if name.partition(".")[0] in TOWERS:
            continue
        objects[name or "the model"] = module
        for attribute, value in vars(module).items():
            if any(base.__module__.startswith("sglang.") for base in type(value).__mro__):
                objects[f"{name}.{attribute}"] = value
    return objects


def _find_in(place: str, attributes: Mapping[str, Any]) -> Iterator[Unknown]:
    """The code that is not known among what these attributes are, or call.

    A wrapper has what it wraps, and the hooks that it calls, in its closure or its attributes.
    """
    for name, value in attributes.items():
        pending, seen = [value], dict[int, Any]()
        if name in HOOKS:
            pending = [*value.values()]
        while pending and name not in WITHOUT_ROWS:
            part = pending.pop()
            if id(part) in seen or not (callable(part) or hasattr(type(part), "__get__")):
                continue
            seen[id(part)] = part  # kept, so that no other object gets its id
            module, defined = _definition_of(part)
            if not _is_known(module):
                yield Unknown(f"{place}.{name} runs", module, defined)
            pending += _list_called(part)


def _definition_of(part: Any) -> tuple[str, str]:
    """The module in which a function or class is defined, or an object's class; and its name."""
    if type(part) is FunctionType:
        return str(part.__globals__.get("__name__")), part.__code__.co_name
    # ``isinstance`` would ask the object, and a proxy answers for what is in it.
    kind = type(part)
    if issubclass(kind, type):
        kind = part
    return kind.__module__, kind.__qualname__


def _list_called(part: Any) -> Iterator[Any]:
    """What a function, a method or an object may call, as far as it has it."""
    kind = type(part)
    if issubclass(kind, type):
        return
    yield from getattr(part, "__dict__", {}).values()
    if kind.__module__ in ("builtins", "functools"):
        for name in ("__func__", "func", "fget", "fset"):
            yield getattr(part, name, None)
        for cell in getattr(part, "__closure__", None) or ():
            with suppress(ValueError):  # an empty cell
                yield cell.cell_contents


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES
