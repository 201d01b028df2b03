#!/usr/bin/env python3
"""What do the result files of ``bench_gpu.py`` say, for the README?

Reads ``benchmark/results/gpu_*.json``, prints a table in Markdown, and draws a picture of the
ratios. Where nothing has been measured on a GPU it says so, and draws nothing. Runs of the script
on a CPU are no GPU figures and are left out.

``--write README.md`` puts the table between the two marker lines of that file, ``--check
README.md`` tells by its exit status whether it stands there already.

    python scripts/docs/gpu_report.py
    python scripts/docs/gpu_report.py --write README.md --picture benchmark/gpu.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from generated import inserted, markdown

RESULTS = Path(__file__).resolve().parents[2] / "benchmark" / "results"
PART = "gpu figures"
NOT_MEASURED = "GPU figures are not measured yet: `scripts/bench_gpu.py` has not run on a GPU."


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        gain: off / on, above 1 where on is better; None for what is no ratio.
    """

    machine: str
    model: str
    what: str
    off: str
    on: str
    gain: float | None
    ceiling: float | None = None


def load(directory: Path) -> list[dict[str, Any]]:
    """The documents that were measured on a GPU."""
    found = [json.loads(path.read_text()) for path in sorted(directory.glob("gpu_*.json"))]
    return [document for document in found if document["device_kind"] == "cuda"]


def rows(document: dict[str, Any]) -> Iterator[Row]:
    """The lines of one result file; parts that are not complete have none."""
    machine = f"{document['device']}, SGLang {document['sglang']}"

    def row(what: str, off: str, on: str, gain: float | None, ceiling: float | None = None) -> Row:
        return Row(machine, document["model"], what, off, on, gain, ceiling)

    summaries = {key: part["summary"] for key, part in document["parts"].items()}
    for key in ("a", "b"):
        for item in summaries.get(key) or []:
            load, off, on = item["load"], item["off"], item["on"]
            at_once = f"{load['concurrency']} at a time" if load["concurrency"] else "all at once"
            what = (
                f"{load['prompts']} x {load['tokens_in']} in / {load['tokens_out']} out, {at_once}"
            )
            yield row(
                f"{what}: duration",
                f"{off['duration']:.2f} s",
                f"{on['duration']:.2f} s",
                item["duration_ratio"],
            )
            yield row(
                f"{what}: median time to first token",
                f"{off['median_ttft_ms']:.0f} ms",
                f"{on['median_ttft_ms']:.0f} ms",
                item["ttft_ratio"],
            )
    for point in summaries.get("c") or []:
        off, on = point["off"]["median"], point["on"]["median"]
        yield row(
            f"one prefill of {point['load']['length']} tokens",
            f"{off * 1e3:.1f} ms",
            f"{on * 1e3:.1f} ms",
            point["ratio"],
            point["ceiling"],
        )
    for item in summaries.get("d") or []:
        off, on = item["off"]["peak_bytes"], item["on"]["peak_bytes"]
        yield row(
            f"peak memory of a prefill of {item['length']} tokens",
            f"{off / 2**20:.0f} MiB",
            f"{on / 2**20:.0f} MiB",
            off / on if on else None,
        )
    for item in summaries.get("e") or []:
        if not item["arriving"]:
            continue
        for percentile in ("p50_ms", "p95_ms"):
            off, on = item["off"][percentile], item["on"][percentile]
            yield row(
                f"inter-token latency while long prompts arrive, {percentile[:-3]}",
                f"{off:.1f} ms",
                f"{on:.1f} ms",
                off / on,
            )
    answers = summaries.get("g")
    if answers:
        yield row(
            f"greedy answers of {answers['tokens_each']} tokens that are the same",
            f"{answers['prompts']}",
            f"{answers['same_answer']}",
            None,
        )


def table(documents: Sequence[dict[str, Any]]) -> str:
    """All lines as Markdown, or one sentence when there are none."""
    lines = [row for document in documents for row in rows(document)]
    replays = [told for document in documents for told in replayed(document)]
    if not lines and not replays:
        return NOT_MEASURED
    cells = [
        [line.machine, line.model, line.what, line.off, line.on]
        + ["" if ratio is None else f"{ratio:.2f}" for ratio in (line.gain, line.ceiling)]
        for line in lines
    ]
    head = ("GPU", "model", "", "off", "on", "off / on", "ceiling")
    commits = sorted(
        {part["commit"] for document in documents for part in document["parts"].values()}
    )
    source = f"bf16, random weights, commit {', '.join(commits)}; `scripts/bench_gpu.py`."
    return "\n\n".join([*([markdown(head, cells, numbers=4)] if cells else []), *replays, source])


def replayed(document: dict[str, Any]) -> Iterator[str]:
    """What a document says of prefills that SGLang replays: a sentence, and a table of times."""
    summary = document["parts"].get("h", {}).get("summary")
    if not summary:
        return
    yield f"{document['model']} on {document['device']}, prefills that SGLang replays: " + (
        _verdict(summary)
    )
    if not summary["rows"]:
        return
    *others, both = ways = list(summary["rows"][0]["ms"])
    faster = f"{both}: faster than {' / '.join(others)}"
    head = ("tokens", *(f"{way}, ms (predicted)" for way in ways), faster, "answers", "as wanted")
    yield markdown(head, [_cells(row) for row in summary["rows"]], numbers=len(head))


def _verdict(summary: dict[str, Any]) -> str:
    if summary["recorded"]["failed"]:
        return f"they cannot be recorded ({summary['recorded']['failed']})."
    lengths = [row["length"] for row in summary["rows"]]
    wrong = [length for length in lengths if length not in summary["stock_right"]]
    if wrong:
        told = ", ".join(map(str, wrong))
        return f"**stock's own replays give other answers than its launches** at {told} tokens."
    return f"stock's own replays give the answers of its launches at {len(lengths)} lengths."


def _cells(row: dict[str, Any]) -> list[str]:
    predicted = row["predicted_ms"] or {}
    right = all(row["right"].values()) and row["same_cache"]
    return [
        str(row["length"]),
        *(
            f"{ms:.1f}" + (f" ({predicted[way]:.1f})" if way in predicted else "")
            for way, ms in row["ms"].items()
        ),
        " / ".join(f"{faster:.2f}" for faster in row["faster_than"].values()),
        "right" if right else "**wrong**",
        "yes" if row["as_wanted"] else "no",
    ]


def draw(documents: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw all ratios; tell whether there were any."""
    ratios = [row for document in documents for row in rows(document) if row.gain is not None]
    if not ratios:
        return False
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.35 * len(ratios)), layout="constrained")
    names = [f"{row.model}: {row.what} ({row.machine})" for row in ratios]
    places = range(len(ratios))
    axes.barh(places, [row.gain or 0 for row in ratios], label="off / on")
    known = [(place, row.ceiling) for place, row in zip(places, ratios, strict=True) if row.ceiling]
    if known:
        axes.plot([c for _, c in known], [p for p, _ in known], "k|", ms=14, label="ceiling")
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.set_yticks(places, names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("off / on: how many times better with fast prefill")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Print, and write what was asked for; 1 when ``--check`` finds another table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the ratios")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table there")
    parser.add_argument("--check", type=Path, metavar="FILE", help="is the table there?")
    args = parser.parse_args(argv)
    documents = load(args.results)
    content = table(documents)
    print(content)
    if args.picture is not None and not draw(documents, args.picture):
        print(f"nothing to draw: {args.picture} is not written", file=sys.stderr)
    try:
        if args.write is not None:
            args.write.write_text(inserted(args.write.read_text(), PART, content))
        if args.check is not None:
            text = args.check.read_text()
            if inserted(text, PART, content) != text:
                print(f"{args.check} is out of date: --write {args.check}", file=sys.stderr)
                return 1
    except ValueError as missing:
        print(f"error: {missing}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
