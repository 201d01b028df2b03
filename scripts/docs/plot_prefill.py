#!/usr/bin/env python3
"""What do the files of ``bench_prefill.py`` say? A picture, and the tables of benchmark/results.

The picture shows the ratio off/on against the prompt length, with the 20th to 80th percentile as a
bar, and the ceiling off/front-only as a dashed line of the same colour. Only batches of prompts
that read no logprobs are drawn. The tables have all batches: ``prefill.md`` those of the files
``prefill_*.json``, and so on.

Checks these pages and benchmark/prefill.svg, or with ``--write`` writes them; the exit status is 1
if one is out of date. Another release of Matplotlib draws another picture.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import REPO
from generated import inserted, kept_up_to_date

mpl.use("Agg")
# The same file from the same data.
mpl.rcParams["svg.hashsalt"] = "prefill"

RESULTS = REPO / "benchmark" / "results"
PICTURE = RESULTS.with_name("prefill.svg")
KINDS = ("prefill", "threshold", "host")  # of result files; each has a page
PART = "files"  # of a page

COLUMNS = {
    "length": "tokens",
    "batch_size": "prompts",
    "decoding": "decoding",
    "read": "read",
    "off": "off, ms",
    "on": "on, ms",
    "front": "front only, ms",
    "ratio": "off/on",
    "ceiling": "ceiling",
    "realised": "realised",
    "max_logit_difference": "max. logit difference",
}


def read(document: dict[str, Any]) -> tuple[dict[str, Any], pd.DataFrame]:
    """A document of ``bench_prefill.py``, and its points as a table with one row per batch."""
    points = pd.json_normalize(document["points"])
    points.columns = [name.removeprefix("load.") for name in points.columns]
    return document, points


def spread(points: pd.DataFrame, way: str) -> pd.Series[str]:
    """``median (p20-p80)`` in milliseconds."""
    return points.apply(
        lambda p: "{:.0f} ({:.0f}-{:.0f})".format(
            *(p[f"{way}.{quantile}"] * 1e3 for quantile in ("median", "p20", "p80"))
        ),
        axis=1,
    )


def markdown(document: dict[str, Any], points: pd.DataFrame) -> str:
    """One file's table, below the words that say where it comes from."""
    active = points["path"].str.startswith("active")
    table = points.assign(
        off=spread(points, "off"),
        on=spread(points, "on"),
        front=spread(points, "front"),
        ratio=points["ratio"].map("{:.2f}".format),
        ceiling=points["ceiling"].map("{:.2f}".format),
        realised=points["realised"].map("{:.0%}".format).where(active, "stock: " + points["path"]),
        max_logit_difference=points["max_logit_difference"].map("{:.0e}".format),
    )
    shown = [name for name in COLUMNS if name not in ("decoding", "read") or points[name].any()]
    gate, host = document["gate"], host_markdown(document)
    return "\n".join(
        [
            f"SGLang {document['sglang']}, torch {document['torch']}, {document['device']}, "
            f"{document['dtype'].removeprefix('torch.')}, commit `{document['commit']}`, attention "
            f"by `{document['attention_backend']}`.",
            "",
            f"```bash\n{document['command']}\n```",
            "",
            table[shown].rename(columns=COLUMNS).to_markdown(index=False, disable_numparse=True),
            "",
            f"Added to a prefill that falls back: {gate['ineligible_prefill_us']:.1f} us; "
            f"to an eager decode step: {gate['decode_us']:.2f} us.",
            *(["", "The host in one forward:", "", host] if host else []),
        ]
    )


def host_markdown(document: dict[str, Any]) -> str:
    """What the host does in each batch of a document, by way; empty where that is not known."""
    rows = [
        _host_row(point["load"], way, work, point["host"]["off"]["operations"])
        for point in document["points"]
        for way, work in point.get("host", {}).items()
    ]
    return str(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)) if rows else ""


def _host_row(load: dict[str, Any], way: str, work: dict[str, Any], stock: int) -> dict[str, str]:
    operations, seconds = work["operations"], work["seconds"]
    share = "" if way == "off" else f" ({operations / stock:.0%})"
    counted = work["operations_by_region"]
    return {
        "tokens": str(load["length"]),
        "prompts": str(load["batch_size"]),
        "way": way,
        "operations": f"{operations}{share}",
        "replays": str(work["replays"]),
        "Triton launches": str(work["triton_launches"]),
        "device reads": str(work["device_reads"]),
        **{
            f"{region}, ms (operations)": f"{seconds[region] * 1e3:.2f} ({counted[region]})"
            for region in seconds
        },
        "outside of layers, ms": _fine_spread(work["outside_of_layers"]),
        "added there, ms": "" if way == "off" else _fine_spread(work["added_outside"]),
        "all, ms": f"{sum(seconds.values()) * 1e3:.1f}",
    }


def _fine_spread(seconds: dict[str, float]) -> str:
    """``median (p20 to p80)`` in milliseconds, for times below one, which may be negative."""
    return "{median:.2f} ({p20:.2f} to {p80:.2f})".format(
        **{name: value * 1e3 for name, value in seconds.items()}
    )


def draw(files: Sequence[tuple[dict[str, Any], pd.DataFrame]]) -> str:
    """Ratio and ceiling against prompt length, one colour for each model and batch size: an SVG."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    lines = pd.concat([points.assign(model=document["model"]) for document, points in files])
    lines = lines[(lines["decoding"] == 0) & (lines["read"] == 0)]
    for (model, prompts), line in lines.groupby(["model", "batch_size"]):
        line = line.sort_values("length")
        # The slowest fifth of off against the fastest fifth of on, and the other way round.
        bounds = [
            line["ratio"] - line["off.p20"] / line["on.p80"],
            line["off.p80"] / line["on.p20"] - line["ratio"],
        ]
        label = f"{model}, {prompts} prompt{'s' if prompts > 1 else ''}"
        drawn = axes.errorbar(
            line["length"], line["ratio"], bounds, marker="o", capsize=3, label=label
        )
        colour = drawn.lines[0].get_color()
        axes.plot(line["length"], line["ceiling"], "--", color=colour, label=f"{label}: ceiling")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("prompt length, tokens")
    axes.set_ylabel("time of prefill, off / on")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend(fontsize="small", ncols=2)
    axes.set_title(", ".join(sorted({f"{d['device']}, {d['dtype']}" for d, _ in files})))
    output = io.StringIO()
    figure.savefig(output, format="svg", metadata={"Date": None})
    plt.close(figure)
    return output.getvalue()


def results(kind: str) -> dict[str, tuple[dict[str, Any], pd.DataFrame]]:
    """The result files of a kind, by name, as ``read`` has them."""
    paths = sorted(RESULTS.glob(f"{kind}_*.json"))
    return {path.name: read(json.loads(path.read_text())) for path in paths}


def written(kind: str, page: str) -> str:
    """``page`` with the table of each result file of a kind."""
    files = (f"## `{name}`\n\n{markdown(*file)}" for name, file in results(kind).items())
    return inserted(page, PART, "\n\n".join(files))


def drawn(_: str) -> str:
    """The picture of all measurements of prefills."""
    return draw([*results("prefill").values()])


def main(arguments: Sequence[str] | None = None) -> int:
    """Check pages and picture, or write them; 1 if one is out of date."""
    pages = {RESULTS / f"{kind}.md": partial(written, kind) for kind in KINDS}
    return kept_up_to_date(pages | {PICTURE: drawn}, __file__, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
