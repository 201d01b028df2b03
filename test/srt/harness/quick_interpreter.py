"""Triton's interpreter without the work that it does again for every call inside a kernel.

Before a kernel runs, the interpreter wraps each function of ``triton.language``; once more, with
the same outcome, before each function that the kernel calls. That is nearly half of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Outermost:
    """What the interpreter restores when the kernel has run."""

    def __init__(self, scope: Any, wrapped: set[ModuleType]) -> None:
        self._scope = scope
        self._wrapped = wrapped

    def restore(self) -> None:
        self._wrapped.clear()
        self._scope.restore()


def _wrapping_once(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    wrapped: set[ModuleType] = set()

    def patch_lang(fn: Any) -> Any:
        seen = {v for v in fn.__globals__.values() if isinstance(v, ModuleType)} & {tl, tl.core}
        if seen and seen <= wrapped:
            return interpreter._LangPatchScope()
        outermost = not wrapped
        wrapped.update(seen)
        scope = stock(fn)
        return _Outermost(scope, wrapped) if outermost else scope

    return patch_lang


def install() -> None:
    """Make it quick in this process, where this Triton restores what it has wrapped."""
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _wrapping_once(interpreter._patch_lang)
