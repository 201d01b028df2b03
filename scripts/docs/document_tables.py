#!/usr/bin/env python3
"""Write tables and figures of the documents, from code and results.

- docs/settings.md: every setting, from ``sglang_gemma4_yoco/settings.py``.
- README.md, benchmark/README.md and docs/operating.md: what was measured, from
  ``benchmark/results``. ``results.py`` writes the long tables.
- README.md, benchmark/ and docs/prefill_graphs.md: what a model predicts for a GPU, from
  ``benchmark/predicted_h100.json`` and ``benchmark/predicted_ranges_h100.json``.
- docs/operating.md: what ``verify`` and ``status`` print, from the documents of runs,
  docs/verify_sample.json and docs/status_sample.json.
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
from typing import Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.docs.results import PARTS
from scripts.environment import REPO, SGLANG_VERSION
from scripts.generated import kept_up_to_date, markdown
from scripts.result_files import RESULTS
from sglang_gemma4_yoco.commands import status
from sglang_gemma4_yoco.commands.verify import page

PREDICTED_MS = json.loads((REPO / "benchmark" / "predicted_h100.json").read_text())
#: The least and the most that the model gives, by the assumptions that are named in on_a_gpu.md.
PREDICTED_RANGES = json.loads((REPO / "benchmark" / "predicted_ranges_h100.json").read_text())
PREDICTED = ("128", "512", "2048", "8192")  # lengths
LENGTHS = (128, 512, 2048)
IN_SHORT = ("512", "2048", "8192")  # of README
TRITON = " on SGLang's Triton backend, in Triton's interpreter"
FEWEST, ONE_OF = 3, 16  # the rule for CPUs: so many rows, and one of so many


def results(pattern: str) -> list[dict[str, Any]]:
    """The result files whose names match."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def between(values: Iterable[float], form: str = "{:.2f}") -> str:
    """The smallest and the largest of some values, in words."""
    found = sorted(values)
    return " to ".join(dict.fromkeys((form.format(found[0]), form.format(found[-1]))))


def tokens(lengths: Iterable[object]) -> list[str]:
    """The heads of columns, by length."""
    return [f"{length} tokens" for length in lengths]


# ---------------------------------------------------------------- from code


def settings_table() -> str:
    """Every environment variable: its default, its values, and what they do."""
    from sglang_gemma4_yoco import settings

    rows = []
    for name, one in settings.VARIABLES.items():
        meaning = one.metadata["help"]
        rows.append((f"`{name}`", settings.unset(one), one.metadata["kind"].accepted, meaning))
    return markdown(("variable", "default", "values", "meaning"), rows)


def methods_table() -> str:
    """The methods of SGLang's classes that are wrapped, and those that are added, by class."""
    from sglang_gemma4_yoco.loading import patch, published

    wrapped = defaultdict(list)
    for patched, name in patch.WRAPPED:
        wrapped[patched].append(f"`{name}`")
    added, rows = [f"`{name}`" for name in vars(published) if "_yoco_" in name], []
    for patched, names in wrapped.items():
        name = f"`{patched.__module__}.{patched.__name__}`"
        rows.append((name, ", ".join(names), ", ".join(added)))
        added = []  # of the first class alone
    return markdown(("class", "wrapped", "added"), rows)


# ---------------------------------------------------------------- measured


def measured_points(model: str) -> dict[int, dict[str, Any]]:
    """What was measured of one prompt's prefill with a small model's proportions, by length."""
    found = {}
    for document in results(f"prefill_{model.lower()}-mini_*cpu_sglang-{SGLANG_VERSION}.json"):
        for point in document["points"]:
            if point["load"]["batch_size"] == 1:
                found[point["load"]["length"]] = point
    return found


def measured_table() -> str:
    """How many times as fast one prompt's prefill was, and the ceiling, by length and model."""
    rows = []
    for model in ("E2B", "E4B", "Gemma3n-E2B", "Gemma3n-E4B"):
        found, row = measured_points(model), [model.replace("Gemma3n-", "Gemma 3n ")]
        for length in LENGTHS:
            row.append(f"{found[length]['ratio']:.1f}x of {found[length]['ceiling']:.1f}x")
        rows.append(row)
    return markdown(("proportions of", *tokens(LENGTHS)), rows)


def figures_in_short() -> str:
    """What was measured and what is predicted, side by side, each called what it is."""
    rows = []
    for model in ("E2B", "E4B"):
        found = measured_points(model)
        row = [f"measured: two CPU cores, fp32, a small model of {model}'s proportions"]
        for length in IN_SHORT:
            cell = "not measured"
            if int(length) in found:
                cell = f"{found[int(length)]['ratio']:.1f}x"
            row.append(cell)
        rows.append(row)
    for model, ranges in PREDICTED_RANGES.items():
        row = [f"predicted, not measured: {model} on an H100, bf16"]
        row += [f"{between(ranges[length], '{:.1f}')}x" for length in IN_SHORT]
        rows.append(row)
    return markdown(("", *tokens(IN_SHORT)), rows)


def gpu_figures() -> str:
    """One prompt's prefill on GPUs, if that was measured."""
    if not results("gpu_prefill_*.json"):
        return "GPU figures are not measured yet: `scripts/bench_gpu.py` has not run on a GPU."
    return PARTS["gpu prefill"]()


def under_load() -> str:
    """What two servers made of the same random requests."""
    rows, growth, requests = [], [], set()
    for document in results("random_workload_*.json"):
        assert document["passed"]
        stock, *others = document["passes"]
        for one, compared in zip(others, document["comparisons"], strict=True):
            share = f"{one['eligible_share']:.0%}"
            if one["replays"]:
                share += f"; {one['replays']} tails replayed from graphs"
            if one["injected"]:
                share += f"; {one['injected']} failures served by stock"
            answers = f"{len(compared['differences'])} of {compared['answered']:,}"
            compared_logprobs = f"{compared['compared_logprobs']:,}"
            difference = f"{compared['largest_difference']:.1e}"
            seconds = (f"{stock['seconds']:.0f}", f"{one['seconds']:.0f}")
            rows.append((*seconds, share, answers, compared_logprobs, difference))
            growth.append(one["memory_end"] - one["memory_half"])
            requests.add(compared["answered"] + compared["aborted"])
    head = ["stock, s", "fast, s", "forwards with rows to skip that skipped some"]
    head += ["answers that differ", "log-probabilities compared", "largest difference"]
    return (
        f"{between(requests, '{:,}')} random requests, 16 at a time, to a stock server and then to "
        "a fast one, in fp32 on two CPU cores. The model is tiny, and SGLang checks its pools "
        "after every step, so the times are no measure of a GPU. No slot is held afterwards, "
        f"and memory grows by at most {max(growth) / 1e6:.0f} MB in the second half.\n\n"
        f"{markdown(head, rows)}\n\n{latency()}"
    )


def latency() -> str:
    """How long requests wait for their first token, and for the next one."""
    [found] = results("latency_*.json")
    columns = (("ttft_ms", "50"), ("ttft_ms", "95"), ("itl_ms", "50"), ("itl_ms", "95"))
    shares = defaultdict(list)
    rows = []
    for point in found["points"]:
        row = [point["mixed"], f"{point['rate']:g}"]
        for key, p in columns:
            off, on = point["off"][key][p], point["on"][key][p]
            row.append(f"{off:.0f} / {on:.0f}")
            shares[key, p].append(on / off)
        rows.append(row)
    head = ["mixed chunks", "requests/s", "TTFT, median", "TTFT, p95", "ITL, median", "ITL, p95"]
    requests = found["requests"] * found["repeats"]
    return (
        f"Latency as `sglang.benchmark.serving` measures it, stock / fast in milliseconds: "
        f"{requests} requests a row with {found['prompt'] // 2} to {found['prompt']} prompt tokens "
        f"and {found['answer'] // 2} to {found['answer']} of the answer, chunks of "
        f"{found['chunk']}, random model of E2B's proportions, fp32 on two CPU cores that both "
        "servers share in turns (`scripts/bench/bench_latency.py`). The fast server's median TTFT "
        f"is {between(shares['ttft_ms', '50'])} times stock's, its ITL "
        f"{between(shares['itl_ms', '50'])} times at the median and "
        f"{between(shares['itl_ms', '95'])} times at p95.\n\n"
        + markdown(head, rows, numbers=len(head) - 1)
    )


def checks_in_short() -> str:
    """Whether checks and tests find defects, and nothing else; and what checks cost."""
    return (
        f"{_found_by_checks('checks_cpu.json', '')}\n"
        f"{_found_by_checks('checks_triton.json', TRITON)}\n"
        f"- **Cost on a busy CPU.** {cost_of_a_start()} {cost_of_an_audit()}"
    )


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
        f"{least:g} times its bound ([by breakage](results/README.md#which-defects-checks-find))."
    )


def sample_of_verify() -> str:
    """What ``verify`` prints of the document of one run."""
    document = json.loads((REPO / "docs" / "verify_sample.json").read_text())
    return f"```text\n{page.format_report(document)}\n```"


def sample_of_status() -> str:
    """What ``status`` prints of an active server, from what it printed of one with ``--json``."""
    document = json.loads((REPO / "docs" / "status_sample.json").read_text())
    assert status.verdict(document["schedulers"]) == (True, None)
    shown = json.dumps(document["schedulers"], indent=1)
    return f"```text\n{shown}\nThe fast path is active.\n```"


def cost_of_a_start() -> str:
    """How long the check at start takes."""
    [found] = results("checks_cpu.json")
    prefills = between(
        (one["check_in_small_stock_prefills"] for one in found["cost"].values()), "{:.0f}"
    )
    return f"The check at start takes as long as {prefills} prefills of 7 tokens."


def cost_of_an_audit() -> str:
    """How long an audit takes, besides the fast forward."""
    [found] = results("checks_cpu.json")
    audits = []
    for one in found["cost"].values():
        audits.append((one["audited_ms"] - one["fast_ms"]) / one["stock_ms"])
    middle = f"{statistics.median(audits):.1f}"
    return (
        f"An audit takes as long as {between(audits, '{:.1f}')} stock forwards (median {middle})."
    )


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
        f"a few more, {between(cut[True])} times "
        "([the table](results/README.md#with-few-rows-to-skip)). A prefill that falls back pays "
        f"{between((one['ineligible_prefill_us'] for one in gates), '{:.0f}')} us of a CPU, an "
        f"eager decode step {between(one['decode_us'] for one in gates)} us."
    )


# ---------------------------------------------------------------- predicted


def predicted_ranges_table() -> str:
    """How many times as fast one prompt's prefill is on an H100, by a model, and not measured."""
    rows = []
    for model, ranges in PREDICTED_RANGES.items():
        rows.append((model, *(between(ranges[length]) for length in IN_SHORT)))
    return markdown(("stock / fast, H100, bf16", *tokens(IN_SHORT)), rows)


def predicted_ms_table() -> str:
    """The model's milliseconds, with and without SGLang's captured prefills."""
    rows = []
    for model, of_lengths in PREDICTED_MS.items():
        rows += [(model, length, *ms.values()) for length, ms in of_lengths.items()]
    head = ("", "tokens", "stock", "stock, replayed", "plugin", "both")
    return markdown(head, rows, numbers=5)


def predicted_graphs_table() -> str:
    """How many times as fast SGLang's captured prefills and the plugin are together."""
    alone = {"the plugin without prefill graphs": "on", "prefill graphs without it": "off replayed"}
    rows = []
    for model, ms in PREDICTED_MS.items():
        for name, way in alone.items():
            ratios = (f"{ms[n][way] / ms[n]['on replayed']:.2f}x" for n in PREDICTED)
            rows.append((model, name, *ratios))
    return markdown(("", "compared with", *tokens(PREDICTED)), rows)


PAGES = {
    REPO / "README.md": {"figures": figures_in_short},
    REPO / "docs" / "settings.md": {"settings": settings_table},
    REPO / "benchmark" / "README.md": {
        "cpu figures": measured_table,
        "gpu figures": gpu_figures,
        "under load": under_load,
        "checks in short": checks_in_short,
        "little to gain": little_to_gain,
    },
    REPO / "benchmark" / "on_a_gpu.md": {
        "predicted": predicted_ranges_table,
        "predicted ms": predicted_ms_table,
    },
    REPO / "docs" / "operating.md": {
        "cost of a start": cost_of_a_start,
        "cost of an audit": cost_of_an_audit,
        "sample of status": sample_of_status,
        "sample of verify": sample_of_verify,
    },
    REPO / "docs" / "prefill_graphs.md": {"predicted": predicted_graphs_table},
    REPO / "docs" / "upstream.md": {"methods": methods_table},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the pages, or write them; 1 if one is out of date."""
    return kept_up_to_date(PAGES, __file__, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
