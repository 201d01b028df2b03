"""SGLang's real Triton kernels in Triton's interpreter: each file in a process of its own."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from own_process import OwnProcessFile, is_set_up
from sglang_gemma4_reference import cuda_branches

INTERPRETER = {"TRITON_INTERPRET": "1"}
# Files that need more than the interpreter. What another SGLang than theirs collects of them is one
# skipped test, in the process that collects it: the other process would refuse to start.
_MORE = {"test_cuda_branches.py": {cuda_branches.VARIABLE: "cuda"}}
_RELEASE = {"test_cuda_branches.py": cuda_branches.SGLANG}


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    """Have another process run the file, unless this one is set up for it."""
    environment = INTERPRETER | _MORE.get(module_path.name, {})
    if module_path.name in _RELEASE and version("sglang") != _RELEASE[module_path.name]:
        return None
    if is_set_up(environment):
        return None
    return OwnProcessFile.from_parent(parent, path=module_path, environment=environment)
