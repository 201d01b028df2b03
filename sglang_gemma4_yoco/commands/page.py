"""The report of ``verify`` as one HTML file, which opens without a network."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from html import escape
from string import Template
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from sglang_gemma4_yoco.commands import table

if TYPE_CHECKING:
    from sglang_gemma4_yoco.commands.agreement import Comparison
    from sglang_gemma4_yoco.commands.verdict import Outcome

STOCK, FAST = "#6b7280", "#0f766e"
_LEAST = 1e-8  # a difference below it is drawn as this
_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { padding: .7rem 1rem; border-left: .4rem solid $colour; background: #f4f4f5; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #d4d4d8; text-align: right; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; }
pre { overflow-x: auto; background: #f4f4f5; padding: .7rem 1rem; font-size: .85rem; }
</style>
</head>
<body>
<h1>$title</h1>
<p class="verdict">$verdict</p>
$problems
<h2>Time to first token</h2>
$times_figure
$times
<h2>Answers</h2>
<p>Fast against stock, one prompt at a time and several at once, beside stock against itself in
other batches. KL is over the 20 likeliest tokens, all others taken as one, in nats.</p>
$agreement_figure
$agreement
<h2>What was run</h2>
$facts
<h2>Prefills of the fast server</h2>
$forwards
</body>
</html>
""")


def render(outcome: Outcome) -> str:
    """The whole page."""
    document = outcome.document
    distances = ("mean |Δlogp|", "max |Δlogp|", "mean KL", "max KL")
    headings = [heading for distance in distances for heading in (distance, "stock")]
    return _PAGE.substitute(
        title=escape(f"Gemma 4 fast prefill: {document['model']}"),
        colour=FAST if document["agrees"] else "#b91c1c",
        verdict=escape(table.verdict(document)),
        problems=_list(document["problems"]),
        times_figure=svg(times_figure(document["times"])),
        times=_html_table(
            ("prompt tokens", "stock, s", "fast, s", "stock / fast"),
            table.time_rows(document),
        ),
        agreement_figure=svg(agreement_figure(outcome.fast, outcome.noise)),
        agreement=_html_table(
            ("prompts", "same tokens", *headings),
            table.agreement_rows(document, (*table.DISTANCES, "max_kl")),
        ),
        facts=_html_table(
            ("", ""),
            (
                (key, str(document[key]))
                for key in ("model", "device", "dtype", "sglang", "package", "server_args", "rule")
            ),
        )
        + _list(f"not tried: {kind}: {why}" for kind, why in document["left_out"].items()),
        forwards=_html_table(
            ("what became of them", "prefills"),
            ((outcome, str(count)) for outcome, count in document["forwards"].items()),
        ),
    )


def _html_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _list(items: Iterable[str]) -> str:
    entries = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul>{entries}</ul>" if entries else ""


# ---------------------------------------------------------------- figures


def svg(figure: Figure) -> str:
    """A figure as an element of a page, its text as text."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", metadata=nothing)
    drawn = file.getvalue()
    return drawn[drawn.index("<svg") :]  # without what would name a DTD on another server


def times_figure(points: Sequence[dict[str, Any]]) -> Figure:
    """Time to first token by prompt length; the ratio stands above each length."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    lengths = [point["tokens"] for point in points]
    for way, name, colour in (("off", "stock", STOCK), ("on", "fast", FAST)):
        median = [point[way]["median"] for point in points]
        spread = [
            [point[way]["median"] - point[way]["p20"] for point in points],
            [point[way]["p80"] - point[way]["median"] for point in points],
        ]
        axes.errorbar(lengths, median, spread, marker="o", capsize=3, color=colour, label=name)
    for point in points:
        top = max(point["off"]["p80"], point["on"]["p80"])
        axes.annotate(
            f"{point['ratio']:.2f}x",
            (point["tokens"], top),
            textcoords="offset points",
            xytext=(0, 8),
            ha="center",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(0.1, 0.2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("prompt length, tokens")
    axes.set_ylabel("time to first token, seconds")
    axes.legend()
    return figure


def agreement_figure(fast: dict[str, Comparison], noise: dict[str, Comparison]) -> Figure:
    """What share of the log-probabilities differs by at most so much."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for compared, name, colour in (
        (noise, "stock against stock", STOCK),
        (fast, "fast against stock", FAST),
    ):
        apart = sorted(
            max(value, _LEAST)
            for one in compared.values()
            for value in one.logprobs
            if math.isfinite(value)
        )
        if apart:
            shares = [(i + 1) / len(apart) for i in range(len(apart))]
            axes.step([_LEAST, *apart], [0.0, *shares], where="post", color=colour, label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"difference of two log-probabilities (equal ones at {_LEAST:g})")
    axes.set_ylabel("share of log-probabilities")
    axes.legend(loc="lower right")
    return figure
