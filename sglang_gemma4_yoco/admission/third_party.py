"""Third-party code that may read what is skipped: classes, methods, functions, hooks.

SGLang's own code reads only the kept rows of the text model's output. Third-party code may read any
row, and the other rows are never computed. So a server with unknown code is refused unless its
operator trusts that code. Unknown code around sampling refuses no server: unfinished chunks then
keep their last row. Code is identified by the module that defines it: for functions by their
globals, which ``functools.wraps`` does not copy.

The inspection runs when a runner starts. It does not follow calls inside functions, such as
kernels.
"""

import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from sglang_gemma4_yoco import compat, log, settings
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.core import forward
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.refusal import ServerRefusal

#: Modules of ``sglang.srt.layers`` that models use; some releases lack some of them.
LAYERS = (
    "activation",
    "attention.base_attn_backend",
    "attention.hybrid_attn_backend",
    "layer_boundary.residual.batch",
    "layer_boundary.residual.stream",
    "layer_boundary.stage",
    "layernorm",
    "linear",
    "logits_processor",
    "logprob_processor",
    "quantization.unquant",
    "radix_attention",
    "rotary_embedding.base",
)
#: Classes that see an unfinished chunk's logits or its sampled token, as the runner and the sampler
#: do. SGLang's own code discards both, except for custom logit processors.
SAMPLING = (
    "sglang.srt.managers.scheduler:Scheduler",
    "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor",
    "sglang.srt.managers.tp_worker:TpModelWorker",
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo",
)
#: Methods that see no rows, even if replaced.
NO_ROWS = {
    "__init__",
    "__new__",
    "load_weights",
    "pad_input_ids",
    "get_image_feature",
    "get_video_feature",
    "get_audio_feature",
}
#: Suffixes of the attributes in which modules, and torch globally, keep hooks by number.
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
#: Attributes in which methods, properties, partials, kernels and wrappers hold a function; the last
#: two are torch's, for operators and scripts.
WRAPPED = ("__func__", "__wrapped__", "fget", "func", "fn", "_init_fn", "_torchdynamo_inline")
HOOK_REGISTRY = "sglang.srt.plugins.hook_registry"
#: Packages whose code is known: SGLang, the imports of the modules above, this one, and the
#: standard library except for its mocks, which hide what they call.
PACKAGES = {
    "sglang",
    "sglang_gemma4_yoco",
    "torch",
    "triton",
    "transformers",
    "huggingface_hub",
    "sgl_kernel",
    "flashinfer",
    "numpy",
    "msgspec",
    "einops",
    "typing_extensions",
    "aiter",
    "vllm",
    "torch_npu",
    "sgl_kernel_npu",
    "xielu",
    *(sys.stdlib_module_names - {"unittest"}),
}
VARIABLE = settings.name_of("trust")
REPLACED = ServerRefusal(
    "a text model's forward is no longer this package's: another plugin replaced it"
)
NOT_JUDGED = ServerRefusal("it could not be determined whose code reads the model's rows")


#: (place and verb, module, name) of unknown code.
ForeignCode = tuple[str, str, str]


def find_third_party_code(outer: type, runner: ModelRunner | None = None) -> ServerRefusal | None:
    """Return the third-party code that may read skipped rows, as a refusal, or None. Never raises.

    Args:
        outer: the class of the model around the text model.
        runner: SGLang's ``ModelRunner``; None if no model is loaded.
    """
    try:
        refused = list(_find_unknown(outer, runner))
        replaced = not all(map(_has_our_forward, registry.list_cuttable_models()))
    except Exception as failure:  # noqa: BLE001 - inspection of arbitrary objects
        log.log_failure("YOCO fast prefill: third-party code detection failed", failure)
        return NOT_JUDGED
    if refused:
        place, module, name = refused[0]
        modules = ",".join(dict.fromkeys(module for _, module, _ in refused))
        return ServerRefusal(
            f"{place} {module}.{name}, which may read rows that are not computed: see "
            f"docs/help.md; {VARIABLE}={modules} accepts it"
        )
    if replaced:
        return REPLACED
    return None


def list_chunk_readers(runner: ModelRunner) -> object:
    """Return third-party code that may read what is sampled from unfinished chunks.

    Wrapped constructors count too: they may install an observer.
    """
    return [
        *_find_in("the sampler", runner.sampler),
        *(
            code
            for owner in (runner, runner.sampler, *map(pkgutil.resolve_name, SAMPLING))
            for name in dir(owner)
            for code in _find_definitions(inspect.getattr_static(owner, name, None))
        ),
    ]


def _has_our_forward(model: type) -> bool:
    return forward.is_wrapped(inspect.unwrap(vars(model)["forward"], stop=forward.is_wrapped))


def _find_unknown(outer: type, runner: ModelRunner | None) -> Iterator[ForeignCode]:
    """Yield third-party code that may read skipped rows."""
    known = [name for adapter in registry.MODELS for name in adapter.SGLANG.outer_models]
    if not (outer.__module__ in known or _is_trusted(outer.__module__, outer.__name__)):
        yield "the model is a", outer.__module__, outer.__name__
    # Modules that are not imported cannot be called.
    owners: dict[str, object] = {}
    for path in list_modules():
        if path in sys.modules:
            owners[path] = sys.modules[path]
    classes = [outer]
    for path, module in owners.items():
        found = filter(inspect.isclass, vars(module).values())
        classes += [kind for kind in found if kind.__module__ == path]
    if runner:
        objects = _list_objects(runner.model)
        classes += map(type, objects.values())
        backend = runner.attn_backend  # ``runner_parts`` checks its class
        owners |= {**objects, type(backend).__name__: backend}
    for base in dict.fromkeys(base for kind in classes for base in kind.__mro__):
        for module, name in _find_definitions(base):
            yield "the model has a", module, name
        yield from _find_in(base.__name__, base)
    for place, owner in owners.items():
        yield from _find_in(place, owner)
    yield from _find_in("all modules", torch_module)


def list_modules() -> list[str]:
    """Return the modules whose functions and classes are inspected; needs no model."""
    modules = list[str]()
    for adapter in registry.MODELS:
        modules += (*adapter.SGLANG.outer_models, *adapter.SGLANG.modules)
    modules += [f"sglang.srt.layers.{name}" for name in LAYERS]
    return modules + compat.backends.list_backend_modules()


def _list_objects(model: nn.Module) -> dict[str, object]:
    """Return the objects that may see rows, by place: modules, and SGLang objects in them."""
    objects = {}
    towers = {name for adapter in registry.MODELS for name in adapter.SGLANG.towers}
    for name, module in model.named_modules():
        if name.partition(".")[0] in towers:
            continue
        objects[name or "the model"] = module
        for attribute, value in vars(module).items():
            if any(base.__module__.startswith("sglang.") for base in type(value).__mro__):
                objects[f"{name}.{attribute}"] = value
    return objects


def _find_in(place: str, owner: object) -> Iterator[ForeignCode]:
    """Yield third-party code among the own attributes of a module, class or object."""
    own = None
    if isinstance(owner, type):
        own = owner.__module__  # trust in a class includes its methods
    for name, value in getattr(owner, "__dict__", {}).items():
        called = [value]
        if name.endswith(HOOKS) and isinstance(value, dict):
            called = [*value.values()]
        for function in called:
            for module, defined in _find_definitions(function):
                if name not in NO_ROWS and module != own:
                    yield f"{place}.{name} runs", module, defined


def _find_definitions(part: Any) -> Iterator[tuple[str, str]]:
    """Yield the module and name of third-party code in this function, class or wrapper.

    Known code is looked through: for ``functools.partial(package.f)`` the result is ``package`` and
    ``f``. Of unknown code only the outermost is named.
    """
    kind = type(part)  # a proxy's ``__class__``, which ``isinstance`` reads, is another object's
    if not (callable(part) or hasattr(kind, "__get__")):
        return
    if issubclass(kind, type):
        kind = part
    module = kind.__module__
    name = kind.__name__
    if kind is FunctionType:
        module = str(part.__globals__.get("__name__"))
        name = part.__code__.co_name
    if not (module.partition(".")[0] in PACKAGES or _is_trusted(module, name)):
        yield module, name
        return
    for attribute in WRAPPED:
        yield from _find_definitions(getattr(part, attribute, None))
    if module == HOOK_REGISTRY:
        yield from _find_definitions(inspect.getclosurevars(part).nonlocals.get("hook"))


def _is_trusted(module: str, name: str) -> bool:
    return module in settings.current.trust or f"{module}.{name}" in settings.current.trust
