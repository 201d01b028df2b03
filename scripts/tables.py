#!/usr/bin/env python3
"""Write the tables of the documents, from files of benchmark/, the package and the tests.

``TABLES`` lists all tables. Each is a part of a page, between two marker lines. The page contains
the header. The script writes the rows, and below them the commit, date and command of each result
file. It writes no sentences.

Without ``--write`` the script only checks the pages, and exits with 1 if one is out of date. It
needs an environment with SGLang.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import new_parser
from scripts.environment import REPO
from scripts.result_files import RESULTS, load_predictions, load_results
from sglang_gemma4_yoco.commands.console import say

if TYPE_CHECKING:
    from sglang_gemma4_yoco.compat.backends import Backend

Document = dict[str, Any]
Rows = Iterator[Sequence[object]]


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        page: its path in the repository.
        part: the name in the marker lines.
        rows: returns the rows; for a table of result files, those of one file.
        files: the pattern of its result files; None if ``rows`` finds its own source.
        origins: list the origins of the files below the rows.
    """

    page: str
    part: str
    rows: Callable[..., Rows]
    files: str | None = None
    origins: bool = True

    def lines(self) -> Iterator[str]:
        """Yield the lines below the table's header."""
        if self.files is None:
            yield from map(format_row, self.rows())
            return
        documents = load_results(self.files)
        for document in documents:
            yield from map(format_row, self.rows(document))
        if documents and self.origins:
            yield ""
            yield from map(format_origin, documents)


def format_row(cells: Iterable[object]) -> str:
    """Return a row in Markdown."""
    escaped = (str(cell).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def format_origin(document: Document) -> str:
    """Return the origin of a result file."""
    about = f"- `{document['file']}`, {document['date']}, commit `{document['commit']}`"
    if "device" in document:
        about += f", SGLang {document['sglang']}, {document['device']}"
    return f"{about}: `{document['command']}`"


def format_pair(off: float, on: float, digits: int = 0) -> str:
    """Return ``stock / fast``."""
    return f"{off:.{digits}f} / {on:.{digits}f}"


def format_times(seconds: dict[str, float]) -> str:
    """Return ``median (p20-p80)`` in milliseconds."""
    median, low, high = (1e3 * seconds[name] for name in ("median", "p20", "p80"))
    return f"{median:.1f} ({low:.1f}-{high:.1f})"


# ---------------------------------------------------------------- from the package


def list_settings() -> Rows:
    """Yield every environment variable: its default, its values, and its meaning."""
    from sglang_gemma4_yoco import settings

    for name, one in settings.VARIABLES.items():
        accepted = one.metadata["kind"].accepted
        yield f"`{name}`", settings.describe_default(one), accepted, one.metadata["help"]


def list_methods() -> Rows:
    """Yield the wrapped methods of SGLang's classes."""
    from sglang_gemma4_yoco.models import registry
    from sglang_gemma4_yoco.startup.patch import WRAPPED

    for kind in registry.MODELS:
        yield f"`{kind.SGLANG.text_model}`", "`forward`"
    for patched, name in WRAPPED:
        yield f"`{patched.__module__}.{patched.__name__}`", f"`{name}`"


def get_backends() -> dict[str, tuple[Backend, ...]]:
    """Return the package's attention backends, by the documents' names of the models."""
    from sglang_gemma4_yoco.compat import backends

    return {"Gemma 4": backends.GEMMA4, "Gemma 3n": backends.GEMMA3N}


def list_evidence() -> Iterator[tuple[str, Backend, Document]]:
    """Yield the models' attention backends: the model, the package's entry, and the evidence."""
    evidence = tomllib.loads(EVIDENCE.read_text())
    for model, entries in get_backends().items():
        for backend in entries:
            yield model, backend, evidence[model][backend.path.rpartition(".")[2]]


def list_backends() -> Rows:
    """Yield Gemma 4's attention backends; flags with equal cells share a row."""
    found = defaultdict[tuple[str, str], list[str]](list)
    for model, backend, evidence in list_evidence():
        if model == "Gemma 4":
            found[evidence["selected"], describe_backend(backend)] += backend.flags
    for cells, flags in found.items():
        yield format_flags(flags), *cells


def list_backend_modes() -> Rows:
    """Yield each model's attention backends, when SGLang selects them, and their effect."""
    for model, backend, evidence in list_evidence():
        happens = describe_backend(backend)
        if "note" in evidence:
            happens += f": {evidence['note']}"
        yield f"{model}, {format_flags(backend.flags)}", evidence["selected"], happens


def list_cards() -> Rows:
    """Yield GPUs: SGLang's attention backend for Gemma 4, its effect, and what was tested."""
    entries = get_backends()["Gemma 4"]
    active = [flag for entry in entries if entry.is_admitted for flag in entry.flags]
    for card, (architecture, flag) in CARDS.items():
        happens = NOTES.get(card, "active")
        if flag not in active:
            happens = "stock"
        features = TRIED.get(card, ("read",) * 3)
        yield card, architecture, f"`{flag}`", happens, *features


def describe_backend(backend: Backend) -> str:
    """Return the effect of a class of attention backends on a model's prefills."""
    if not backend.is_admitted:
        return "stock"
    if backend.may_run_tail:
        return "active"
    return "active; the tail runs on Triton"


def format_flags(names: Iterable[str]) -> str:
    """Return names in Markdown, as code."""
    return ", ".join(f"`{name}`" for name in names)


# ---------------------------------------------------------------- one prefill


def list_ratios(lengths: Sequence[int], document: Document) -> Rows:
    """Yield ratios and ceilings at these lengths; below them, for a GPU, prefill tokens/s."""
    found, speeds = {}, {}
    for point in document["points"]:
        length = point["load"]["length"]
        found[length] = f"{point['ratio']:.1f}x of {point['ceiling']:.1f}x"
        stock, fast = (length / point[way]["median"] for way in ("off", "on"))
        speeds[length] = f"{stock:,.0f} / {fast:,.0f}"
    model = document["model"].removesuffix("_MINI").replace("GEMMA3N_", "Gemma 3n ")
    release, on_a_gpu = f"SGLang {document['sglang']}", not document["device"].startswith("cpu")
    if on_a_gpu:
        release = f"{document['device'].removeprefix('NVIDIA ')}, {release}"
    yield f"{model}, {release}", *(found[length] for length in lengths)
    if on_a_gpu:
        yield "prefill tokens/s, stock / fast", *(speeds[length] for length in lengths)


def list_prefills(document: Document) -> Rows:
    """Yield batches: times off and on, their ratio, its ceiling, tokens/s, and what ran."""
    for point in document["points"]:
        load, off, on = point["load"], format_times(point["off"]), format_times(point["on"])
        batch = f"{load['batch_size']} x {load['length']} tokens"
        if load["decoding"]:
            batch += f", {load['decoding']} decoding"
        if load["read"]:
            batch += f", {load['read']:.0%} read"
        ratio = f"{point['ratio']:.2f} of {point['ceiling']:.2f}"
        prefilled = load["batch_size"] * load["length"]
        speed = format_pair(*(prefilled / point[way]["median"] for way in ("off", "on")))
        yield document["model"], batch, off, on, ratio, speed, point["path"]


def list_gates(document: Document) -> Rows:
    """Yield one row: the overhead on forwards that run as stock."""
    gate = document["gate"]
    yield f"`{document['file']}`", gate["ineligible_prefill_us"], gate["decode_us"]


def list_host(document: Document) -> Rows:
    """Yield, for each batch and way (off, on, replayed), counts of the host's work."""
    for point in document["points"]:
        batch = f"{document['model']}, {point['load']['length']} tokens"
        for way, work in point["host"].items():
            share = work["operations"] / point["host"]["off"]["operations"]
            counts = [work[name] for name in ("replays", "triton_launches", "device_reads")]
            operations = f"{work['operations']} ({share:.0%})"
            yield batch, name_way(way, point), operations, *counts


def list_replayed(document: Document) -> Rows:
    """Yield times of prefills that SGLang replays, and of eager ones, by length."""
    for point in sorted(document["points"], key=lambda point: point["load"]["length"]):
        length = point["load"]["length"]
        for way, seen in point["replayed"].items():
            if seen["times"]:  # on a GPU
                eager, replayed = point[way.removesuffix(" replayed")], seen["times"]
                cells = [name_way(way, point), seen["same_tokens"], format_times(eager)]
                speed = f"{length / replayed['median']:.0f}"
                yield document["model"], length, *cells, format_times(replayed), speed


def name_way(way: str, point: Document) -> str:
    """Return a way; if SGLang replays it, with its counted outcome, since not all are cut."""
    if way in point["replayed"]:
        return f"{way}: {point['replayed'][way]['path']}"
    return way


def list_profiles(document: Document) -> Rows:
    """Yield times of the host and the device in single forwards, off and on."""
    for point in document["points"]:
        found, pairs = point.get("profile", point), []  # before, the script had a file of its own
        for name in ("host_ms", "whole_ms", "device_idle_ms", "kernels"):
            pairs.append(format_pair(found["off"][name], found["on"][name], 1))
        yield document["model"], point.get("load", point)["length"], *pairs


def list_noted() -> Rows:
    """Yield our figures of which no result file was kept."""
    for run in tomllib.loads(NOTED.read_text())["run"]:
        origin = f"{run['date']}, commit `{run['commit']}`, {run['machine']}"
        for one in run["noted"]:
            yield one["what"], one["figure"], one["source"], origin


# ---------------------------------------------------------------- servers and checks


def list_loads(document: Document) -> Rows:
    """Yield times of requests over HTTP, stock and fast."""
    for point in document["points"]:
        off, on = point["off"], point["on"]
        load = f"{document['model']}, {point['rate']:g} requests/s, mixed chunks {point['mixed']}"
        stock, fast = (statistics.median(side["seconds"]) for side in (off, on))
        cells = [format_pair(stock, fast, 1)]
        for kind, percentile in product(("ttft_ms", "itl_ms"), ("50", "95")):
            cell = "not seen"
            if off[kind] is not None:
                cell = format_pair(off[kind][percentile], on[kind][percentile])
            cells.append(cell)
        yield load, *cells


def list_capacities(document: Document) -> Rows:
    """Yield each way: unloaded TTFT, the highest rate within the limit, its ratio to stock's."""
    found = defaultdict[str, Document](dict)
    for point in document["points"]:
        found[point["way"]] |= point  # of the bracket the last one remains
    for way, last in found.items():
        if within := last.get("within"):
            ttft, ratio = last["unloaded"]["ttft_ms"]["95"], within / found["off"]["within"]
            cells = [f"{ttft:.0f}", f"{within:.2f}", f"{last['above']:.2f}", f"{ratio:.2f}x"]
            yield document["model"], way, *cells


def list_random_traffic(document: Document) -> Rows:
    """Yield the results of the same random requests on a stock server and on a fast one."""
    stock, *others = document["passes"]
    for fast, compared in zip(others, document["comparisons"], strict=True):
        seconds, share = format_pair(stock["seconds"], fast["seconds"]), fast["eligible_share"]
        differ = f"{len(compared['differences'])} of {compared['answered']:,}"
        largest = f"{compared['largest_difference']:.1e} of {compared['compared_logprobs']:,}"
        yield seconds, f"{share:.0%}", fast["replays"], fast["injected"], differ, largest


def list_soak(document: Document) -> Rows:
    """Yield the counts of a stock and of a fast server in a long run, and what has grown."""
    stock, fast = document["stock"], document["fast"]
    for name, number in fast["counts"].items():
        yield name, format_pair(stock["counts"].get(name, 0), number), "", ""
    for name, (off, on, allowed) in document["growth"].items():
        end = format_pair(stock["series"][name][-1], fast["series"][name][-1])
        yield name, end, format_pair(off, on), f"{allowed:.0f}"


def list_alarms(document: Document) -> Rows:
    """Yield the false alarms of the checks, on the correct package."""
    for kind, tried in (("check", "models"), ("audits", "audited"), ("proofs", "proved")):
        found = (document["false_alarms"][kind], document["largest"][kind])
        yield f"`{document['file']}`", kind, document[tried], *found


def list_breakages(document: Document) -> Rows:
    """Yield the findings of the self-check for each breakage."""
    for name, found in document["breakages"].items():
        yield name, found["on"], found["models"], found["smallest"]


def list_verified(document: Document) -> Rows:
    """Yield how often ``verify`` reported a problem, without a defect and with one."""
    for kind, rounds in document["rounds"].items():
        yield kind, rounds, document["reported"][kind]


def list_costs(document: Document) -> Rows:
    """Yield the cost of the self-check and of an audit, in stock forwards."""
    for model, cost in document["cost"].items():
        audit = (cost["audited_ms"] - cost["fast_ms"]) / cost["stock_ms"]
        yield model, f"{cost['check_in_small_stock_prefills']:.0f}", f"{audit:.1f}"


def list_releases() -> Rows:
    """Yield the releases of SGLang that have passed."""
    columns = ("sglang", "torch", "python", "passed", "skipped", "date", "commit")
    for release in json.loads((RESULTS / "version_matrix.json").read_text()):
        yield [release[name] for name in columns]


# ---------------------------------------------------------------- predicted


def list_predicted(part: str, columns: Sequence[str], lengths: Sequence[int] = ()) -> Rows:
    """Yield ``columns`` of each case in ``part`` of predicted.json, if the case has all of them.

    Args:
        lengths: prompt lengths in tokens; empty for all.
    """
    for case in load_predictions()[part]:
        if lengths and case["tokens"] not in lengths:
            continue
        if case.keys() >= set(columns):
            yield [case[column] for column in columns]


def list_others() -> Rows:
    """Yield each source of others' measurements, that with the least gain first.

    Of each source: the number of its measurements, the one with the least gain and that with the
    largest.
    """
    found = defaultdict[str, list[Document]](list)
    for case in sorted(load_predictions()["cases"], key=itemgetter("ratio")):
        if case["source"]:
            found[case["source"]].append(case)
    for cases in found.values():
        ends = []
        for case in cases[0], cases[-1]:
            name, _, load = case["name"].partition(", ")
            ends.append(f"{case['measured']}: {case['model']}, {case['what']}, {load}")
        if len(cases) == 1:
            ends[1] = ""
        yield f"{name}, {case['gpu']}", len(cases), *ends


#: GPUs: the architecture, and the attention backend that SGLang 0.5.23 chooses for Gemma 4.
CARDS = {
    "A100": ("SM80", "triton"),
    "L40S": ("SM89", "triton"),
    "RTX 4090": ("SM89", "triton"),
    "H100": ("SM90", "triton"),
    "H200": ("SM90", "triton"),
    "B200": ("SM100", "trtllm_mha"),
    "RTX 5090": ("SM120", "triton"),
    "GB10 (DGX Spark)": ("SM121", "triton"),
    "MI300X": ("gfx942", "triton"),
}
#: GPUs for which "active" has an exception.
NOTES = {
    "B200": "active, without [audits](checks.md#audits); [images](#b200)",
    "MI300X": "active in bf16; [fp8 falls back to stock](quantised.md); [AITER](#mi300x)",
}
#: Tested features: cut prefills, the captured tail, exits; else SGLang's source was read.
TRIED = {
    "H100": ("simulated", "simulated", "simulated"),
    "H200": ("run", "run", "simulated"),
}
README, SUMMARY, LONG = "README.md", "benchmark/README.md", "benchmark/results/README.md"
GPU = "benchmark/on_a_gpu.md"
NOTED = REPO / "benchmark" / "noted.toml"
EVIDENCE = REPO / "test" / "srt" / "harness" / "attention_backends.toml"
COMPARED = ("measured", "expected")
REPLAYED = ("model", "tokens", "stock", "stock replayed", "captured", "both")
REPLAYED_ON_AN_H100 = partial(list_predicted, "H100", REPLAYED, (512, 1024, 2048, 8192))
AFTER_A_PREFIX = ("model", "device", "tokens", "stock", "captured", "range")
OTHERS = ("link", "model", "gpu", "what", *COMPARED, "differs")
CHECKED = ("run", "sglang", "model", "tokens", "way", *COMPARED)
ON_A_CPU = partial(list_ratios, (128, 512, 2048))
ON_A_GPU = partial(list_ratios, (512, 1024, 8192, 32768))
TABLES = (
    Table(README, "measured on a GPU", ON_A_GPU, "gpu_prefill_*.json", origins=False),
    Table(README, "measured", ON_A_CPU, "prefill_*mini_cpu_*.json", origins=False),
    Table(README, "attention", list_backends),
    Table("docs/modes.md", "attention backends", list_backend_modes),
    Table("docs/compatibility.md", "GPUs", list_cards),
    Table("docs/settings.md", "settings", list_settings),
    Table("docs/upstream.md", "methods", list_methods),
    Table("docs/compatibility.md", "releases", list_releases),
    Table(GPU, "predicted ms", REPLAYED_ON_AN_H100),
    Table(GPU, "predicted", partial(list_predicted, "H100", ("model", "tokens", "range"))),
    Table(GPU, "predicted after a prefix", partial(list_predicted, "cached", AFTER_A_PREFIX)),
    Table(GPU, "checked", partial(list_predicted, "cases", CHECKED)),
    Table(README, "measured by others", list_others),
    Table(SUMMARY, "measured by others", partial(list_predicted, "cases", OTHERS)),
    Table(SUMMARY, "on a GPU", ON_A_GPU, "gpu_prefill_*.json", origins=False),
    Table(SUMMARY, "prefill", ON_A_CPU, "prefill_*mini_cpu_*.json", origins=False),
    Table(SUMMARY, "random traffic", list_random_traffic, "random_workload_*.json"),
    Table(SUMMARY, "soak", list_soak, "soak_*.json"),
    Table(SUMMARY, "latency", list_loads, "latency_*.json"),
    Table(SUMMARY, "capacity", list_capacities, "capacity_*.json"),
    Table(SUMMARY, "alarms", list_alarms, "checks_*.json", origins=False),
    Table(SUMMARY, "costs", list_costs, "checks_*.json", origins=False),
    Table(SUMMARY, "gate", list_gates, "prefill_*.json", origins=False),
    Table(LONG, "prefill", list_prefills, "prefill_*.json"),
    Table(LONG, "threshold", list_prefills, "threshold_*.json"),
    Table(LONG, "host", list_host, "host_*.json"),
    Table(LONG, "checks", list_breakages, "checks_*.json"),
    Table(LONG, "verified", list_verified, "verify_rounds_*.json"),
    Table(LONG, "gpu load", list_loads, "gpu_l*.json"),
    Table(LONG, "gpu prefill", list_prefills, "gpu_prefill_*.json"),
    Table(LONG, "gpu eager", list_prefills, "gpu_eager_*.json"),
    Table(LONG, "gpu replayed", list_replayed, "gpu_replayed_*.json"),
    Table(LONG, "gpu profile", list_profiles, "gpu_profile_*.json"),
    Table(LONG, "noted", list_noted),
)


def insert(document: str, part: str, lines: Iterable[str]) -> str:
    """Return ``document`` with these lines below the header of a part's table.

    Raises:
        ValueError: the marker lines or the header are missing.
    """
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    found = re.search(rf"{begin}\n\|.*\n\|.*\n((?s:.*?)){end}", document)
    if found is None:
        raise ValueError(f"there is no table between {begin} and {end}")
    rows = "".join(f"{line}\n" for line in lines)
    return document[: found.start(1)] + rows + document[found.end(1) :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the tables, or write them; return 1 if one is out of date."""
    parser = new_parser(__doc__)
    parser.add_argument("--write", action="store_true", help="write the pages")
    write = parser.parse_args(arguments).write
    outdated = False
    for table in TABLES:
        page = REPO / table.page
        before = page.read_text()
        after = insert(before, table.part, table.lines())
        if write:
            page.write_text(after)
        elif after != before:
            say(f"{table.page}, {table.part}: out of date, run scripts/tables.py --write")
            outdated = True
    return int(outdated)


if __name__ == "__main__":
    sys.exit(main())
