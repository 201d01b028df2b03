"""What ``doctor`` prints before a server is started; real servers give the same reasons."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from test_load_faults import AROUND, plugin
from test_refused_flags import REFUSED

import forked
from server import python_path
from sglang_gemma4_reference import releases
from sglang_gemma4_yoco import settings
from sglang_gemma4_yoco.commands import doctor as command
from sglang_gemma4_yoco.commands import preflight
from sglang_gemma4_yoco.commands.doctor import Findings
from sglang_gemma4_yoco.core import gate
from sglang_gemma4_yoco.loading import metrics, patch
from sglang_gemma4_yoco.loading.limits import PIPELINE, server_reason
from sglang_gemma4_yoco.prefill_graphs import repair, sglang
from stand_ins import prefill_graphs, server_args

pytestmark = pytest.mark.usefixtures("outside_of_a_server")

_CPU = ("--device", "cpu", "--dtype", "float32")
# ``calls`` comes before it, and ``found`` is where the answers go.
_CALLS = """
import contextlib, io, json, sys
from sglang_gemma4_yoco.commands.main import main
touched, answers = [], []
def hook(event, args):
    if event in ("socket.bind", "os.mkdir"):
        touched.append([event, str(args)])
for argv in calls:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    answers.append({"status": status, "out": out.getvalue(), "err": err.getvalue()})
    if not touched:
        sys.addaudithook(hook)  # from the second on: SGLang's caches are there
        touched.append("watched")
import torch
cuda = torch.cuda.is_initialized()
with open(found, "w") as file:
    json.dump({"answers": answers, "touched": touched[1:], "cuda": cuda}, file)
"""
_PREFILL, _DECODE = "--prefill-attention-backend", "--decode-attention-backend"
BACKENDS = ("breakable", "disabled", "full")
OTHER_PREFILL = (_PREFILL, "intel_xpu", _DECODE, "triton")
OTHER_DECODE = (_PREFILL, "triton", _DECODE, "intel_xpu")


@dataclass(frozen=True)
class Answer:
    """What a call of the command line gave."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Of --json: the last line."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    @property
    def verdict(self) -> tuple[int, bool | None, str | None]:
        return self.status, self.document["active"], self.document["reason"]


def environment(**changed: str) -> dict[str, str]:
    """This process's, with none of the package's variables but those."""
    ours = "SGLANG_GEMMA4_YOCO"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "HF_HUB_OFFLINE": "1", **changed}


def doctor(
    directory: Path, *calls: Sequence[str], **variables: str
) -> tuple[list[Answer], dict[str, Any]]:
    """Calls of the command, in one process that has SGLang imported already.

    Returns:
        Their answers, and what else ``_CALLS`` has found.
    """
    found, log = directory / "answers.json", directory / "output"
    begin = f"calls, found = {[['doctor', *call] for call in calls]!r}, {str(found)!r}\n"
    where: Any = {"cwd": directory, "env": environment(**variables), "log": log}
    assert forked.as_this_process(where["env"])
    assert forked.Program(["-c", begin + _CALLS], **where).wait(300) == 0, log.read_text()
    document = json.loads(found.read_text())
    return [Answer(**answer) for answer in document["answers"]], document


class Calls:
    """Calls of ``doctor --json`` on the tiny model, by their flags; all of them in one process.

    Attributes:
        touched: ports and directories that a call has made, and whether CUDA was initialised.
    """

    FLAGS: tuple[tuple[str, ...], ...] = (
        (),
        *((refused.argument, *refused.value) for refused in REFUSED),
        ("--enable-single-batch-overlap",),
        ("--cpu-offload-gb", "1"),
        ("--pp-size", "2"),
        *((f"--cuda-graph-backend-prefill={backend}",) for backend in BACKENDS),
        ("--is-embedding",),
        ("--quantization", "fp8"),
        ("--kv-cache-dtype", "fp8_e5m2"),
        ("--attention-backend", "intel_xpu"),
        OTHER_PREFILL,
        OTHER_DECODE,
        ("--no-such-flag",),
        ("--help",),
        ("--model-path", "/another"),
        ("--enable-lora",),  # SGLang wants more than that
    )

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        begin = ("--json", "--model-path")
        calls = [[*begin, str(checkpoint), "--", *_CPU, *flags] for flags in self.FLAGS]
        config = json.loads((checkpoint / "config.json").read_text())
        config["text_config"]["num_kv_shared_layers"] = 0
        unshared = directory / "unshared"
        unshared.mkdir()
        (unshared / "config.json").write_text(json.dumps(config))
        calls.append([*begin, str(unshared)])
        calls += [[*begin, str(directory / "none")], [*begin, "nobody/nothing"], ["--json"]]
        answers, document = doctor(directory, *calls)
        self._answers = dict(zip(self.FLAGS, answers, strict=False))
        self.unshared, self.no_directory, self.no_name, self.nothing = answers[-4:]
        self.touched, self.cuda = document["touched"], document["cuda"]

    def __getitem__(self, flags: tuple[str, ...]) -> Answer:
        """The answer for a server with these flags besides."""
        return self._answers[flags]


@pytest.fixture(scope="module")
def calls(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Calls:
    return Calls(tiny_checkpoint, tmp_path_factory.mktemp("doctor"))


def test_a_server_that_would_be_active(calls: Calls) -> None:
    answer = calls[()]
    assert answer.verdict == (0, True, None)
    found = answer.document
    assert set(command.FACTS) <= found.keys()
    assert None not in [found[name] for name in command.FACTS if name != "quantisation"]
    assert (found["layers"], found["first_shared"]) == (8, 4)
    assert found["attention"] == ["triton"]
    assert found["plugins"]["installed"] is True
    assert answer.err == ""


def test_nothing_is_started_or_left(calls: Calls) -> None:
    assert calls.touched == []
    assert calls.cuda is False


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
def test_real_servers_give_the_same_reason(calls: Calls, refused: Any) -> None:
    """``test_refused_flags`` starts them."""
    answer = calls[(refused.argument, *refused.value)]
    assert answer.verdict == (1, False, refused.reason)


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        (("--enable-deterministic-inference",), {"enable_deterministic_inference": True}),
        (("--enable-single-batch-overlap",), {"enable_single_batch_overlap": True}),
        (("--cpu-offload-gb", "1"), {"cpu_offload_gb": 1}),
        ((), {}),
    ],
    ids=["deterministic", "overlap", "offloaded", "none"],
)
def test_the_gate_gives_the_same_reason(
    calls: Calls, tiny_checkpoint: Path, flags: Sequence[str], arguments: dict[str, Any]
) -> None:
    """On arguments that SGLang has resolved and published in this process."""
    args = server_args(model_path=str(tiny_checkpoint), device="cpu", dtype="float32", **arguments)
    with releases.serving(args):
        assert calls[flags].document["reason"] == server_reason()


@pytest.mark.parametrize(
    ("flags", "status", "reason"),
    [
        (("--pp-size", "2"), 1, PIPELINE),
        (("--is-embedding",), 1, gate.EMBEDDINGS),
        (("--quantization", "fp8"), 2, "quantisation fp8: the kinds of layers are settled"),
        (("--enable-lora",), 2, "SGLang does not resolve these flags on this machine (Assert"),
    ],
)
def test_other_reasons(calls: Calls, flags: Sequence[str], status: int, reason: str) -> None:
    answer = calls[flags]
    assert answer.status == status
    assert answer.document["reason"].startswith(reason)
    assert answer.document["active"] is (False if status == 1 else None)


def test_a_model_without_a_tail(calls: Calls) -> None:
    assert calls.unshared.verdict == (1, False, metrics.NO_MODEL)


def test_prefill_graphs(calls: Calls) -> None:
    """Asked for by name, SGLang's recording is repaired; not so another backend's."""
    named = "--cuda-graph-backend-prefill"
    for backend in ("disabled", "breakable"):
        assert calls[(f"{named}={backend}",)].verdict == (0, True, None)
    full = calls[(f"{named}=full",)]
    assert full.status == 1
    assert full.document["reason"].startswith("SGLang does not start with prefill CUDA graphs")
    assert full.document["reason"].endswith(f"{named}=disabled starts it")


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"enable_multimodal": False}, False),
        ({"language_model_only": True}, False),
    ],
)
def test_prefill_graphs_where_shared_layers_are_recorded(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, bool], refused: bool
) -> None:
    """As up to 0.5.18: a multimodal model stops the server, another one is replayed."""
    monkeypatch.setattr(sglang, "_indexes_shared_layers", lambda: True)
    findings = Findings()
    config = CudaGraphConfig(prefill=PhaseConfig(backend=Backend.BREAKABLE))
    with releases.published(cuda_graph_config=config):
        preflight._prefill_graphs(findings, changes, changes.get)
    assert [sglang.IDS_AND_EMBEDDINGS in refusal for refusal in findings.refusals] == [
        True
    ] * refused


REPAIRED = f"backend 'breakable': SGLang's capture is repaired ({sglang.SHARED_LAYER_IDS})"
UNREPAIRED = "backend 'breakable': SGLang cannot capture this model"
SHORTENED = "replayed prefills are shortened, where the check at start agrees"
SWITCH = settings.name_of("prefill_graphs")
#: Settings that may be 0 while the path is on.
AT_0 = ("graph_rows", "self_check", "audit", "audit_strict", "prefill_graphs")
ADVICE = (
    "prefills of up to 2048 tokens are captured; long ones gain nothing by it: try "
    "--cuda-graph-max-bs-prefill=1024"
)


def lines_and_refusals(switch: bool) -> tuple[list[str], list[str]]:
    """What is printed of prefill graphs, and why such a server is refused."""
    findings = Findings()
    with settings.changed(prefill_graphs=switch):
        preflight._prefill_graphs(findings, {}, {}.get)
    return [line[1] for line in findings.lines], findings.refusals


@pytest.mark.parametrize(
    ("named", "installed", "switch", "longest", "lines"),
    [
        ("breakable", True, True, 1024, [REPAIRED, SHORTENED]),
        ("breakable", True, True, 2048, [REPAIRED, SHORTENED, ADVICE]),
        (None, True, True, 1024, [UNREPAIRED]),
        ("breakable", False, True, 1024, [UNREPAIRED]),
        ("breakable", True, False, 1024, [f"{UNREPAIRED} ({SWITCH}=0: it is not repaired)"]),
    ],
    ids=["by name", "long ones", "not by name", "no plugin", "switched off"],
)
def test_prefill_graphs_that_are_repaired(
    monkeypatch: pytest.MonkeyPatch,
    named: str | None,
    installed: bool,
    switch: bool,
    longest: int,
    lines: list[str],
) -> None:
    """As at start: asked for by name, by a plugin that is there, and not switched off."""
    monkeypatch.setattr(sglang, "_indexes_shared_layers", lambda: False)
    monkeypatch.setattr(patch, "is_installed", lambda: installed)
    with prefill_graphs(Backend.BREAKABLE, named, max_bs=longest):
        found, refusals = lines_and_refusals(switch)
    assert found == lines
    assert bool(refusals) is (REPAIRED not in lines)


@pytest.mark.parametrize(
    ("backend", "switch", "replays"),
    [
        (Backend.BREAKABLE, True, SHORTENED),
        (Backend.BREAKABLE, False, f"replayed prefills are not shortened ({SWITCH}=0); "),
        (Backend.FULL, True, f"replayed prefills are not shortened ({repair.NO_BREAKS}); "),
    ],
)
def test_prefill_graphs_that_need_no_repair(
    monkeypatch: pytest.MonkeyPatch, backend: str, switch: bool, replays: str
) -> None:
    """As a text model of 0.5.18; replays of breakable graphs alone are shortened."""
    monkeypatch.setattr(sglang, "capture_error", lambda **_: None)
    with prefill_graphs(backend):
        found, refusals = lines_and_refusals(switch)
    assert found[0] == f"backend {backend!r}: SGLang captures them"
    assert found[1].startswith(replays)
    assert ("--cuda-graph-backend-prefill=disabled" in found[1]) is (replays != SHORTENED)
    assert not refusals


@pytest.mark.parametrize(
    ("flags", "names", "others"),
    [
        (("--kv-cache-dtype", "fp8_e5m2"), ["triton"], None),
        (("--attention-backend", "intel_xpu"), ["intel_xpu"], "intel_xpu"),
        (OTHER_PREFILL, ["intel_xpu", "triton"], "intel_xpu"),
        (OTHER_DECODE, ["intel_xpu", "triton"], "intel_xpu"),
    ],
    ids=["a rounded cache", "another backend", "for prefills", "for decode steps"],
)
def test_what_is_settled_at_start(
    calls: Calls, flags: Sequence[str], names: list[str], others: str | None
) -> None:
    status, active, reason = calls[flags].verdict
    assert calls[flags].document["attention"] == names
    assert (status, active) == ((0, True) if others is None else (2, None))
    assert others is None or str(reason).startswith(f"attention by {others}: settled when a server")


def test_a_plugin_that_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkout that was never installed: SGLang would not find it."""
    monkeypatch.delenv(command.RESTRICTION, raising=False)
    remedy = "the plugin is not registered in this environment: pip install . in a checkout of it"
    for names, refusals in ((["another"], [remedy]), (["another", "gemma4_yoco"], [])):
        found = [SimpleNamespace(name=name) for name in names]
        registered = {"sglang.srt.plugins": found}
        monkeypatch.setattr(command, "entry_points", lambda group, of=registered: of[group])
        findings = Findings()
        command._discovery(findings)
        assert findings.refusals == refusals
        assert findings.facts["plugins"]["found"] == sorted(names)


@pytest.mark.parametrize(
    ("name", "value", "refusals"),
    [
        ("SGLANG_GEMMA4_YOCO", "0", ["SGLANG_GEMMA4_YOCO=0"]),
        ("SGLANG_GEMMA4_YOCO", "1", []),
        *((settings.name_of(field), "0", []) for field in AT_0),
    ],
)
def test_a_switch_that_is_off(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, refusals: list[str]
) -> None:
    """Other settings may be 0 while the path is on."""
    for variable in settings.VARIABLES.values():
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv(name, value)
    findings = Findings()
    command._settings(findings)
    assert findings.refusals == refusals


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--no-such-flag",), "the server's flags: unrecognized arguments: --no-such-flag"),
        (("--help",), "with --help or --version they start no server"),
        (("--model-path", "/another"), "two models: "),
    ],
)
def test_flags_that_start_no_server(calls: Calls, flags: Sequence[str], words: str) -> None:
    answer = calls[flags]
    assert answer.status == 2
    [line] = answer.err.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert answer.verdict == (2, None, line.removeprefix("error: "))


def test_models_that_cannot_be_read(calls: Calls) -> None:
    for answer, words in (
        (calls.no_directory, "none cannot be read ("),
        (calls.no_name, "the model nobody/nothing cannot be read ("),
        (calls.nothing, "no model is named: give --model-path"),
    ):
        status, active, reason = answer.verdict
        assert (status, active) == (2, None)
        assert words in str(reason)
        assert answer.document["layers"] is None


def test_settings_and_other_plugins(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """All that is wrong is named at once, and the first of it is the reason."""
    wrong = {
        "MIN_SKIPPED_ROWS": ("few", "a whole number from 1"),
        "GRAPH_ROWS": ("all", "a whole number from 0"),
        "SELF_CHECK": ("on", "1 or 0"),
        "AUDIT": ("often", "a whole number from 0"),
        "AUDIT_STRICT": ("very", "1 or 0"),
        "PREFILL_GRAPHS": ("some", "1 or 0"),
    }
    variables = {f"{settings.SWITCH}_{name}": value for name, (value, _) in wrong.items()}
    [answer], _ = doctor(
        tmp_path,
        ("--json", "--model-path", str(tiny_checkpoint), "--", *_CPU),
        **{**variables, "SGLANG_PLUGINS": "gemma4_row_trace"},
    )
    *invalid, plugins = answer.document["refusals"]
    assert answer.verdict == (1, False, invalid[0])
    for (name, (value, accepted)), refusal in zip(wrong.items(), invalid, strict=True):
        start = f"{settings.SWITCH}_{name}={value!r} is not a valid value: use {accepted}"
        assert refusal.startswith(start)
    assert plugins == "SGLANG_PLUGINS=gemma4_row_trace leaves gemma4_yoco out: add it, or unset it"
    assert answer.document["settings"].items() >= variables.items()


def test_a_report_to_read(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """With another plugin beside this one, and a setting that does not exist."""
    [answer], _ = doctor(
        tmp_path,
        ("--model-path", str(tiny_checkpoint), "--", *_CPU),
        PYTHONPATH=python_path(plugin(tmp_path / "path", "a_hook", AROUND)),
        SGLANG_GEMMA4_YOCO_GRAPHS="0",
    )
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.splitlines()[-1] == "It would be active."
    for words in (
        r"SGLANG_GEMMA4_YOCO_GRAPHS +is no setting of this version, and is ignored",
        r"first shared layer +4: layers 4 to 7 have no K/V",
        r"found by SGLang +a_hook, gemma4_",
        r"settled at start +whether K and V can be read, whether the tail is captured, whether",
    ):
        assert re.search(words, answer.out), words


@pytest.mark.release
def test_a_module_that_moved(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A future SGLang without one of the modules that the patch imports."""
    gone = (
        "import sys, sglang.srt.model_executor as package\n"
        "sys.modules['sglang.srt.model_executor.forward_context'] = None\n"
        "vars(package).pop('forward_context', None)\n"
    )
    [answer], _ = doctor(
        tmp_path,
        ("--json", "--model-path", str(tiny_checkpoint), "--", *_CPU),
        PYTHONPATH=python_path(plugin(tmp_path / "path", "a_move", gone)),
    )
    status, active, reason = answer.verdict
    assert (status, active, answer.err) == (1, False, "")
    assert re.search(r" lacks what the patch needs \(.*forward_context", str(reason))


def test_without_sglang() -> None:
    code = """
import importlib.metadata as metadata, sys
real = metadata.version
def version(name):
    if name == "sglang":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
sys.modules["sglang"] = None
from sglang_gemma4_yoco.commands.main import main
sys.exit(main(["doctor"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: no SGLang is installed in this environment; run this where the server runs\n"
    )


def test_help_imports_neither_torch_nor_sglang() -> None:
    code = """
import sys
from sglang_gemma4_yoco.commands.main import main
for argv in (["--help"], ["doctor", "--help"], ["status", "--help"]):
    try:
        main(argv)
    except SystemExit as left:
        assert left.code == 0
print(sorted({"torch", "sglang", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"
