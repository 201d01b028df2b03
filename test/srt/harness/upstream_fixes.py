"""SGLang with the fixes of ``docs/upstream``, applied to its own functions."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPORTS = Path(__file__).resolve().parents[3] / "docs" / "upstream"


def fixed(function: Callable[..., Any], report: Path) -> Any:
    """Return ``function`` with the changes of the report's diff made in its source."""
    [diff] = re.findall(r"```diff\n(.*?)```", report.read_text(), re.DOTALL)
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] != other) for other in "+-")
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"the diff in {report.name} does not apply to this release"
    made: dict[str, Any] = {}
    exec(textwrap.dedent(source.replace(old, new)), function.__globals__, made)
    return made[function.__name__]
