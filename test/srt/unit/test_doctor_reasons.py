"""Reasons that a server finds at start: ``doctor`` gives each, or a list says why it cannot."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

import sglang_gemma4_yoco
from harness.documented import constants_of, text_of
from sglang_gemma4_reference import releases
from sglang_gemma4_yoco import compat, settings
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.commands import preflight
from sglang_gemma4_yoco.commands.console import Report
from sglang_gemma4_yoco.models import gemma4

pytestmark = pytest.mark.usefixtures("outside_of_a_server")

PACKAGE = Path(sglang_gemma4_yoco.__file__).parent
#: Files with reasons of admission, of an eager tail, and of prefill graphs that are not cut.
ADMISSION = ("admission/*.py", "models/*.py", "compat/backends.py", "compat/names.py")
TAIL = ("captured/lifecycle.py", "checking/tail_graphs.py", "compat/decode_graphs.py")
EXITS = ("prefill_exits/exit_setup.py", "startup/arguments_resolved.py")

# ``test_limits`` asks doctor too.
FLAGS = "a flag or a variable, which doctor reads with a server's own code"
UNKNOWN = "doctor says that it is unknown, and what decides it"
IMPORTED = "doctor imports the classes and compares the names"
WEIGHTS = "the model's modules exist once it is loaded"
BUILT = "the attention backends and pools exist once a server has built them"
RANKS = "each rank knows its own setup only"
MEASURED = "it is measured or compared at start"
LATER = "it depends on a request to the running server"

#: Reason, with ``...`` for its variable parts -> how doctor answers it, or why it cannot.
ANSWERS = {
    # admission
    "... with prefill CUDA graphs makes SGLang's own answers wrong: unset it": FLAGS,
    "SGLang's own fast prefill is on (--...): remove that flag to use this package's": FLAGS,
    "embeddings": FLAGS,
    "SGLang's dumper may dump any row: unset DUMPER_ENABLE and DUMPER_SERVER_PORT": FLAGS,
    "SGLang's KV canary would take the check's synthetic requests for violations: leave "
    "--kv-canary out": FLAGS,
    "..., with speculative decoding": FLAGS,
    "... with prefill-decode disaggregation": FLAGS,
    "the model has no KV-shared tail": IMPORTED,
    "SGLang ... lacks ...: prefills of ... run as stock. ...": IMPORTED,
    "there is no layer before the donor": WEIGHTS,
    "layer ... is a ...": WEIGHTS,
    "the attention of layer ... is a ...": WEIGHTS,
    "layer ... reads K and V of layer ...": WEIGHTS,
    "rows of ... may depend on each other": UNKNOWN,
    "... ......., which may read rows that are not computed: see docs/help.md; ...=... accepts "
    "it": IMPORTED,
    "a text model's forward is no longer this package's: another plugin replaced it": IMPORTED,
    "it could not be determined whose code reads the model's rows": IMPORTED,
    "the attention backend ... is not known to be correct": UNKNOWN,
    "SGLang cannot run Gemma 3n's prefills on Triton's attention, which returns heads that the "
    "layer does not flatten (sgl-project/sglang#37515)": UNKNOWN,
    "FlashInfer's prefills of Gemma 3n may read other requests' K and V, or see one key fewer "
    "after a cached prefix (docs/upstream/gemma3n_window.md)": UNKNOWN,
    "no attention backend could be built for the tail": BUILT,
    "K and V are in a ..., whose layout is not known": BUILT,
    "K and V are quantised (...)": UNKNOWN,
    "K and V are not stored slot by slot, but in ... dimensions": BUILT,
    "a KV cache of ... with weights of ...": UNKNOWN,
    # an eager tail
    "it is not captured yet": LATER,
    "SGLang has no full CUDA graphs for decode": FLAGS,
    "...: in this role set --cuda-graph-backend-decode=full --cuda-graph-max-bs-decode=32": FLAGS,
    "its new arguments are not checked; the tail runs eagerly, as an extend batch": FLAGS,
    "it runs as an extend batch, since this release of SGLang was not tested": FLAGS,
    "the per-layer inputs are quantised": UNKNOWN,
    "disaggregation's transfers read and write K and V while the server runs": LATER,
    "another thread writes or reads K and V of layers while they run": BUILT,
    "enable_hierarchical_cache: ...": LATER,
    "no graph agrees with the eager layers": MEASURED,
    "less than ... MiB of GPU memory is free: lower --mem-fraction-static": MEASURED,
    # prefill graphs
    "in this release of SGLang captured prefills are not cut": FLAGS,
    "SGLang captures prefills by default on CUDA only": FLAGS,
    "with STANDALONE SGLang would capture prefills of the draft model too": FLAGS,
    "the flags, or SGLang's rules for them, choose the backend": FLAGS,
    "the check's prefill did not leave at an exit": MEASURED,
}
#: Other texts of these files.
NO_REASONS = {
    "Install a supported SGLang, or a newer sglang-gemma4-yoco",
    "YOCO fast prefill: ... failed",
    "the captured tail",
}


def reasons_in(file: Path) -> Iterator[str]:
    """Yield the texts of a file's refusals, and of its reasons as constants and results."""
    tree = ast.parse(file.read_text())
    for name, value in constants_of(tree).items():
        if name.isupper() and re.search("[a-z:] |=", text_of(value)):  # else it is a name
            yield text_of(value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ServerRefusal":
            yield text_of(node.args[0])
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.JoinedStr):
            yield text_of(node.value)


def test_every_reason_has_an_answer() -> None:
    """One that is new is entered with doctor's answer, or with why it has none."""
    found = set[str]()
    for pattern in (*ADMISSION, *TAIL, *EXITS):
        for file in PACKAGE.glob(pattern):
            found.update(reasons_in(file))
    # Others are put together from texts found elsewhere.
    assert {reason for reason in found if re.search("[a-z]", reason)} - NO_REASONS == {*ANSWERS}


# ---------------------------------------------------------------- doctor's answers


def ask_doctor(graphs: CudaGraphConfig | None = None, **given: Any) -> Report:
    """Return doctor's report on a server with these arguments, and nothing else."""
    report = Report()
    report.entries["quantisation"] = None
    config = graphs or CudaGraphConfig(decode=PhaseConfig(backend="full"))
    with releases.published(cuda_graph_config=config, **given):
        preflight._judge(report, gemma4, compat.server.read_argument)
    return report


def eager_tail(report: Report) -> list[str]:
    return [line.split(maxsplit=2)[2] for line in report.lines if "eager tail" in line]


def test_an_eager_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not eager_tail(ask_doctor())
    for name, reason in lifecycle._UNSUPPORTED.items():
        with monkeypatch.context() as one:
            given = {name: True}
            if name.isupper():
                one.setenv(name, "1")
                given = {}
            assert eager_tail(ask_doctor(**given)) == [f"{name}: {reason}"]
    with settings.changed(graph_rows=0):
        assert eager_tail(ask_doctor()) == [lifecycle.GRAPHS_OFF]
    none = CudaGraphConfig(decode=PhaseConfig(backend="disabled"))
    assert eager_tail(ask_doctor(none)) == [lifecycle.NO_GRAPHS]
    role = {"disaggregation_mode": "prefill"}
    assert eager_tail(ask_doctor(none, **role)) == [lifecycle.NO_GRAPHS_BY_ROLE]
