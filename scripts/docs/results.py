#!/usr/bin/env python3
"""What do the result files say? One table for each question, in benchmark/results/README.md.

Reads all files of ``benchmark/results``. Below each table is the command that made its figures, and
whether the package has changed since. Also writes the table of releases in docs/compatibility.md.
Checks these pages, or with ``--write`` writes them; the exit status is 1 if one is out of date.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.environment import REPO
from scripts.generated import Parts, kept_up_to_date, markdown
from scripts.result_files import RESULTS, package_of

NOT_MEASURED = "Not measured yet: `scripts/bench_gpu.py` has not run on a GPU."
Document = dict[str, Any]


def load(pattern: str) -> dict[str, Document]:
    """The result files whose names match, by name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))}


def sources(files: dict[str, Document]) -> str:
    """Where figures come from, and whether they are of this package."""
    lines, current = [], package_of()
    for name, document in files.items():
        age = "the package as it is"
        if document.get("package") != current:
            age = "**an earlier package**"
        about = f"`{name}`: {age}, commit `{document['commit']}`"
        if "device" in document:
            about += f", SGLang {document['sglang']}, {document['device']}"
        lines.append(f"- {about}")
        if "command" in document:
            lines.append(f"\n  `{document['command']}`")
    return "\n".join(lines)


def table_of(
    pattern: str, head: Sequence[str], rows: Callable[[Document], Iterator[list[object]]]
) -> str:
    """A table of all files whose names match, and where their figures come from."""
    files = load(pattern)
    if not files:
        return NOT_MEASURED
    cells = [row for document in files.values() for row in rows(document)]
    return f"{markdown(head, cells, numbers=len(head) - 2)}\n\n{sources(files)}"


def milliseconds(times: dict[str, float]) -> str:
    """``median (p20-p80)``."""
    median, low, high = times["median"] * 1e3, times["p20"] * 1e3, times["p80"] * 1e3
    return f"{median:.0f} ({low:.0f}-{high:.0f})"


PREFILL = ("model", "batch", "off, ms", "on, ms", "off/on, of at most", "realised")


def prefill_rows(document: Document) -> Iterator[list[object]]:
    """Batches: times off and on, their ratio and its ceiling."""
    for point in document["points"]:
        load, times = point["load"], [milliseconds(point["off"]), milliseconds(point["on"])]
        batch = f"{load['batch_size']} x {load['length']} tokens"
        if load["decoding"]:
            batch += f", {load['decoding']} decoding"
        if load["read"]:
            batch += f", {load['read']:.0%} read"
        realised = f"stock: {point['path']}"
        if point["path"].startswith("active"):
            realised = f"{point['realised']:.0%}"
        ratio = f"{point['ratio']:.2f} of {point['ceiling']:.2f}"
        yield [document["model"], batch, *times, ratio, realised]


HOST = ("batch", "way", "operations", "replays", "Triton launches", "device reads")


def host_rows(document: Document) -> Iterator[list[object]]:
    """What the host does in each way."""
    for point in document["points"]:
        batch = f"{document['model']}, {point['load']['length']} tokens"
        for way, work in point["host"].items():
            share = work["operations"] / point["host"]["off"]["operations"]
            counts = (work["replays"], work["triton_launches"], work["device_reads"])
            yield [batch, way, f"{work['operations']} ({share:.0%})", *counts]


CHECKS = ("broken", "least found on", "models", "found, in multiples of the bound, at least")


def check_rows(document: Document) -> Iterator[list[object]]:
    """What the check at start has found of each breakage."""
    for name, found in document["breakages"].items():
        yield [name, found["on"], found["models"], found["smallest"]]


GPU_LOAD = ("what", "which", "off", "on", "off/on")
GPU_TIMES = {"mean": "mean", "median": "50", "p95": "95", "p99": "99"}


def gpu_load_figures(found: dict[str, Any]) -> dict[str, float]:
    """What one server took: the duration, first tokens, and tokens of requests that decode."""
    figures = {"duration, s": statistics.median(found["seconds"])}
    for kind, times in {"first token": found["ttft_ms"], "between tokens": found["itl_ms"]}.items():
        for name, p in GPU_TIMES.items():
            figures[f"{kind}, {name}, ms"] = times[p]
    for name, sizes in found["batches"][0].items():  # of the first run
        figures[f"{name}, mean"] = sizes["mean"]
    return figures


def gpu_load_rows(document: Document) -> Iterator[list[object]]:
    """Loads over HTTP, stock and fast."""
    load = f"{document['requests']} x {document['prompt']} in, {document['answer']} out"
    for point in document["points"]:
        which = f"{document['model']}, {point['rate']} requests/s, mixed chunks {point['mixed']}"
        fast = gpu_load_figures(point["on"])
        for what, off in gpu_load_figures(point["off"]).items():
            if what in fast:  # SGLang logs one decode step in forty, or none
                on = fast[what]
                yield [f"{load}: {what}", which, f"{off:.1f}", f"{on:.1f}", f"{off / on:.2f}"]


GPU_REPLAYED = ("model, tokens", "answers", "off", "off replayed", "on", "on replayed")


def gpu_replayed_rows(document: Document) -> Iterator[list[object]]:
    """Prefills that SGLang replays: milliseconds beside the predicted ones."""
    predicted = json.loads((REPO / "benchmark" / "predicted_h100.json").read_text())
    for point in document["points"]:
        length, answer = point["load"]["length"], "the same token"
        times = {"off": point["off"], "on": point["on"]}
        for way, seen in point["replayed"].items():
            times[way] = seen["times"]
            if not seen["same_tokens"]:
                answer = "**another token**"
        expected = predicted.get(document["model"], {}).get(str(length), {})
        cells: list[object] = []
        for way in GPU_REPLAYED[2:]:
            cell = "not timed"  # not captured, or on a CPU
            if times.get(way):
                cell = f"{times[way]['median'] * 1e3:.1f}"
            if way in expected:
                cell += f" ({expected[way]:.1f})"
            cells.append(cell)
        yield [f"{document['model']}, {length}", answer, *cells]


GPU_FORWARD = ("model", "tokens", "off", "on")


def peak(found: dict[str, Any]) -> str:
    """The peak memory of a prefill."""
    return f"{found['peak_bytes'] / 2**20:.0f} MiB"


def spent(found: dict[str, Any]) -> str:
    """Where the time of a prefill goes."""
    host = f"host {found['host_ms']:.1f} of {found['whole_ms']:.1f} ms"
    return f"{host}, device idle {found['device_idle_ms']:.1f} ms, {found['kernels']} kernels"


def gpu_forward_rows(
    told: Callable[[dict[str, Any]], str], document: Document
) -> Iterator[list[object]]:
    """What ``told`` says of single forwards."""
    for point in document["points"]:
        yield [document["model"], point["length"], told(point["off"]), told(point["on"])]


def load_sources() -> str:
    """Where the figures under load come from, which benchmark/README.md shows."""
    return sources(load("random_workload_*.json") | load("latency_*.json"))


def releases() -> str:
    """Which releases of SGLang have passed."""
    entries = json.loads((RESULTS / "version_matrix.json").read_text())
    head = ("sglang", "torch", "python", "passed", "skipped", "failed")
    age, current = "of the package as it is", package_of()
    rows, commits = [], dict[str, None]()
    for entry in entries:
        rows.append([entry[column] for column in head])
        commits[entry["commit"]] = None
        if entry["package"] != current:
            age = "of **an earlier package**"
    head = ("SGLang", "torch", "Python", *head[3:])
    return f"{markdown(head, rows, numbers=3)}\n\nCommit `{'`, `'.join(commits)}`, {age}."


PARTS: Parts = {
    "prefill": partial(table_of, "prefill_*.json", PREFILL, prefill_rows),
    "threshold": partial(table_of, "threshold_*.json", PREFILL, prefill_rows),
    "load": load_sources,
    "host": partial(table_of, "host_*.json", HOST, host_rows),
    "checks": partial(table_of, "checks_*.json", CHECKS, check_rows),
    "gpu load": partial(table_of, "gpu_l*.json", GPU_LOAD, gpu_load_rows),
    "gpu prefill": partial(table_of, "gpu_prefill_*.json", PREFILL, prefill_rows),
    "gpu replayed": partial(table_of, "gpu_replayed_*.json", GPU_REPLAYED, gpu_replayed_rows),
    "gpu memory": partial(
        table_of, "gpu_memory_*.json", GPU_FORWARD, partial(gpu_forward_rows, peak)
    ),
    "gpu profile": partial(
        table_of, "gpu_profile_*.json", GPU_FORWARD, partial(gpu_forward_rows, spent)
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the pages, or write them; 1 if one is out of date."""
    pages: dict[Path, Parts] = {
        RESULTS / "README.md": PARTS,
        REPO / "docs" / "compatibility.md": {"releases": releases},
    }
    return kept_up_to_date(pages, __file__, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
