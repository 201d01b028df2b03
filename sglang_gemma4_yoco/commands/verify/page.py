"""The report of ``verify`` for people: tables, and a page with two pictures."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import IO, Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Column, Table

from sglang_gemma4_yoco.commands.verify.compare import Compared, Times

COLOURS = {"stock": "#6b7280", "fast": "#0f766e"}
_LEAST = 1e-8  # a difference below it is drawn as this

_RULES = {
    "exact": "float32 on a CPU: tokens equal, log-probabilities within 1e-3",
    "noise floor": "judged by how far stock differs from itself",
}


def print_report(document: Mapping[str, Any], file: IO[str] | None = None) -> Console:
    """Print the tables and the verdict, on stdout or into a file; returns the console used."""
    console = Console(file=file, record=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 110
    number = partial(Column, justify="right")
    headings = ("same tokens", "mean |dlogp|", "stock", "max |dlogp|", "stock")
    title = "Answers: fast against stock, and stock against itself in other batches"
    table = Table("prompts", *map(number, headings), title=title)
    for kind, found in document["agreement"].items():
        fast, stock = found["fast"], found["stock"]
        row = [kind, f"{fast['equal_answers']}/{fast['answers']}"]
        for key in ("mean_logprob_diff", "max_logprob_diff"):
            for way in (fast, stock):
                shown = "-"
                if way[key] is not None:
                    shown = f"{way[key]:.1e}"
                row.append(shown)
        table.add_row(*row)
    console.print(table)
    title = "Time to first token in seconds: median (20th to 80th percentile)"
    table = Table(*map(number, ("prompt tokens", "stock", "fast", "stock / fast")), title=title)
    for point in document["times"]:
        off, on = (str(Times(**point[way])) for way in ("off", "on"))
        table.add_row(str(point["tokens"]), off, on, f"{point['ratio']:.2f}")
    console.print(table)
    for name, forwards in document["rounds"].items():
        outcomes = "; ".join(f"{outcome}: {count}" for outcome, count in forwards.items())
        console.print(f"Prefills of the fast server, {name}: {outcomes}")
    for kind, reason in document["left_out"].items():
        console.print(f"Not tried: {kind}: {reason}")
    agree, style = "THE ANSWERS DO NOT AGREE", "bold red"
    if document["agrees"]:
        agree, style = "the answers agree", "green"
    rule = _RULES[document["rule"]]
    console.print(f"Fast prefill was active, and {agree} ({rule}).", style=style)
    for problem in document["problems"]:
        console.print(f"  {problem}", style="red")
    return console


def render_page(document: Mapping[str, Any], fast: Compared, noise: Compared) -> str:
    """The page: tables and two pictures in one HTML file that needs no network."""
    console = print_report(document, io.StringIO())
    for key in ("model", "device", "dtype", "sglang", "package", "server_args", "repeats"):
        console.print(f"{key}: {document[key]}")
    title = escape(f"Gemma 4 fast prefill: {document['model']}")
    figure = Figure(figsize=(7.5, 8.4), layout="constrained")
    times, differences = figure.subplots(2)
    _draw_times(times, document["times"])
    _draw_differences(differences, {"stock": noise, "fast": fast})
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    _, tag, svg = drawn.getvalue().partition("<svg")  # before it: a DTD on another server
    head = f"<head><title>{title}</title>"
    page = console.export_html(inline_styles=True).replace("<head>", head)
    return page.replace("</body>", f"{tag}{svg}</body>")


def _draw_times(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    """Time to first token by prompt length, with the ratio above each length."""
    lengths = [point["tokens"] for point in points]
    for way, name in (("off", "stock"), ("on", "fast")):
        low, median, high = ([p[way][key] for p in points] for key in ("p20", "median", "p80"))
        axes.plot(lengths, median, marker="o", color=COLOURS[name], label=name)
        axes.vlines(lengths, low, high, color=COLOURS[name])
    for point in points:
        above = (point["tokens"], max(point["off"]["p80"], point["on"]["p80"]))
        axes.annotate(f"{point['ratio']:.2f}x", above, ha="center", va="bottom")
    axes.loglog()
    axes.margins(0.1, 0.2)
    axes.set_xticks(lengths, lengths)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set(xlabel="prompt length, tokens", ylabel="time to first token, seconds")
    axes.legend(loc="upper left")


def _draw_differences(axes: Any, compared: Mapping[str, Compared]) -> None:
    """What share of the log-probabilities differs by at most so much."""
    for name, kinds in compared.items():
        logprobs = [value for one in kinds.values() for value in one.logprobs]
        shown = [max(value, _LEAST) for value in logprobs if math.isfinite(value)] or [_LEAST]
        axes.ecdf(shown, color=COLOURS[name], label=f"{name} against stock")
    axes.set_xscale("log")
    what = f"difference of two log-probabilities (equal ones at {_LEAST:g})"
    axes.set(xlabel=what, ylabel="share of log-probabilities")
    axes.legend(loc="upper left")
