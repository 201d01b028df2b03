#!/usr/bin/env python3
"""Write tables of README.md, benchmark/README.md and docs/upstream.md, from code and results.

- README.md: every setting, from ``sglang_gemma4_yoco/settings.py``.
- README.md and benchmark/README.md: what was measured on a CPU, from ``benchmark/results``.
- docs/upstream.md: the methods of SGLang that are wrapped or added, from ``loading/patch.py``.

Needs an environment with SGLang. Checks the pages, or with ``--write`` writes them; the exit
status is 1 if one is out of date.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import REPO
from generated import inserted, kept_up_to_date, markdown
from sglang_gemma4_yoco import settings

RESULTS = REPO / "benchmark" / "results"
MEASURED = {
    "E2B": "prefill_e2b-mini_cpu_sglang-0.5.23.json",
    "E4B": "prefill_e4b-mini_cpu_sglang-0.5.23.json",
}
LENGTHS = (128, 512, 2048)


def settings_table() -> str:
    """Every environment variable: its default, its values, and what they do."""
    rows = (
        (f"`{name}`", settings.unset(one), settings.accepted(one), one.metadata["help"])
        for name, one in settings.VARIABLES.items()
    )
    return markdown(("variable", "default", "values", "meaning"), rows)


def measured_table() -> str:
    """How many times as fast one prompt's prefill was, and the ceiling, by length and model."""
    rows = []
    for model, file in MEASURED.items():
        points = {
            point["load"]["length"]: point
            for point in json.loads((RESULTS / file).read_text())["points"]
            if point["load"]["batch_size"] == 1
        }
        ratios = (points[length] for length in LENGTHS)
        rows.append([model, *(f"{one['ratio']:.1f}x of {one['ceiling']:.1f}x" for one in ratios)])
    return markdown(("proportions of", *(f"{length} tokens" for length in LENGTHS)), rows)


def methods_table() -> str:
    """The methods of SGLang's classes that are wrapped, and those that are added, by class."""
    from sglang_gemma4_yoco.loading import patch, published

    wrapped, added = defaultdict(list), defaultdict(list)
    for patched, name in patch.WRAPPED:
        wrapped[patched].append(name)
    added[next(iter(patch.WRAPPED))[0]] = [name for name in vars(published) if "_yoco_" in name]
    rows = (
        (
            f"`{patched.__module__}.{patched.__name__}`",
            _names(wrapped[patched]),
            _names(added[patched]),
        )
        for patched in wrapped
    )
    return markdown(("class", "wrapped", "added"), rows)


def _names(methods: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in methods)


def readme(page: str) -> str:
    """``page`` with the tables of README.md."""
    return measurements(inserted(page, "settings", settings_table()))


def measurements(page: str) -> str:
    """``page`` with the table of benchmark/README.md."""
    return inserted(page, "cpu figures", measured_table())


def upstream(page: str) -> str:
    """``page`` with the table of docs/upstream.md."""
    return inserted(page, "methods", methods_table())


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the pages, or write them; 1 if one is out of date."""
    pages = {
        REPO / "README.md": readme,
        REPO / "benchmark" / "README.md": measurements,
        REPO / "docs" / "upstream.md": upstream,
    }
    return kept_up_to_date(pages, __file__, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
