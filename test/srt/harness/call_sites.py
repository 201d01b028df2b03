"""Calls made by the package's code, as reported by Python's profiler (``sys.setprofile``).

Calls of Python's own functions (``len``, ``dict.get``, ``contextlib``), and those that a garbage
collection makes, are left out.
"""

from __future__ import annotations

import builtins
import functools
import gc
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_gemma4_yoco import settings

PACKAGE = f"{Path(settings.__file__).parent}/"
STANDARD_LIBRARY = f"{sysconfig.get_paths()['stdlib']}/"
SGLANGS = "SGLang's "  # prefix of the callee's name, if it is SGLang's


@functools.cache
def is_of_package(file: str) -> bool:
    """Return True for a file of the package."""
    return file.startswith(PACKAGE)


@functools.cache
def is_of_python(file: str) -> bool:
    """Return True for a file of Python itself, or ``<string>``: a dataclass's methods."""
    return file.startswith("<") or (
        file.startswith(STANDARD_LIBRARY) and "site-packages" not in file
    )


def _call_of(frame: Any, event: str, called: Any) -> tuple[Any, str] | None:
    """Return the calling frame and the callee's name of a profiler's event, or None.

    Args:
        frame: the frame of the entered function (``call``), or of a C function's caller
            (``c_call``).
    """
    if event == "call":
        caller = frame.f_back
        if caller is None or not is_of_package(caller.f_code.co_filename):
            return None
        entered = frame.f_code
        # A collection may begin in any line, and calls these.
        collecting = [getattr(callback, "__code__", None) for callback in gc.callbacks]
        if is_of_python(entered.co_filename) or entered in collecting:
            return None
        owner = ""
        if "/sglang/srt/" in entered.co_filename:
            owner = SGLANGS
        return caller, f"{owner}{entered.co_qualname}"
    if event != "c_call" or not is_of_package(frame.f_code.co_filename):
        return None
    name = called.__qualname__
    if called.__module__ in sys.stdlib_module_names or hasattr(builtins, name.split(".")[0]):
        return None
    return frame, name


@contextmanager
def watched(on_call: Callable[[Any, str], object]) -> Iterator[None]:
    """Call ``on_call`` before each call of the package in the ``with`` block.

    It gets the calling frame and the callee's name; the calling line sees what it raises.
    """

    def profiler(*event: Any) -> None:
        call = _call_of(*event)
        if call is not None:
            on_call(*call)

    sys.setprofile(profiler)
    try:
        yield
    finally:
        sys.setprofile(None)
