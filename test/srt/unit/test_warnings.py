"""A test fails on a warning that the package causes, in a process that it starts as well."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import ModuleType

import pytest

CALLER = "def call(function):\n    function()\n"


def deprecated() -> None:
    """Warn as libraries do, of the module that calls."""
    warnings.warn("it will go", DeprecationWarning, stacklevel=2)


def module(name: str) -> ModuleType:
    """A module of this name with a function ``call(function)``."""
    made = ModuleType(name)
    exec(CALLER, vars(made))
    return made


@pytest.mark.parametrize("name", ["", ".a_module", ".a_folder.a_module"])
def test_the_packages_own(name: str) -> None:
    with pytest.raises(DeprecationWarning, match="it will go"):
        module(f"sglang_gemma4_yoco{name}").call(deprecated)


@pytest.mark.parametrize("name", ["sglang.srt.a_module", "sglang_gemma4_yocoon"])
def test_others(name: str) -> None:
    module(name).call(deprecated)


@pytest.mark.parametrize("name", ["sglang_gemma4_yoco.a_module", "sglang.a_module"])
def test_another_process(name: str) -> None:
    code = f"""
import warnings
def deprecated():
    warnings.warn("it will go", DeprecationWarning, stacklevel=2)
names = {{"__name__": {name!r}}}
exec({CALLER!r}, names)
names["call"](deprecated)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    failed = name.startswith("sglang_gemma4_yoco.")
    assert (done.returncode, "it will go" in done.stderr) == (int(failed), failed)
