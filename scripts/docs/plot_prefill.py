#!/usr/bin/env python3
"""Draw how many times as fast a prefill is, by length, model and batch: benchmark/prefill.svg.

The picture shows stock's time divided by that of fast prefill, against the prompt length, with the
20th to 80th percentile as a bar; and its ceiling, stock's time divided by that of a prefill without
the tail, as a dashed line of the same colour. It is drawn from the result files
``prefill_*.json``, for light and for dark pages (prefill_dark.svg). Needs Matplotlib.

Checks the pictures, or with ``--write`` writes them; the exit status is 1 if one is out of date.
Another release of Matplotlib draws other ones.
"""

from __future__ import annotations

import io
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.generated import kept_up_to_date
from scripts.result_files import RESULTS

#: The pictures, and Matplotlib's style of each.
PICTURES = {
    RESULTS.with_name("prefill.svg"): "default",
    RESULTS.with_name("prefill_dark.svg"): "dark_background",
}
#: Shorter prompts are in the tables alone: they have nothing to skip, or run as stock.
SHORTEST = 8


def label_of(document: dict[str, Any], point: dict[str, Any]) -> str:
    """What a line is of, in words."""
    proportions = document["model"].removesuffix("_MINI")
    prompts = point["load"]["batch_size"]
    if prompts == 1:
        return f"proportions of {proportions}, one prompt"
    return f"proportions of {proportions}, {prompts} prompts"


def lines() -> dict[str, list[dict[str, Any]]]:
    """Points by their line's label, in the order of their lengths."""
    found = defaultdict(list)
    for path in sorted(RESULTS.glob("prefill_*.json")):
        document = json.loads(path.read_text())
        for point in document["points"]:
            if point["load"]["length"] >= SHORTEST:
                found[label_of(document, point)].append(point)
    return dict(sorted(found.items()))


def draw(style: str) -> str:
    """The picture in one of Matplotlib's styles: an SVG without a background."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context(), plt.style.context(style):
        mpl.rcParams["svg.hashsalt"] = "prefill"  # the same file from the same data
        return draw_lines()


def draw_lines() -> str:
    """Ratio and ceiling against prompt length, one colour for each model and batch size: an SVG."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for label, points in lines().items():
        points.sort(key=lambda point: int(point["load"]["length"]))
        lengths, ratios, ceilings, below, above = [], [], [], [], []
        for point in points:
            lengths.append(point["load"]["length"])
            ratios.append(point["ratio"])
            ceilings.append(point["ceiling"])
            # The slowest fifth of off against the fastest fifth of on, and the other way round.
            below.append(point["ratio"] - point["off"]["p20"] / point["on"]["p80"])
            above.append(point["off"]["p80"] / point["on"]["p20"] - point["ratio"])
        drawn = axes.errorbar(lengths, ratios, [below, above], marker="o", capsize=3, label=label)
        colour = drawn.lines[0].get_color()
        axes.plot(lengths, ceilings, "--", color=colour, label=f"{label}: ceiling")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("length of each prompt, tokens")
    axes.set_ylabel("time of prefill, stock / fast")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend(fontsize="small", ncols=2)
    output = io.StringIO()
    figure.savefig(output, format="svg", metadata={"Date": None}, transparent=True)
    plt.close(figure)
    return output.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the pictures, or write them; 1 if one is out of date."""
    pages = {picture: {"": partial(draw, style)} for picture, style in PICTURES.items()}
    return kept_up_to_date(pages, __file__, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
