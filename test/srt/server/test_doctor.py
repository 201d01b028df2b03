"""``doctor``'s report on a server that is not started; real servers give the same reasons."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version
from sglang.srt.model_executor.cuda_graph_config import Backend

from harness import typed_secrets
from harness.doctor import Answer, doctor
from harness.documented import sample
from harness.other_plugins import AROUND, plugin
from harness.server import python_path
from harness.stand_ins import prefill_graphs
from sglang_gemma4_reference import gemma3n
from sglang_gemma4_reference.checkpoint import PRESETS, write_checkpoint
from sglang_gemma4_yoco import compat, settings
from sglang_gemma4_yoco.admission import arguments
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.commands import doctor as command
from sglang_gemma4_yoco.commands import preflight
from sglang_gemma4_yoco.commands.console import ENTRIES, CommandError, Report
from sglang_gemma4_yoco.models import gemma3n as gemma3n_model
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.startup import patch

pytestmark = pytest.mark.usefixtures("outside_of_a_server")

#: By flags or by command line: the exit status, and how the reason begins. SGLang's capture of
#: prefills is repaired for the backend "breakable" alone; "--enable-lora" needs more than that.
Verdicts = dict[str, tuple[int, str]]
_CASES = json.loads(Path(__file__).with_name("doctor_verdicts.json").read_text())
OF_THE_TINY_MODEL = _CASES["flags of a server of the tiny model"]
OTHERS = _CASES["other command lines"]
#: Exit status -> the report's verdict.
ACTIVE = {0: True, 1: False, 2: None}
Answers = tuple[dict[str, Answer], dict[str, Any]]


@pytest.fixture(scope="module")
def served(tiny_checkpoint: Path) -> list[str]:
    """Return the tiny model, with the arguments that its server needs on a CPU."""
    return ["--model-path", str(tiny_checkpoint), "--", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def answers(
    tiny_checkpoint: Path, served: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    """Return the answers to all command lines, and the other findings."""
    directory = tmp_path_factory.mktemp("doctor")
    tiny = (tiny_checkpoint / "config.json").read_text()
    config = json.loads(tiny)
    config["text_config"]["num_kv_shared_layers"] = 0
    (directory / "unshared").mkdir()
    (directory / "unshared" / "config.json").write_text(json.dumps(config))
    # As ModelOpt writes it: the config says nothing of it.
    (directory / "modelopt").mkdir()
    (directory / "modelopt" / "config.json").write_text(tiny)
    (directory / "modelopt" / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "FP8"}}'
    )
    gemma3n.write_config(directory / "gemma3n", gemma3n.E2B_TINY, multimodal=True)
    calls = {}
    for flags in OF_THE_TINY_MODEL:
        calls[flags] = ["--json", *served, *shlex.split(flags)]
    for line in OTHERS:
        calls[line] = ["--json", *shlex.split(line.format(tmp=directory))]
    found, document = doctor(directory, *calls.values())
    return dict(zip(calls, found, strict=True)), document


@pytest.mark.parametrize(("call", "verdict"), (OF_THE_TINY_MODEL | OTHERS).items())
def test_verdicts(answers: Answers, call: str, verdict: tuple[int, str]) -> None:
    answer, (status, reason) = answers[0][call], verdict
    document = answer.document
    assert (answer.status, document["active"]) == (status, ACTIVE[status])
    directory = str(document["model"]).rpartition("/")[0]
    assert str(document["reason"]).startswith(reason.format(tmp=directory))
    assert answer.err == ""


def test_the_sample_in_the_documents(tmp_path: Path) -> None:
    """Settings, the tests' own plugins, and the versions of PyTorch and Python may differ."""
    model = tmp_path / "models" / "gemma-4-E2B-it"
    write_checkpoint(model, PRESETS["E2B"], weights=False)
    command_line = "--model-path ./models/gemma-4-E2B-it -- --device cpu"
    [answer], _ = doctor(tmp_path, command_line.split())
    head, _, printed = sample("doctor").partition("\n")
    assert head == f"$ sglang-gemma4-yoco doctor {command_line}"
    answered = re.sub(r"== Settings.*?(?=== )", "", answer.out.rstrip("\n"), flags=re.DOTALL)
    shown = []
    for text in (answered, printed):
        text = re.sub(r"^(  (?:torch|python) +)\S+$", r"\1...", text, flags=re.MULTILINE)
        shown.append(re.sub(r"gemma4_(?:row_trace|tail_failures), ", "", text))
    assert shown[0] == shown[1]


def test_a_refusal_stands_whatever_else_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(refusals=["refused"], unknowns=["unknown"])
    report.show(as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (report.exit_status, document["active"], document["reason"]) == (1, False, "refused")


def test_what_is_known_of_a_server(answers: Answers) -> None:
    found = answers[0][""].document
    assert set(ENTRIES) <= found.keys()
    for name in ENTRIES:
        assert (found[name] is None) == (name == "quantisation"), name
    assert (found["layers"], found["first_shared"]) == (8, 4)
    assert found["plugins"]["installed"] is True
    hybrid = "--prefill-attention-backend intel_xpu --decode-attention-backend triton"
    for call, attention in (
        ("", ["triton"]),
        ("--attention-backend intel_xpu", ["intel_xpu"]),
        (hybrid, ["intel_xpu", "triton"]),
    ):
        assert answers[0][call].document["attention"] == attention


def test_nothing_is_started_or_left(answers: Answers) -> None:
    """No port is opened, no directory made, and CUDA not initialised."""
    assert answers[1]["touched"] == []
    assert answers[1]["cuda"] is False


# ---------------------------------------------------------------- secrets


@pytest.fixture(scope="module")
def with_secrets(served: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Return reports on servers with secrets: as text for flags, as JSON for files."""
    directory = tmp_path_factory.mktemp("secrets")
    calls = {}
    for name, flags in typed_secrets.FLAGS.items():
        calls[name] = [*served, *flags]
    for name, text in typed_secrets.FILES.items():
        file = directory / f"{name}.yaml"
        file.write_text(text)
        calls[name] = ["--json", *served, "--config", str(file)]
    found, _ = doctor(directory, *calls.values(), **typed_secrets.VARIABLES)
    return dict(zip(calls, found, strict=True))


@pytest.mark.parametrize("name", [*typed_secrets.FLAGS, *typed_secrets.FILES])
def test_no_secret_is_shown(with_secrets: dict[str, Answer], name: str, tmp_path: Path) -> None:
    """All else is shown: the names of flags, and what decides how a server runs."""
    answer = with_secrets[name]
    assert not list(typed_secrets.places(out=answer.out, err=answer.err, folder=tmp_path))
    accepted = name in typed_secrets.ACCEPTED
    assert answer.status == (0 if accepted else 2), answer.out
    if accepted:
        [flags] = re.findall("^  flags  .*", answer.out, re.MULTILINE)
        flag = typed_secrets.FLAGS[name][0].partition("=")[0]
        assert flags.endswith(f" --device cpu --dtype float32 {flag}")


CUT_TOO = "replayed prefills are cut too, if the checks at start pass"


@pytest.mark.parametrize(
    ("given", "is_repaired"),
    [
        ({}, True),
        ({"installed": False}, False),
        ({"setting": False}, False),
        ({"kind": gemma3n_model}, False),
        ({"has_exits": False}, False),
    ],
    ids=["fixed", "no plugin", "switched off", "Gemma 3n", "an older release"],
)
def test_prefill_graphs(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], is_repaired: bool
) -> None:
    """As at start: whatever turned them on, the plugin must be on, and its setting not 0."""
    monkeypatch.setattr(compat.release, "has_exits", lambda: given.get("has_exits", True))
    monkeypatch.setattr(patch, "installed", given.get("installed", True))
    report = Report()
    switch = settings.changed(prefill_graphs=given.get("setting", True))
    with prefill_graphs(Backend.BREAKABLE), switch:
        preflight._prefill_graphs(report, given.get("kind", gemma4))
        if is_repaired:
            [line] = report.lines
            assert line.endswith(f"backend 'breakable': {CUT_TOO}")
            assert not report.refusals
        else:
            [refusal] = report.refusals
            assert refusal.endswith("--cuda-graph-backend-prefill=disabled starts it")


@pytest.mark.parametrize(
    ("installed", "kind", "is_said"),
    [(True, gemma4, True), (False, gemma4, False), (True, gemma3n_model, False)],
)
def test_prefill_graphs_that_stay_off(
    monkeypatch: pytest.MonkeyPatch, installed: bool, kind: Any, is_said: bool
) -> None:
    """The setting turns none on without the plugin, nor for Gemma 3n: that needs no reason."""
    monkeypatch.setattr(patch, "installed", installed)
    report = Report()
    with prefill_graphs(Backend.DISABLED), settings.changed(prefill_graphs=True):
        preflight._prefill_graphs(report, kind)
    assert bool(report.lines) is is_said
    assert not report.refusals


def test_a_plugin_that_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would not find it, as in a checkout that was never installed."""
    monkeypatch.delenv(command.RESTRICTION, raising=False)
    found = {"sglang.srt.plugins": [SimpleNamespace(name="another")]}
    monkeypatch.setattr(command, "entry_points", lambda group: found[group])
    report = Report()
    command._discovery(report)
    remedy = "pip install --no-deps . in a checkout of it"
    assert report.refusals == [f"the plugin is not registered in this environment: {remedy}"]
    assert report.entries["plugins"]["found"] == ["another"]


TOO_OLD = """
    from sglang_gemma4_yoco import plugin
    plugin.version = lambda name: "0.5.16"
"""


def test_a_plugin_that_refuses_this_sglang(served: list[str], tmp_path: Path) -> None:
    """SGLang loads it as a server does, and doctor reports its reason."""
    [answer], _ = doctor(
        tmp_path,
        ["--json", *served],
        PYTHONPATH=python_path(plugin(tmp_path / "path", "a_version", TOO_OLD)),
    )
    assert (answer.status, answer.document["active"]) == (1, False)
    assert answer.document["reason"].startswith("SGLang 0.5.16 is not in the supported range")


@pytest.mark.parametrize(
    ("changed", "refusals"),
    [
        ({"untested": False}, ["is newer than the tested releases"]),
        ({"untested": True, "self_check": False}, ["UNTESTED=1 needs SGLANG_GEMMA4_YOCO_SELF"]),
        ({"untested": True, "self_check": True}, []),
    ],
    ids=["default", "unchecked", "wanted"],
)
def test_a_release_that_was_not_tested(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, bool], refusals: list[str]
) -> None:
    """The reason is the same as a server's."""
    monkeypatch.setattr(compat.release, "LAST_TESTED", Version("0.5.0"))
    report = Report(entries={"plugins": {}})
    report.begin("Model")
    with settings.changed(**changed), pytest.raises(CommandError, match="required: --model-path"):
        preflight.examine(report, [])
    assert len(report.refusals) == len(refusals)
    for shown, part in zip(report.refusals, refusals, strict=True):
        assert part in shown
    printed = [line for line in report.lines if arguments.RUNS_UNTESTED in line]
    assert len(printed) == 1 - len(refusals)


def test_a_switch_that_is_off(served: list[str], tmp_path: Path) -> None:
    [answer], _ = doctor(tmp_path, ["--json", *served], **{settings.SWITCH: "0"})
    assert (answer.status, answer.document["reason"]) == (1, f"{settings.SWITCH}=0")


def test_settings_and_other_plugins(served: list[str], tmp_path: Path) -> None:
    """All faults are named at once, and the first of them is the reason."""
    variables = {
        f"{settings.SWITCH}_MIN_SKIPPED_ROWS": "few",
        f"{settings.SWITCH}_TRUST": "their model",
    }
    [answer], _ = doctor(
        tmp_path,
        ["--json", *served],
        **{**variables, "SGLANG_PLUGINS": "gemma4_row_trace"},
    )
    *invalid, plugins = answer.document["refusals"]
    assert (answer.status, answer.document["reason"]) == (1, invalid[0])
    for (name, value), refusal in zip(variables.items(), invalid, strict=True):
        assert refusal.startswith(f"{name}={value!r} is not a valid value: use ")
    assert plugins == "SGLANG_PLUGINS leaves gemma4_yoco out: add it, or unset it"
    assert answer.document["plugins"]["restricted_to"] == ["gemma4_row_trace"]
    assert answer.document["settings"].items() >= variables.items()


TALKING = """
    import sys
    print("their plugin prints")
    print("their plugin prints", file=sys.stderr)
"""


def test_a_report_to_read(served: list[str], tmp_path: Path) -> None:
    """It has a trusted plugin that prints, and a setting that does not exist.

    SGLang captures decode steps on a prefill server if it is told to, and then the tail is, too.
    """
    prefills = [*served, "--disaggregation-mode", "prefill"]
    [answer, captured], _ = doctor(
        tmp_path,
        prefills,
        [*prefills, "--cuda-graph-backend-decode=full", "--cuda-graph-max-bs-decode=32"],
        GEMMA4_CPU_GRAPHS="decode",
        PYTHONPATH=python_path(plugin(tmp_path / "path", "a_hook", AROUND + TALKING)),
        SGLANG_GEMMA4_YOCO_GRAPHS="0",
        SGLANG_GEMMA4_YOCO_TRUST="a_hook,another",
    )
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.splitlines()[-1] == "It would be active."
    assert "their plugin prints" not in answer.out
    for words in (
        r"SGLANG_GEMMA4_YOCO_GRAPHS +is not a setting of this version, and is ignored",
        r"first shared layer +4: layers 4 to 7 have no K/V",
        r"found by SGLang +a_hook, gemma4_",
        rf"\n  eager tail +{lifecycle.NO_GRAPHS_BY_ROLE}\n",
    ):
        assert re.search(words, answer.out), words
    assert "eager tail" not in captured.out
