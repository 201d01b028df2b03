#!/usr/bin/env python3
"""Write tables and figures of the documents, from code and results.

- README.md: every setting, from ``sglang_gemma4_yoco/settings.py``.
- README.md, benchmark/README.md and docs/operating.md: what was measured on a CPU, from
  ``benchmark/results``. ``plot_prefill.py`` and the measurements themselves write the long tables.
- README.md, benchmark/ and docs/prefill_graphs.md: what a model predicts for a GPU, from
  ``bench_gpu.py``.
- docs/upstream.md: the methods of SGLang that are wrapped or added, from ``loading/patch.py``.

Needs an environment with SGLang. Checks the pages, or with ``--write`` writes them; the exit
status is 1 if one is out of date.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from environment import REPO, SGLANG_VERSION
from generated import inserted, kept_up_to_date, markdown
from sglang_gemma4_yoco import settings

RESULTS = REPO / "benchmark" / "results"
MEASURED = {
    "E2B": f"prefill_e2b-mini_cpu_sglang-{SGLANG_VERSION}.json",
    "E4B": f"prefill_e4b-mini_cpu_sglang-{SGLANG_VERSION}.json",
}
LENGTHS = (128, 512, 2048)
PREDICTED = (128, 512, 2048, 8192)  # lengths
TRITON = " on SGLang's Triton backend, in Triton's interpreter"
FEWEST, ONE_OF = 3, 16  # the rule for CPUs: so many rows, and one of so many


def settings_table() -> str:
    """Every environment variable: its default, its values, and what they do."""
    rows = (
        (f"`{name}`", settings.unset(one), settings.accepted(one), one.metadata["help"])
        for name, one in settings.VARIABLES.items()
    )
    return markdown(("variable", "default", "values", "meaning"), rows)


def measured_table() -> str:
    """How many times as fast one prompt's prefill was, and the ceiling, by length and model."""
    rows = []
    for model, file in MEASURED.items():
        points = {
            point["load"]["length"]: point
            for point in json.loads((RESULTS / file).read_text())["points"]
            if point["load"]["batch_size"] == 1
        }
        ratios = (points[length] for length in LENGTHS)
        rows.append([model, *(f"{one['ratio']:.1f}x of {one['ceiling']:.1f}x" for one in ratios)])
    return markdown(("proportions of", *(f"{length} tokens" for length in LENGTHS)), rows)


def results(pattern: str) -> list[dict[str, Any]]:
    """The result files whose names match."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def between(values: Iterable[float], form: str = "{:.2f}") -> str:
    """The smallest and the largest of some values, in words."""
    found = sorted(values)
    return " to ".join(dict.fromkeys((form.format(found[0]), form.format(found[-1]))))


def under_load() -> str:
    """What two servers made of the same random requests."""
    rows, growth, requests = [], [], set()
    for document in results("random_workload_*.json"):
        assert document["passed"]
        stock, *others = document["passes"]
        for one, compared in zip(others, document["comparisons"], strict=True):
            replays = f"; {one['replays']} tails replayed from graphs" if one["replays"] else ""
            failures = f"; {one['injected']} failures served by stock" if one["injected"] else ""
            answers = f"{len(compared['differences'])} of {compared['answered']:,}"
            logprobs = (
                f"{compared['compared_logprobs']:,}",
                f"{compared['largest_difference']:.1e}",
            )
            times = (f"{stock['seconds']:.0f}", f"{one['seconds']:.0f}")
            share = f"{one['eligible_share']:.0%}{replays}{failures}"
            rows.append((*times, share, answers, *logprobs))
            growth.append(one["memory_end"] - one["memory_half"])
            requests.add(compared["answered"] + compared["aborted"])
    head = ["stock, s", "fast, s", "forwards with rows to skip that skipped some"]
    head += ["answers that differ", "log-probabilities compared", "largest difference"]
    return (
        f"{between(requests, '{:,}')} random requests, 16 at a time, to a stock server and then to "
        "a fast one, in fp32 on two CPU cores. The model is tiny, and SGLang checks its pools "
        "after every step, so the times are no measure of a GPU. No slot is held afterwards, "
        f"and memory grows by at most {max(growth) / 1e6:.0f} MB in the second half.\n\n"
        f"{markdown(head, rows)}\n\n{_latency()}"
    )


def _latency() -> str:
    """How long requests wait for their first token, and for the next one."""
    measured = results("latency_*.json")
    if not measured:
        return (
            "The inter-token latency of running requests has not been measured: part e of "
            "`scripts/bench_gpu.py` and `scripts/bench/bench_latency.py` are for that."
        )
    [found] = measured
    head = ["mixed chunks", "requests/s", "throughput, tokens/s"]
    head += [f"{what}, {p}" for what in ("TTFT", "ITL") for p in ("median", "p95", "p99")]
    rows = []
    for point in found["points"]:
        ways = [point["off"], point["on"]]
        tokens = [f"{statistics.median(way['output_throughput']):.1f}" for way in ways]
        row = [point["mixed"], f"{point['rate']:g}", " / ".join(tokens)]
        for key in ("ttft_ms", "itl_ms"):
            row += [" / ".join(f"{way[key][p]:.0f}" for way in ways) for p in ("50", "95", "99")]
        rows.append(row)
    requests = found["requests"] * found["repeats"]
    shares = {
        (key, p): between(point["on"][key][p] / point["off"][key][p] for point in found["points"])
        for key, p in (("ttft_ms", "50"), ("itl_ms", "50"), ("itl_ms", "95"))
    }
    return (
        f"Latency as `sglang.bench_serving` measures it, stock / fast in milliseconds: {requests} "
        f"requests a row with {found['prompt'] // 2} to {found['prompt']} prompt tokens and "
        f"{found['answer'] // 2} to {found['answer']} of the answer, chunks of {found['chunk']}, "
        "random model of E2B's proportions, fp32 on two CPU cores that both servers share in turns "
        "(`scripts/bench/bench_latency.py`). The fast server's median TTFT is "
        f"{shares['ttft_ms', '50']} times stock's, its ITL {shares['itl_ms', '50']} times at the "
        f"median and {shares['itl_ms', '95']} times at p95.\n\n"
        + markdown(head, rows, numbers=len(head) - 1)
    )


def checks_in_short() -> str:
    """Whether checks and tests find defects, and nothing else; and what checks cost."""
    lines = [
        _found_by_checks("checks_cpu.json", ""),
        _found_by_checks("checks_triton.json", TRITON),
    ]
    lines.append(f"- **Cost on a busy CPU.** {cost_of_a_start()} {cost_of_an_audit()}")
    return "\n".join(lines)


def _found_by_checks(name: str, where: str) -> str:
    [found] = results(name)
    alarms, largest = sum(found["false_alarms"].values()), found["largest"]
    broken = found["breakages"].values()
    least = min(one["smallest"] for one in broken if one["smallest"] != "infinite")
    return (
        f"- **{found['models']} random models{where}:** {alarms} false alarms in {found['models']} "
        f"checks at start, {found['audited']} audited prefills and {found['proved']} captured "
        f"tails; the largest errors were {largest['check']:g}, {largest['audits']:g} and "
        f"{largest['proofs']:g} times their bounds. The plugin was then broken in {len(broken)} "
        "ways: the check at start found each, wherever it was tried, by at least "
        f"{least:g} times its bound ([by breakage](results/checks.md))."
    )


def cost_of_a_start() -> str:
    """How long the check at start takes."""
    [found] = results("checks_cpu.json")
    prefills = [one["check_in_small_stock_prefills"] for one in found["cost"].values()]
    return (
        f"The check at start takes as long as {between(prefills, '{:.0f}')} prefills of 7 tokens."
    )


def cost_of_an_audit() -> str:
    """How long an audit takes, besides the fast forward."""
    [found] = results("checks_cpu.json")
    times = found["cost"].values()
    audits = [(one["audited_ms"] - one["fast_ms"]) / one["stock_ms"] for one in times]
    middle = f"{statistics.median(audits):.1f}"
    return (
        f"An audit takes as long as {between(audits, '{:.1f}')} stock forwards (median {middle})."
    )


def predicted_table() -> str:
    """How many times as fast one prompt's prefill is on an H100, by a model, and not measured."""
    from bench_gpu import PREDICTED_MS

    rows = (
        (
            f"{model} on an H100, bf16: a model's prediction, not a measurement",
            *(f"{ms[n]['off'] / ms[n]['on']:.1f}x" for n in PREDICTED),
        )
        for model, ms in PREDICTED_MS.items()
    )
    lengths = (f"{length} tokens" for length in PREDICTED)
    return markdown(("time of one prompt's prefill, stock / fast", *lengths), rows)


def predicted_ms_table() -> str:
    """The model's milliseconds, with and without SGLang's captured prefills."""
    from bench_gpu import PREDICTED_MS

    rows = (
        (model, length, *ms.values())
        for model, all in PREDICTED_MS.items()
        for length, ms in all.items()
    )
    head = ("", "tokens", "stock", "stock, replayed", "plugin", "both")
    return markdown(head, rows, numbers=5)


def predicted_graphs_table() -> str:
    """How many times as fast SGLang's captured prefills and the plugin are together."""
    from bench_gpu import PREDICTED_MS
    from bench_prefill import OFF_REPLAYED, ON_REPLAYED

    alone = {"the plugin without prefill graphs": "on", "prefill graphs without it": OFF_REPLAYED}
    rows = (
        (model, name, *(f"{ms[n][way] / ms[n][ON_REPLAYED]:.2f}x" for n in PREDICTED))
        for model, ms in PREDICTED_MS.items()
        for name, way in alone.items()
    )
    return markdown(("", "compared with", *(f"{length} tokens" for length in PREDICTED)), rows)


def little_to_gain() -> str:
    """Batches with few rows to skip, and what a prefill pays that falls back."""
    cut: dict[bool, list[float]] = {True: [], False: []}
    for document in results("threshold_*.json"):
        for point in document["points"]:
            if point["path"].startswith("active"):
                rows, kept = point["rows"]
                pays = rows - kept >= max(FEWEST, rows / ONE_OF)
                cut[pays].append(point["ratio"])
    gates = [document["gate"] for document in results("prefill_*.json")]
    return (
        f"- **Few rows to skip**, on a CPU fewer than {FEWEST}, or than a sixteenth of the batch: "
        "such batches run as stock. Cut all the same, those measured were "
        f"{between(cut[False])} times as fast as stock; with as many rows as the rule asks for or "
        f"a few more, {between(cut[True])} times ([results/threshold.md](results/threshold.md)). A "
        "prefill that falls back pays "
        f"{between((one['ineligible_prefill_us'] for one in gates), '{:.0f}')} us of a CPU, an "
        f"eager decode step {between(one['decode_us'] for one in gates)} us."
    )


def methods_table() -> str:
    """The methods of SGLang's classes that are wrapped, and those that are added, by class."""
    from sglang_gemma4_yoco.loading import patch, published

    wrapped, added = defaultdict(list), defaultdict(list)
    for patched, name in patch.WRAPPED:
        wrapped[patched].append(name)
    added[next(iter(patch.WRAPPED))[0]] = [name for name in vars(published) if "_yoco_" in name]
    rows = (
        (
            f"`{patched.__module__}.{patched.__name__}`",
            _names(wrapped[patched]),
            _names(added[patched]),
        )
        for patched in wrapped
    )
    return markdown(("class", "wrapped", "added"), rows)


def _names(methods: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in methods)


def readme(page: str) -> str:
    """``page`` with the tables of README.md."""
    page = inserted(page, "predicted", predicted_table())
    page = inserted(page, "cpu figures", measured_table())
    return inserted(page, "settings", settings_table())


def benchmark(page: str) -> str:
    """``page`` with the figures of benchmark/README.md."""
    page = inserted(page, "cpu figures", measured_table())
    page = inserted(page, "under load", under_load())
    page = inserted(page, "checks in short", checks_in_short())
    page = inserted(page, "little to gain", little_to_gain())
    return inserted(page, "predicted", predicted_table())


def on_a_gpu(page: str) -> str:
    """``page`` with the table of benchmark/on_a_gpu.md."""
    return inserted(page, "predicted ms", predicted_ms_table())


def operating(page: str) -> str:
    """``page`` with the figures of docs/operating.md."""
    page = inserted(page, "cost of a start", cost_of_a_start())
    return inserted(page, "cost of an audit", cost_of_an_audit())


def prefill_graphs(page: str) -> str:
    """``page`` with the table of docs/prefill_graphs.md."""
    return inserted(page, "predicted", predicted_graphs_table())


def upstream(page: str) -> str:
    """``page`` with the table of docs/upstream.md."""
    return inserted(page, "methods", methods_table())


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the pages, or write them; 1 if one is out of date."""
    pages = {
        REPO / "README.md": readme,
        REPO / "benchmark" / "README.md": benchmark,
        REPO / "benchmark" / "on_a_gpu.md": on_a_gpu,
        REPO / "docs" / "operating.md": operating,
        REPO / "docs" / "prefill_graphs.md": prefill_graphs,
        REPO / "docs" / "upstream.md": upstream,
    }
    return kept_up_to_date(pages, __file__, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
