"""Types of fixtures that are functions (``conftest.py`` has the fixtures), and parameters."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import pytest

from sglang_gemma4_reference.checkpoint import Gemma4Shape

#: Changes something, given by name, for the rest of the test.
Change = Callable[..., None]
#: Returns the path of a random Gemma 4 of a shape.
Checkpoints = Callable[[Gemma4Shape], Path]
#: Returns the package's log lines so far, at a level or above.
Said = Callable[..., list[str]]


def left_to_release(names: Iterable[str], *, but: Container[str]) -> list[Any]:
    """Return these names as a test's parameters; a default run has only those in ``but``."""
    return [pytest.param(name, marks=[pytest.mark.release] * (name not in but)) for name in names]
