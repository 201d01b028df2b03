#!/usr/bin/env python3
"""What do the result files of ``bench_gpu.py`` say? README.md shows it as tables.

Reads ``benchmark/results/gpu_*.json``. Without a measurement on a GPU the README says that there is
none; results of a CPU are left out. Checks README.md, or with ``--write`` writes it; the exit
status is 1 if it is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import REPO
from generated import inserted, kept_up_to_date, markdown

RESULTS = REPO / "benchmark" / "results"
PART = "gpu figures"
NOT_MEASURED = "GPU figures are not measured yet: `scripts/bench_gpu.py` has not run on a GPU."

#: What is measured, off, on, and off / on where that is a ratio; of part c the ceiling too.
Row = tuple[Any, ...]


def load(directory: Path) -> list[dict[str, Any]]:
    """The documents that were measured on a GPU."""
    found = [json.loads(path.read_text()) for path in sorted(directory.glob("gpu_*.json"))]
    return [document for document in found if document["device_kind"] == "cuda"]


def rows(summaries: dict[str, Any]) -> Iterator[Row]:
    """The lines of one result file; parts that are not complete have none."""
    for item in [*(summaries.get("a") or ()), *(summaries.get("b") or ())]:
        load, off, on = item["load"], item["off"], item["on"]
        at_once = f"{load['concurrency']} at a time" if load["concurrency"] else "all at once"
        what = f"{load['prompts']} x {load['tokens_in']} in / {load['tokens_out']} out, {at_once}"
        seconds = (f"{way['duration']:.2f} s" for way in (off, on))
        yield f"{what}: duration", *seconds, item["duration_ratio"], None
        first = (f"{way['median_ttft_ms']:.0f} ms" for way in (off, on))
        yield f"{what}: median time to first token", *first, item["ttft_ratio"], None
    for point in summaries.get("c") or ():
        times = (f"{point[way]['median'] * 1e3:.1f} ms" for way in ("off", "on"))
        what = f"one prefill of {point['load']['length']} tokens"
        yield what, *times, point["ratio"], point["ceiling"]
    for item in summaries.get("d") or ():
        off, on = (item[way]["peak_bytes"] for way in ("off", "on"))
        memory = (f"{peak / 2**20:.0f} MiB" for peak in (off, on))
        what = f"peak memory of a prefill of {item['length']} tokens"
        yield what, *memory, off / on if on else None, None
    for item in summaries.get("e") or ():
        for percentile in ("p50", "p95") if item["arriving"] else ():
            off, on = (item[way][f"{percentile}_ms"] for way in ("off", "on"))
            what = f"inter-token latency while long prompts arrive, {percentile}"
            yield what, f"{off:.1f} ms", f"{on:.1f} ms", off / on, None
    if answers := summaries.get("g"):
        what = f"greedy answers of {answers['tokens_each']} tokens that are the same"
        yield what, f"{answers['prompts']}", f"{answers['same_answer']}", None, None


def table(documents: Sequence[dict[str, Any]]) -> str:
    """All lines as Markdown, or one sentence when there are none."""
    cells, replays = [], []
    for document in documents:
        machine = f"{document['device']}, SGLang {document['sglang']}"
        summaries = {key: part["summary"] for key, part in document["parts"].items()}
        for *words, gain, ceiling in rows(summaries):
            ratios = ("" if ratio is None else f"{ratio:.2f}" for ratio in (gain, ceiling))
            cells.append((machine, document["model"], *words, *ratios))
        if summary := summaries.get("h"):
            about = f"{document['model']} on {document['device']}, prefills that SGLang replays"
            replays += [f"{about}: {_verdict(summary)}", *_replayed(summary["rows"])]
    if not cells and not replays:
        return NOT_MEASURED
    head = ("GPU", "model", "", "off", "on", "off / on", "ceiling")
    commits = sorted(
        {part["commit"] for document in documents for part in document["parts"].values()}
    )
    source = f"bf16, random weights, commit {', '.join(commits)}; `scripts/bench_gpu.py`."
    return "\n\n".join([*([markdown(head, cells, numbers=4)] if cells else []), *replays, source])


def _verdict(summary: dict[str, Any]) -> str:
    if summary["prefill_graphs"]["failed"]:
        return f"they cannot be captured ({summary['prefill_graphs']['failed']})."
    lengths = [row["length"] for row in summary["rows"]]
    wrong = [length for length in lengths if length not in summary["stock_right"]]
    if wrong:
        tokens = ", ".join(map(str, wrong))
        return f"**stock's replays give other answers than its eager prefills** at {tokens} tokens."
    return f"stock's replays give the answers of its eager prefills at {len(lengths)} lengths."


def _replayed(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table of times beside what was predicted, if there are any."""
    if not rows:
        return
    *others, both = ways = list(rows[0]["ms"])
    faster = f"{both}: faster than {' / '.join(others)}"
    head = ("tokens", *(f"{way}, ms (predicted)" for way in ways), faster, "answers", "as wanted")
    yield markdown(head, map(_cells, rows), numbers=len(head))


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


def written(page: str) -> str:
    """``page`` with the figures as the files have them."""
    return inserted(page, PART, table(load(RESULTS)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the README, or write it; 1 if it is out of date."""
    return kept_up_to_date({REPO / "README.md": written}, __file__, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
