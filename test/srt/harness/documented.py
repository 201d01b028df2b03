"""The samples of docs/operating.md: what commands print, and what a server logs."""

from __future__ import annotations

import re
from pathlib import Path

OPERATING = Path(__file__).resolve().parents[3] / "docs" / "operating.md"


def sample(name: str) -> str:
    """The sample between the marker lines of this name."""
    part = rf"<!-- sample of {name}: begin -->\n```text\n(.*?)\n```\n<!-- sample"
    [found] = re.findall(part, OPERATING.read_text(), re.DOTALL)
    return str(found)
