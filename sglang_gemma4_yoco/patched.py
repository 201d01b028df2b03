"""Attributes of single objects, replaced and put back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give ``owner`` these attributes in the ``with`` block, then restore the old ones.

    They go into the instance's ``__dict__``, where ``nn.Module.__call__`` finds a method before the
    class's; other instances, and the class, are untouched. ``owner`` may be a Python module. It is
    SGLang's or PyTorch's: who wants another object of this package makes one.
    """
    own = owner.__dict__
    before: dict[str, object] = {}
    for name in attributes:
        before[name] = own.get(name, _ABSENT)
    own.update(attributes)
    try:
        yield
    finally:
        own.update(before)
        for name, value in before.items():
            if value is _ABSENT:
                del own[name]
