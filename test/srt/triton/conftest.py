"""SGLang's real Triton kernels in Triton's interpreter: each file in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from own_process import OwnProcessFile, is_set_up

INTERPRETER = {"TRITON_INTERPRET": "1"}
# Files that need more than the interpreter.
_MORE = {"test_cuda_branches.py": {"GEMMA4_CPU_BRANCHES": "cuda"}}


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    """Have another process run the file, unless this one is set up for it."""
    environment = INTERPRETER | _MORE.get(module_path.name, {})
    if is_set_up(environment):
        return None
    return OwnProcessFile.from_parent(parent, path=module_path, environment=environment)
