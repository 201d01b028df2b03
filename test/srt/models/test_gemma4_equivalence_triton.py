"""The equivalence properties once more, on SGLang's real Triton backend in Triton's interpreter.

Triton decides when it is imported whether it interprets, hence a process of its own. All windows
are 5 keys, shorter than most prompts: Triton's decode step by itself sees one key fewer than its
prefill does, which is the thing to get right here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_same_properties_hold_on_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_gemma4_equivalence.py"],
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "6 passed" in done.stdout
