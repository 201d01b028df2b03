"""Temporary attributes of single objects."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set these attributes on ``owner`` in the ``with`` block, then restore the old ones.

    They go into the instance's ``__dict__``, where ``nn.Module.__call__`` finds a method before the
    class's; other instances and the class are untouched. ``owner`` is an object of SGLang or
    PyTorch, or a Python module; objects of this package are copied instead.

    An attribute that PyTorch keeps elsewhere, such as an ``nn.ModuleList`` in ``_modules``, is
    shadowed: ``nn.Module`` looks there only if ``__dict__`` lacks the name. So ``patched(model,
    layers=[...])`` replaces the layers with a plain list, and the end of the block shows the module
    list again. ``named_modules()`` and ``state_dict()`` do not see the replacement.
    """
    own = owner.__dict__
    before = {}
    for name in attributes:
        if name in own:
            before[name] = own[name]
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)
