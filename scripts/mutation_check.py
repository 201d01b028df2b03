#!/usr/bin/env python3
"""Do the tests notice when the package is broken?

Each mutation below breaks the package in one named way: a piece of source that must occur exactly
once in its file, and what replaces it. For every mutation the package is copied, broken, and put
first on the path; then the tests run until the first failure. A mutation is *caught* when a test
fails and *survives* when all pass. Tests that start servers run last, and only for mutations that
all others let pass.

    python scripts/mutation_check.py                        # all, about half an hour on two cores
    python scripts/mutation_check.py --only stale           # those with "stale" in their names
    python scripts/mutation_check.py --json benchmark/results/mutations.json

Output contract: a table for people on stdout; the last line is one JSON document. The exit status
is 1 when a mutation survives, and 2 when one no longer fits the source.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PACKAGE = "sglang_gemma4_yoco"
# The quick ones first; what needs a server comes last.
WITHOUT_SERVER = (
    "test_rows.py",
    "test_gate.py",
    "test_threshold.py",
    "test_tail.py",
    "test_shadow.py",
    "test_forward.py",
    "models/test_gemma4_yoco_fast_prefill.py",
    "models/test_gemma4_equivalence.py",
    "test_no_sync.py",
    "test_refused.py",
    "test_recorded.py",
    "test_cache_dtype.py",
    "test_media.py",
    "test_seams.py",
    "test_switch_and_plugin.py",
)
WITH_TRITON = ("models/test_gemma4_equivalence_triton.py",)
WITH_SERVER = (
    "test_server.py",
    "test_http_features.py",
    "test_modes.py",
    "test_workload.py",
    "test_oracle.py",
)
STAGES = (WITHOUT_SERVER, WITH_TRITON, WITH_SERVER)


@dataclass(frozen=True)
class Mutation:
    """One way to break the package: in ``file``, ``old`` becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


MUTATIONS = (
    # which rows
    Mutation("wrong row: the one before the last", "tail.py",
             "torch.cumsum(lens, dim=0) - 1", "(torch.cumsum(lens, dim=0) - 2).clamp(min=0)"),
    Mutation("wrong suffix: shifted by one", "rows.py",
             "range(end - m, end)", "range(max(end - m - 1, 0), max(end - 1, m))"),
    Mutation("suffix one row short", "rows.py",
             "min(max(n - start, 1), n)", "min(max(n - start - 1, 1), n)"),
    Mutation("logprob start of another request", "rows.py",
             "for n, start in zip(extend_lens, logprob_starts, strict=True)",
             "for n, start in zip(extend_lens, logprob_starts[::-1], strict=True)"),
    Mutation("scatter to the wrong rows", "cut.py",
             "front.index_copy_(0, self.tail.index, seams.layer_rows(output))",
             "front.index_copy_(0, self.tail.index.roll(1), seams.layer_rows(output))"),
    Mutation("no scatter", "cut.py",
             "        front.index_copy_(0, self.tail.index, seams.layer_rows(output))\n", ""),
    # what the tail runs on
    Mutation("stale positions in the tail", "cut.py",
             "positions=positions if self._positions is None else self._positions,",
             "positions=positions[: hidden_states.shape[0]],"),
    Mutation("queries at the first positions", "cut.py",
             "donor.queries(attention, normed_rows, self._positions)",
             "donor.queries(attention, normed_rows, positions[: normed_rows.shape[0]])"),
    Mutation("unpruned out_cache_loc of a suffix", "tail.py",
             '"out_cache_loc": forward_batch.out_cache_loc.index_select(0, index),',
             '"out_cache_loc": forward_batch.out_cache_loc,'),
    Mutation("unpruned translated slots of a suffix", "tail.py",
             '                "kv_loc_cols": index,\n', ""),
    Mutation("unpruned input ids", "tail.py",
             'fields["input_ids"] = input_ids.index_select(0, index)', "pass"),
    Mutation("prefix lengths of the whole batch", "tail.py",
             '"extend_prefix_lens_cpu": list(kept.prefix_lens),',
             '"extend_prefix_lens_cpu": list(forward_batch.extend_prefix_lens_cpu),'),
    Mutation("host and device lengths disagree", "tail.py",
             '"extend_seq_lens_cpu": list(kept.lens),',
             '"extend_seq_lens_cpu": list(kept.extend_lens),'),
    Mutation("start locations of the whole batch", "tail.py",
             '"extend_start_loc": (kept_lens.cumsum(0) - kept_lens).to(lens.dtype),',
             '"extend_start_loc": forward_batch.extend_start_loc,'),
    Mutation("the tail stays an extend of single rows", "tail.py",
             '"forward_mode": seams.ForwardMode.DECODE,',
             '"forward_mode": seams.ForwardMode.EXTEND,'),
    Mutation("decode window one key short", "seams.py",
             "backend.sliding_window_size = window + 1", "backend.sliding_window_size = window"),
    Mutation("window left widened", "seams.py",
             "    finally:\n        backend.sliding_window_size = window\n",
             "    finally:\n        pass\n"),
    # attention metadata
    Mutation("the tail on the front's backend", "attention.py",
             "seams.attn_backend_switched(attention.tail),",
             "seams.attn_backend_switched(attention.main),"),
    Mutation("the tail planned on the runner's own backend", "attention.py",
             "seams.plan(self.tail, forward_batch)", "seams.plan(self.main, forward_batch)"),
    Mutation("metadata of the batch before", "attention.py",
             "if self._planned is not None and self._planned[0] is forward_batch:",
             "if self._planned is not None:"),
    Mutation("planned batches are never let go", "attention.py",
             "        self._planned = self._refused = None\n"
             "        self.tail.forward_metadata = None", "        pass"),
    Mutation("metadata not rebuilt on the way out", "attention.py",
             "    finally:\n        main.init_forward_metadata(forward_batch)",
             "    finally:\n        pass"),
    # restoring
    Mutation("fields not put back", "tail.py",
             "        for name, value in saved.items():\n"
             "            setattr(forward_batch, name, value)", "        pass"),
    Mutation("residual stream not put back", "tail.py",
             'for name in (*fields, "residual_stream") if hasattr(forward_batch, name)]',
             "for name in fields if hasattr(forward_batch, name)]"),
    Mutation("no restore after an exception", "cut.py",
             "        try:\n            self._leave_tail()\n        finally:",
             "        try:\n            if error is None:\n                self._leave_tail()\n"
             "        finally:"),
    Mutation("shadows stay on the model", "cut.py",
             "            self._leave_tail()\n        finally:\n            self._shadows.close()",
             "            self._leave_tail()\n        finally:\n            pass"),
    Mutation("shadows closed in the wrong order", "shadow.py",
             "self._saved.pop()", "self._saved.pop(0)"),
    # layer K-1
    Mutation("donor K and V of kept rows only", "cut.py",
             "            k, v = donor.keys_and_values(attention, hidden_states, positions)\n"
             "            normed_rows",
             "            k, v = donor.keys_and_values(attention, hidden_states, positions)\n"
             "            k, v = k.clone(), v.clone()\n"
             "            k[0], v[0] = k[-1], v[-1]\n"
             "            normed_rows"),
    Mutation("an unread chunk writes no K and V in the donor", "cut.py",
             "        donor.attend(attention, q, k, v, self._batch)\n", ""),
    Mutation("K of the donor without its norm", "donor.py",
             "    k = _headwise_norm(attention.k_norm, k, heads, head_dim)\n", ""),
    Mutation("V of the donor without its norm", "donor.py",
             "    v = _headwise_norm(attention.v_norm, v, heads, head_dim)\n", ""),
    Mutation("K of the donor without rotation", "donor.py",
             "    _, k = attention.rotary_emb(positions, torch.zeros_like(k), k)\n", ""),
    Mutation("rounded K and V are attended to", "donor.py",
             "if stored is not None and stored != projection.weight.dtype:", "if False:"),
    # per-layer inputs and the final norm
    Mutation("per-layer inputs of the first rows", "cut.py",
             "isinstance(given, per_layer.KeptInput) else self._kept(given)",
             "isinstance(given, per_layer.KeptInput) else given[: self.tail.kept.kept]"),
    Mutation("per-layer inputs of the neighbouring layer", "per_layer.py",
             "return self._rest[:, layer - self._first_cut]",
             "return self._rest[:, layer - self._first_cut - 1]"),
    Mutation("embeddings taken after layer 0 has overwritten them", "per_layer.py",
             "        self._embeds = embeds.index_select(0, index)\n",
             "        one = index.shape[0] == 1  # of one row a view, which changes with embeds\n"
             "        self._embeds = embeds[-1:] if one else embeds.index_select(0, index)\n"),
    Mutation("final norm of all rows but the kept", "cut.py",
             "return front.index_copy_(0, self.tail.index, stock(self._kept(front)))",
             "return front"),
    # the gate
    Mutation("gate: hidden states of all rows", "gate.py",
             "if capture is not None and capture not in _LAST_ROW_CAPTURES and not speculates:",
             "if False:"),
    Mutation("gate: drafts that read every row", "gate.py",
             'if speculates and getattr(algorithm, "name", None) not in _LAST_ROW_DRAFTS:',
             "if False:"),
    Mutation("gate: LoRA rows", "gate.py",
             'if any(adapter is not None for adapter in getattr(forward_batch, "lora_ids", None) '
             "or ()):", "if False:"),
    Mutation("gate: captures in the tail", "gate.py",
             "if any(layer >= first - 1 for layer in model.layers_to_capture):", "if False:"),
    Mutation("gate: graph capture", "gate.py",
             "return CAPTURING if seams.is_capturing() else None", "return None"),
    Mutation("gate: server arguments", "gate.py",
             "        if argument(name):\n            return reason", "        pass"),
    Mutation("gate: unread although logprobs are wanted", "gate.py",
             "        and not _wants_input_logprobs(forward_batch)\n", ""),
    Mutation("gate: unread although a request decodes along", "gate.py",
             "        and min(forward_batch.extend_seq_lens_cpu) > 1\n", ""),
    Mutation("gate: all layers shared", "gate.py",
             "return layers - shared if 0 < shared < layers else None",
             "return layers - shared if shared else None"),
    Mutation("gate: unproven backends", "gate.py",
             'return f"the attention backend {type(backend).__name__} is not proven"',
             "return None"),
    Mutation("gate: switch read at load only", "gate.py",
             "        if not switch.enabled():\n            return OFF\n", ""),
    Mutation("gate: few skipped rows", "gate.py",
             "if not threshold.pays(kept.total, read, threshold.min_skipped_rows()):", "if False:"),
    # failures
    Mutation("a failure is not served by stock", "patch.py",
             "        if not fallback.is_alone():\n            raise\n", "        raise\n"),
    Mutation("stock runs again although other ranks wait", "patch.py",
             "        if not fallback.is_alone():\n            raise\n", ""),
    Mutation("the second run gets overwritten embeddings", "patch.py",
             "        fallback.failed(failure)\n        fallback.put_back(embeds, copy)\n",
             "        fallback.failed(failure)\n"),
    Mutation("a failing fast path is tried for ever", "fallback.py",
             "return _failures_in_a_row >= LIMIT", "return False"),
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What became of one mutation.

    Attributes:
        caught_by: the first test that failed; None for a survivor.
        seconds: how long its tests ran.
    """

    name: str
    file: str
    caught_by: str | None
    seconds: float


class StaleMutationError(Exception):
    """A mutation's ``old`` does not occur exactly once in its file."""


def broken_copy(mutation: Mutation, directory: Path) -> None:
    """Copy the package into ``directory``, with the mutation applied."""
    shutil.copytree(REPO / PACKAGE, directory / PACKAGE, ignore=shutil.ignore_patterns("*.pyc"))
    path = directory / PACKAGE / mutation.file
    source = path.read_text()
    if source.count(mutation.old) != 1:
        raise StaleMutationError(
            f"{mutation.name!r}: its source occurs {source.count(mutation.old)} times in "
            f"{mutation.file}; bring the list of mutations up to date"
        )
    path.write_text(source.replace(mutation.old, mutation.new))


def first_failure(tests: Sequence[str], directory: Path) -> str | None:
    """Run tests against the copy in ``directory`` until one fails; return its name, or None."""
    path = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "YOCO_TEST_MODELS": "4"}
    paths = [str(REPO / "test" / "srt" / name) for name in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(path for path in paths if Path(path).exists())],
        cwd=directory,  # python -m puts it in front of the path
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise SystemExit(f"the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed[1].rpartition("test/srt/")[2]


def judge(mutation: Mutation) -> Verdict:
    """Break a copy of the package, and run the tests on it."""
    began = time.monotonic()
    caught_by = None
    with tempfile.TemporaryDirectory() as directory:
        broken_copy(mutation, Path(directory))
        for stage in STAGES:
            caught_by = caught_by or first_failure(stage, Path(directory))
    return Verdict(mutation.name, mutation.file, caught_by, round(time.monotonic() - began, 1))


def control() -> None:
    """The tests must pass on a copy that is not broken, or a failure would mean nothing.

    Raises:
        SystemExit: one of them fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(REPO / PACKAGE, Path(directory) / PACKAGE)
        failed = first_failure(WITHOUT_SERVER, Path(directory))
    if failed is not None:
        raise SystemExit(f"{failed} fails on the unbroken package; mend that first")


def main() -> int:
    """Judge every mutation, and show the verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of the names of the wanted mutations")
    parser.add_argument("--json", type=Path, help="also write the JSON document to this file")
    args = parser.parse_args()
    from rich.console import Console
    from rich.table import Table
    from tqdm import tqdm

    wanted = [mutation for mutation in MUTATIONS if args.only in mutation.name]
    try:
        for mutation in wanted:  # all of them before the first test runs
            with tempfile.TemporaryDirectory() as directory:
                broken_copy(mutation, Path(directory))
    except StaleMutationError as stale:
        print(f"error: {stale}", file=sys.stderr)
        return 2
    control()
    verdicts = [judge(mutation) for mutation in tqdm(wanted, unit="mutation")]
    table = Table("mutation", "file", "caught by", "seconds")
    for verdict in verdicts:
        table.add_row(
            verdict.name, verdict.file, verdict.caught_by or "SURVIVED", f"{verdict.seconds:.0f}"
        )
    Console(width=160).print(table)
    survivors = [verdict.name for verdict in verdicts if verdict.caught_by is None]
    document = {
        "sglang": version("sglang"),
        "mutations": len(verdicts),
        "survivors": survivors,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
