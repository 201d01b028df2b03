"""Wrap SGLang's methods, and add the two helpers of ``pr27183`` to Gemma 4.

The methods are the forwards of text models, and those of ``runner_methods`` and ``reports``. A text
model for which SGLang lacks a symbol is left unpatched; the others are patched.

Methods are replaced, not classes, so modules that imported a class by name are patched too.

These methods run in every server, whatever model it serves. So each calls this package inside
``guard.guarded``, which contains errors. ``core`` guards a text model's forward.
"""

from sglang_gemma4_yoco import compat, log
from sglang_gemma4_yoco.compat import Method, TextModel
from sglang_gemma4_yoco.core import eligibility, forward
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.startup import pr27183, reports, runner_methods

#: The wrapped methods, except for the forwards of text models.
WRAPPED = runner_methods.WRAPPED | reports.WRAPPED
#: True once SGLang is patched in this process.
installed = False


def patch_sglang() -> None:
    """Patch SGLang's classes in this process.

    Raises:
        compat.release.IncompatibleError: the installed SGLang is not supported, or already
            patched; nothing is changed.
    """
    global installed
    compat.names.check_names(eligibility.FIELDS_BY_NAME)
    # Look up all of them first: if SGLang lacks one, nothing is changed.
    methods = {}
    for model in _find_cuttable_models():
        methods[model, "forward"] = wrap_forward(model)
    for (owner, name), wrap in WRAPPED.items():
        methods[owner, name] = wrap(getattr(owner, name))
    for (owner, name), method in (methods | pr27183.list_helpers()).items():
        setattr(owner, name, method)
    installed = True


def _find_cuttable_models() -> list[type[TextModel]]:
    """Return the text models whose symbols SGLang has; log what the others lack."""
    models = registry.list_cuttable_models()
    names = [adapter.SGLANG for adapter in registry.MODELS]
    reasons = list(filter(None, map(compat.names.find_missing, names)))
    if not models:
        raise compat.release.IncompatibleError(" ".join(map(str, reasons)))
    for reason in reasons:
        log.log_warning(f"YOCO fast prefill is off for one model: {reason}")
    return models


def wrap_forward(model: type[TextModel]) -> Method:
    """Return the forward of a text model's class, wrapped to cut prefills.

    Unnecessary once the model itself keeps only the rows that are read (#27183).

    Raises:
        compat.release.IncompatibleError: it is already wrapped.
    """
    if forward.is_wrapped(model.forward):
        raise compat.release.IncompatibleError(f"{model.__name__}.forward is patched already")
    return forward.wrap_model_forward(model.forward)
