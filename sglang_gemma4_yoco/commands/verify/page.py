"""The report of ``verify`` for people: tables for a terminal, and a page in HTML."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_gemma4_yoco.commands.verify.compare import Times

_TEMPLATE = Path(__file__).with_name("page.html")
#: Of servers, by their key in ``times``.
SERVERS = {"off": "stock", "again": "stock again", "on": "fast"}
#: What stock is compared with, by the key in ``agreement``.
OTHERS = {
    "fast": "fast",
    "again": "itself, in identical batches",
    "stock": "itself, in other batches",
}
RULES = {
    "exact": "In float32 on a CPU tokens must be equal, and log-probabilities within 1e-3.",
    "noise floor": "Answers are judged by how far stock differs from itself.",
}
_TICKS = [float(f"{digit}e{power}") for power in range(-5, 5) for digit in (1, 2, 5)]
# Where the axes of the picture begin and end, which is 480 wide and 300 high.
_LEFT, _RIGHT, _BOTTOM, _TOP = 60, 450, 245, 25


class Table(NamedTuple):
    """A table of texts: the first row is its head; on the page, from ``numbers`` on are numbers."""

    title: str
    rows: list[list[str]]
    numbers: int = 1


def _tabulate_times(document: Mapping[str, Any]) -> Table:
    rows = [["prompt tokens", "stock / fast", *SERVERS.values()]]
    for point in document["times"]:
        row = [str(point["tokens"]), f"{point['ratio']:.2f}"]
        for way in SERVERS:
            row.append(_format_times(point[way]))
        rows.append(row)
    return Table("Time to first token, seconds: median (20th to 80th percentile)", rows)


def _format_times(times: Mapping[str, float]) -> str:
    return str(Times(**times))


def _tabulate_agreement(document: Mapping[str, Any]) -> Table:
    title = "Answers, and how far their log-probabilities differ"
    rows = [["prompts", "stock against", "same tokens", "on average", "at most"]]
    for kind, ways in document["agreement"].items():
        shown = kind
        for way, name in OTHERS.items():
            found = ways[way]
            if found["answers"]:
                equal = f"{found['equal_answers']}/{found['answers']}"
                mean = _format_difference(found["mean_logprob_diff"])
                largest = _format_difference(found["max_logprob_diff"])
                rows.append([shown, name, equal, mean, largest])
                shown = ""
    return Table(title, rows, 2)


def _format_difference(value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.2g}"


def _make_tables(document: Mapping[str, Any]) -> list[Table]:
    return [_tabulate_times(document), _tabulate_agreement(document)]


def _make_lists(document: Mapping[str, Any]) -> dict[str, list[str]]:
    left_out = [f"{kind}: {reason}" for kind, reason in document["left_out"].items()]
    return {
        "Too far from stock": document["problems"],
        "Stock differs from itself": document["stock_differs"],
        "Not tried": left_out,
    }


def describe_verdict(document: Mapping[str, Any]) -> str:
    """The verdict in one sentence."""
    if not document["agrees"]:
        return "Fast prefill was active, and the answers do NOT agree."
    if document["stock_differs"]:
        return "Fast prefill was active, and its answers differ no more than stock's own."
    return "Fast prefill was active, and the answers agree."


def describe_noise(document: Mapping[str, Any]) -> str:
    """What two runs of stock in identical batches have shown."""
    if document["stock_differs"]:
        return "Stock differs from itself in identical batches, which is not fast prefill's doing."
    return "Two runs of stock in identical batches agree."


def format_report(document: Mapping[str, Any]) -> str:
    """The tables and the verdict, for a terminal."""
    lines = []
    for table in _make_tables(document):
        lines += [table.title, *_align(table), ""]
    for title, items in _make_lists(document).items():
        for item in items:
            lines.append(f"{title}: {item}")
    lines.append(describe_noise(document))
    lines.append(f"{describe_verdict(document)} {RULES[document['rule']]}")
    return "\n".join(lines)


def _align(table: Table) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table.rows, strict=True)]
    lines = []
    for row in table.rows:
        line = ""
        for cell, width in zip(row, widths, strict=True):
            line += f"  {cell:{width}}"
        lines.append(line.rstrip())
    return lines


def render_page(document: Mapping[str, Any]) -> str:
    """The page: one HTML file that needs no network."""
    from jinja2 import Environment, StrictUndefined  # comes with PyTorch

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_TEMPLATE.read_text("utf-8")).render(
        document=document,
        verdict=describe_verdict(document),
        noise=describe_noise(document),
        rule=RULES[document["rule"]],
        tables=_make_tables(document),
        lists=_make_lists(document),
        servers=SERVERS,
        format_difference=_format_difference,
        format_times=_format_times,
        **_draw_axes(document["times"]),
    )


def _draw_axes(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The axes of several lengths, both logarithmic: where a value is, and the marked seconds."""
    least = min(point[way]["p20"] for point in points for way in SERVERS)
    most = max(point[way]["p80"] for point in points for way in SERVERS)
    ticks = _TICKS[bisect_right(_TICKS, least) - 1 : bisect_right(_TICKS, most) + 1]
    lengths = [point["tokens"] for point in points]
    return {
        "ticks": ticks,
        "x": _make_scale(lengths[0], lengths[-1], _LEFT, _RIGHT),
        "y": _make_scale(ticks[0], ticks[-1], _BOTTOM, _TOP),
    }


def _make_scale(low: float, high: float, start: int, end: int) -> Callable[[float], float]:
    def place(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return round(start + share * (end - start), 1)

    return place
