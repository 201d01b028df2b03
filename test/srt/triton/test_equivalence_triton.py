"""The equivalence properties once more, on SGLang's real Triton backend.

All windows are 5 keys, shorter than most prompts: Triton's decode step by itself sees one key
fewer than its prefill does, which is the thing to get right here.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "forward"))

from test_equivalence import *  # noqa: F403 - its tests and fixtures, collected here
