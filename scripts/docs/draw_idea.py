#!/usr/bin/env python3
"""Draw the picture of README.md: layers by tokens, and which of them a prefill computes.

Checks both themes in docs/pictures, or with ``--write`` writes them; the exit status is 1 if one is
out of date. Another release of Matplotlib draws other files.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import REPO
from generated import kept_up_to_date

PICTURES = REPO / "docs" / "pictures"

LAYERS, FIRST_SHARED, TOKENS = 35, 15, 16  # E2B; the number of tokens is an example
# The same file each time, in which text stays text.
SETTINGS = {"backend": "Agg", "svg.hashsalt": "idea", "svg.fonttype": "none"}
THEMES = {
    "light": {"text": "#1f2328", "gap": "#ffffff", "computed": "#0969da", "skipped": "#d8dee4"},
    "dark": {"text": "#e6edf3", "gap": "#0d1117", "computed": "#4493f8", "skipped": "#30363d"},
}


def draw(theme: str) -> str:
    """Two panels: stock computes all cells, fast prefill only the last token's in shared layers.

    Returns:
        An SVG file.
    """
    colours = THEMES[theme]
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.9), sharey=True, layout="constrained")
    figure.patch.set_alpha(0)
    for axes, title in zip(panels, ("stock SGLang", "fast prefill"), strict=True):
        axes.bar(0, LAYERS, TOKENS, align="edge", color=colours["computed"])
        axes.set(xlim=(0, TOKENS), ylim=(0, LAYERS), xticks=[], facecolor="none")
        axes.set_yticks([0.5, FIRST_SHARED + 0.5, LAYERS - 0.5], [0, FIRST_SHARED, LAYERS - 1])
        axes.set_xlabel("tokens of the prompt →", color=colours["text"])
        axes.set_title(title, color=colours["text"], fontweight="bold")
        axes.tick_params(labelcolor=colours["text"], length=0)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("layers →", color=colours["text"])
    shared = LAYERS - FIRST_SHARED
    skipped = {"bottom": FIRST_SHARED, "align": "edge", "color": colours["skipped"]}
    panels[1].bar(0, shared, TOKENS - 1, **skipped)
    for axes in panels:
        axes.hlines(range(LAYERS), 0, TOKENS, color=colours["gap"], linewidth=2)
        axes.vlines(range(TOKENS), 0, LAYERS, color=colours["gap"], linewidth=2)
    panels[1].text(
        (TOKENS - 1) / 2,
        FIRST_SHARED + shared / 2,
        f"layers {FIRST_SHARED} to {LAYERS - 1} have no K and V:\nonly the last token is computed",
        **{"color": colours["text"], "ha": "center", "va": "center"},
    )
    output = io.StringIO()
    figure.savefig(output, format="svg", metadata={"Date": None})
    plt.close(figure)
    return output.getvalue()


def picture(theme: str) -> Path:
    """Where a theme's picture is."""
    return PICTURES / f"prefill_{theme}.svg"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check both pictures, or write them; 1 if one is out of date."""
    pages = {picture(theme): lambda _, theme=theme: draw(theme) for theme in THEMES}
    with mpl.rc_context(SETTINGS):
        return kept_up_to_date(pages, __file__, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
