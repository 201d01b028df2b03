"""Absence of secrets from all output of ``verify``, and from errors of all commands.

``test_doctor`` tests the same for ``doctor``, ``test_status`` for ``status``, ``test_verify`` with
real servers. All search all that was printed and every file, so that a new output is seen too.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from harness.found import outcome
from harness.stand_ins import skip_on_older
from harness.typed_secrets import FLAGS, MARK, VARIABLES, places
from scripts import command_line, environment
from sglang_gemma4_yoco.commands import redact
from sglang_gemma4_yoco.commands.console import CommandError, quote_end
from sglang_gemma4_yoco.commands.https import API_KEY
from sglang_gemma4_yoco.commands.main import main
from sglang_gemma4_yoco.commands.verify import servers, verify

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder where commands run, with keys in the environment; clear secrets after."""
    monkeypatch.chdir(tmp_path)
    for variable, value in VARIABLES.items():
        monkeypatch.setenv(variable, value)
    yield tmp_path
    redact.learn_secrets([])


def quoted(flags: list[str]) -> str:
    """Return an output that quotes flags as SGLang does, with JSON and the API key."""
    value = flags[-1]
    if value.startswith("-"):
        value = value.partition("=")[2] or value
    lines = [f"unrecognized arguments: {' '.join(flags)}", f"invalid choice: {value!r}"]
    lines += [f"ServerArgs(model_path='x', api_key={value!r})", json.dumps({"key": value})]
    return "\n".join([*lines, " ".join(value.split()), VARIABLES[API_KEY]])


# ---------------------------------------------------------------- verify


FOUND = outcome(0.0)
#: Endings and their exit statuses.
ENDS: dict[type[Exception] | None, int] = {
    None: 3,  # the same answers, but a kind was not tried; what was found quotes the flags
    servers.WrongPathError: 1,
    CommandError: 2,
    AssertionError: 2,  # of a defect: with its traceback
}


@pytest.mark.parametrize(("end", "name"), product(ENDS, FLAGS))
def test_nothing_of_verify_has_a_secret(
    end: type[Exception] | None,
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """This holds however it ends; its page, document and the end of a server are the real ones."""
    flags, log = FLAGS[name], folder / "here" / "server-on.log"

    def serve(_: Namespace, document: dict[str, Any]) -> tuple[None, None]:
        log.write_text(quoted(flags))
        server = servers.Server(True, flags, 1, log)
        server.process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        try:
            if end is not None:
                raise end(quoted(flags) + quote_end(log))
        finally:
            server.stop()
        known = {"server_args", "model", "output"}
        document |= {key: FOUND[key] for key in FOUND.keys() - known}
        document |= {"problems": [quoted(flags)], "left_out": {"a kind": quoted(flags)}}
        return None, None

    monkeypatch.setattr(verify, "check_arguments", lambda _: None)
    monkeypatch.setattr(verify, "serve_both", serve)
    monkeypatch.setattr(verify, "conclude", lambda *_: None)
    command = "verify --device cpu --model-path x --output here -- --dtype float32"
    status = main([*command.split(), *flags])
    out, err = capsys.readouterr()
    assert status == ENDS[end], err
    assert not list(places(out=out, err=err, folder=folder))
    for text in (out + err, log.read_text()):
        assert "unrecognized arguments: " in text
        assert "..." in text
    if end is None:
        document = json.loads((folder / "here" / "verify.json").read_text())
        assert document == json.loads(out.splitlines()[-1])
        assert document["server_args"].startswith("--dtype float32")
        assert "flags: `--dtype float32" in (folder / "here" / "verify.md").read_text()


# ---------------------------------------------------------------- the command line itself


@pytest.mark.parametrize(
    "line",
    [
        "status http://localhost:1 --apikey MARK",
        "status http://localhost:1 --apikey=MARK",
        "status http://localhost:1 --api-key a MARK",
        "status http://user:MARK@localhost:1",
        "status --json user:MARK@localhost:1",
        "status 'https://user:a MARK@localhost:1'",
        "status http://user:MARK@localhost:port",
        "status http://user:MARK@[::1",
        "status http://user:MARK@\u2100",
        "status http://localhost:1/?key=MARK",
        "verify --repeats 2 --api-k MARK --model-path x",
        "verify --model-path x --repeats MARK",
        "verify --apikey MARK",
        "doctor --apikey MARK -- --device cpu",
        "--apikey MARK",
        "--apikey=MARK",
    ],
)
def test_no_secret_is_in_an_error(line: str, folder: Path, capsys: Captured) -> None:
    """The error is of this command's own parser, or of a wrong address."""
    try:
        status = main(shlex.split(line.replace("MARK", MARK)))
    except SystemExit as refused:
        status = int(refused.code or 0)
    out, err = capsys.readouterr()
    if "MARK@" in line or "?key" in line:  # nobody answers there
        assert status == 3
    else:
        assert status == 2
    if "--json" in line:
        assert json.loads(out)["exit_status"] == status
    else:
        assert "error: " in err
    assert not list(places(out=out, err=err, folder=folder))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("benchmark", "invalid choice: 'benchmark'"),
        (
            "doctor --model-path x --tp 2",
            "(`doctor` and `verify` take a server's flags after `--`)",
        ),
    ],
)
def test_an_error_names_what_to_fix(line: str, said: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(line.split())
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------- scripts


@pytest.mark.parametrize("name", FLAGS)
def test_no_secret_is_in_a_result_of_a_script(name: str, capsys: Captured, folder: Path) -> None:
    """Results have the command that made them; here with servers that have secrets."""
    words = ["bench.py", "--json=a", "--", "--tp-size", "2", *FLAGS[name]]
    command = command_line.command_without_secrets(words)
    assert command.startswith("bench.py --json=a -- --tp-size 2")
    command_line.failed(environment.SetupError(quoted(FLAGS[name])))
    out, err = capsys.readouterr()
    assert not list(places(out=out + command, err=err, folder=folder))


# ---------------------------------------------------------------- redaction


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("--dtype float32 --api-key a-key --tp-size=2", "--dtype float32 --api-key --tp-size=2"),
        ("--api-key=a-key --lora-paths a=b c=d --json", "--api-key --lora-paths --json"),
        ("--enable-lora a-key --page-size 16 a-key", "--enable-lora --page-size 16"),
        ("--chunked-prefill-size -1", "--chunked-prefill-size -1"),
        ("--api_key a-key --dtype --api-key=a-key", "--api_key --dtype --api-key"),
        ("--device cpu a-key -api-key --API-KEY=a-key", "--device cpu"),
        ("--model-path http://user:a-key@host --model=http://a-key@host", "--model-path --model"),
        ("--device=cpu a-key --model-path 'a model'", "--device=cpu --model-path 'a model'"),
    ],
)
def test_names_of_flags_are_shown(flags: str, shown: str) -> None:
    assert redact.show_flags(shlex.split(flags)) == shown


def test_flags_that_are_shown_have_no_secrets() -> None:
    """Each takes one value: a number, a choice, or a name of what is served."""
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = dict(parser._option_string_actions)
    known["--tp"] = known["--tp-size"]  # as people shorten it
    skip_on_older("ServerArgs", redact.SHOWN - known.keys())
    names = {"--model-path", "--model", "--device", "--speculative-algorithm"}
    for flag in redact.SHOWN:
        action: Any = known[flag]
        assert action.nargs is None, flag
        if flag not in names and action.choices is None:
            parse = action.type
            with pytest.raises((ValueError, ArgumentTypeError)):
                parse("a text")


def test_reports_keep_their_words() -> None:
    """Secrets may be words of reports, or parts of such words."""
    values = ["triton", "2", "2048", "bfloat16", "true", "gemma4", "info"]
    redact.learn_secrets([*values, "--quantization", "compressed-tensors"])
    report = "triton, bfloat16, 2 layers of 2048: sglang_gemma4_yoco, server_info, --gemma4"
    report += ", compressed-tensors, https://host/model"
    assert redact.redact(report) == report
    assert redact.redact({"info": [report], "layers": 2}) == {"info": [report], "layers": 2}


def test_another_command_has_other_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "second-one")
    redact.learn_secrets(["--api-key", "first-one"])
    assert redact.redact("first-one second-one") == "... ..."
    monkeypatch.delenv(API_KEY)
    redact.learn_secrets([])
    assert redact.redact("first-one second-one") == "first-one second-one"


def test_secrets_as_they_are_quoted(tmp_path: Path) -> None:
    """They are redacted whole, also when one begins with another, and in parts, in files too."""
    whole, longer, lines = "p@ssword:s,=[w", "first-one-and-more", "a line\nhunter2"
    (tmp_path / "a.yaml").write_text('dtype: half\nother: {a: [ "third-one" ]}  # theirs\n')
    typed = ["--a", whole, "--b", "first-one", "--c", longer, "--d", lines]
    redact.learn_secrets([*typed, "--config", str(tmp_path / "a.yaml")])
    report = f"{whole} first-one {longer} {lines!r} third-one of half"
    assert redact.redact(report) == r"... ... ... 'a ...\n...' ... of half"
