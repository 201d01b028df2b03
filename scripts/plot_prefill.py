#!/usr/bin/env python3
"""Draw the prefill speedup by prompt length, on a CPU and on GPUs.

Two pictures show stock's time divided by fast prefill's, against the prompt length. Each is drawn
for light and for dark pages (``*_dark.svg``). Needs Matplotlib, each release of which draws a
different file.

- prefill.svg, from the result files ``prefill_*.json``: the ratio, with the 20th to 80th percentile
  as a bar; and its ceiling, stock's time divided by that of a prefill without the tail, as a dashed
  line of the same colour.
- predicted.svg, from ``predicted.json``: the model's prediction for an H200, with its range, and
  measurements on GPUs, our own (dots) and others' (crosses).
"""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import new_parser
from scripts.result_files import RESULTS, load_predictions, load_results

#: The fields of a prediction that are drawn.
DRAWN = ("tokens", "ratio", "low", "high")


def find_lines() -> dict[str, list[dict[str, Any]]]:
    """Return measured points by their line's label, sorted by length."""
    found = defaultdict(list)
    for document in load_results("prefill_*.json"):
        model = document["model"].removesuffix("_MINI")
        for point in document["points"]:
            prompts = point["load"]["batch_size"]
            found[f"proportions of {model}, batch of {prompts}"].append(point)
    for points in found.values():
        points.sort(key=lambda point: int(point["load"]["length"]))
    return dict(sorted(found.items()))


def draw(contents: Callable[[Any], None], style: str) -> str:
    """Return a picture in one of Matplotlib's styles: an SVG without a background."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context(), plt.style.context(style):
        mpl.rcParams["svg.hashsalt"] = "prefill"  # the same file from the same data
        figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
        contents(axes)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.legend(fontsize="small", ncols=2)
        output = io.StringIO()
        figure.savefig(output, format="svg", metadata={"Date": None}, transparent=True)
        plt.close(figure)
    return output.getvalue()


def label_ratios(axes: Any) -> None:
    """Label the axes of a picture of ratios."""
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="length of each prompt, tokens", ylabel="time of prefill, stock / fast")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)


def draw_measured(axes: Any) -> None:
    """Draw ratios and ceilings that were measured on a CPU."""
    for label, points in find_lines().items():
        draw_line(axes, label, points)
    label_ratios(axes)


def draw_predicted(axes: Any) -> None:
    """Draw the model's predictions for an H200, and measurements on GPUs."""
    document = load_predictions()
    for model, colour in (("E2B", "C0"), ("E4B", "C1")):
        cases = [case for case in document["H200"] if case["model"] == model]
        lengths, ratios, low, high = ([case[x] for case in cases] for x in DRAWN)
        axes.plot(lengths, ratios, color=colour, label=f"{model}, model of an H200")
        axes.fill_between(lengths, low, high, color=colour, alpha=0.2, linewidth=0)
        for case in document["cases"]:
            if case["model"] == model and case["way"] != "stock replayed":
                marker = "."
                if case["source"]:
                    marker = "x"
                axes.scatter(case["tokens"], case["ratio"], color=colour, marker=marker)
    for marker, whose in ((".", "this plugin on an H200"), ("x", "others, other GPUs and engines")):
        axes.scatter([], [], color="grey", marker=marker, label=f"measured: {whose}")
    label_ratios(axes)


def draw_line(axes: Any, label: str, points: list[dict[str, Any]]) -> None:
    """Draw ratio and ceiling of one model and batch size."""
    lengths, ratios, below, above = [], [], [], []
    for point in points:
        lengths.append(point["load"]["length"])
        ratios.append(point["ratio"])
        # Off's 20th percentile against on's 80th, and the other way round.
        below.append(point["ratio"] - point["off"]["p20"] / point["on"]["p80"])
        above.append(point["off"]["p80"] / point["on"]["p20"] - point["ratio"])
    drawn = axes.errorbar(lengths, ratios, [below, above], marker="o", capsize=3, label=label)
    ceilings = [point["ceiling"] for point in points]
    colour = drawn.lines[0].get_color()
    axes.plot(lengths, ceilings, "--", color=colour, label=f"{label}: ceiling")


_CONTENTS = {"prefill": draw_measured, "predicted": draw_predicted}
_STYLES = {".svg": "default", "_dark.svg": "dark_background"}
#: File -> function that draws its contents, and Matplotlib's style.
PICTURES = {
    RESULTS.with_name(name + end): (_CONTENTS[name], style)
    for name, (end, style) in product(_CONTENTS, _STYLES.items())
}


def main() -> None:
    """Write the pictures."""
    new_parser(__doc__).parse_args()
    for picture, (contents, style) in PICTURES.items():
        picture.write_text(draw(contents, style))


if __name__ == "__main__":
    main()
