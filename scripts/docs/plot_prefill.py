#!/usr/bin/env python3
"""Draw benchmark/prefill.svg: how many times as fast a prefill is, by length, model and batch.

The picture shows the ratio off/on against the prompt length, with the 20th to 80th percentile as a
bar, and the ceiling off/front-only as a dashed line of the same colour, from the result files
``prefill_*.json``. Needs Matplotlib.

Checks the picture, or with ``--write`` writes it; the exit status is 1 if it is out of date.
Another release of Matplotlib draws another one.
"""

from __future__ import annotations

import io
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from generated import kept_up_to_date
from result_files import RESULTS

PICTURE = RESULTS.with_name("prefill.svg")


def lines() -> dict[str, list[dict[str, Any]]]:
    """Points by their line's label, in the order of their lengths."""
    found = defaultdict(list)
    for path in sorted(RESULTS.glob("prefill_*.json")):
        document = json.loads(path.read_text())
        for point in document["points"]:
            found[f"{document['model']}, batches of {point['load']['batch_size']}"].append(point)
    return {label: found[label] for label in sorted(found)}


def draw() -> str:
    """Ratio and ceiling against prompt length, one colour for each model and batch size: an SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "prefill"  # the same file from the same data
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
    axes.set_xlabel("prompt length, tokens")
    axes.set_ylabel("time of prefill, off / on")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend(fontsize="small", ncols=2)
    output = io.StringIO()
    figure.savefig(output, format="svg", metadata={"Date": None})
    plt.close(figure)
    return output.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the picture, or write it; 1 if it is out of date."""
    return kept_up_to_date({PICTURE: {"": draw}}, __file__, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
