"""No secret is in anything that ``verify`` prints or writes, nor in an error of any command.

``test_doctor`` has the same of ``doctor``, ``test_status`` of ``status``, ``test_verify`` of real
servers. All look through whatever was printed and every file, so that a new output is seen too.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from harness.found import outcome
from harness.typed_secrets import FLAGS, MARK, VARIABLES, places
from scripts import command_line, environment, result_files
from sglang_gemma4_yoco.commands import redact
from sglang_gemma4_yoco.commands.console import CommandError, quote_end
from sglang_gemma4_yoco.commands.main import main
from sglang_gemma4_yoco.commands.verify import servers, verify

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run, and write."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_secrets_afterwards() -> Any:
    """A later test's command may print what is a secret here."""
    yield
    redact.learn_secrets([], {})


def quoted(flags: list[str]) -> str:
    """As programs quote what they were given."""
    words = []
    for word in flags:
        words.append(word.partition("=")[2] if word[:1] == "-" and "=" in word else word)
    shown = [f"unrecognized arguments: {' '.join(flags)}", f"invalid choice: {words[-1]!r}"]
    # Of SGLang's own log, and of a JSON document.
    shown += [f"ServerArgs(model_path='x', api_key={words[-1]!r})", json.dumps({"key": words[-1]})]
    shown += [" ".join(words[-1].split())]
    return "\n".join(shown)


# ---------------------------------------------------------------- verify


FOUND = outcome(0.0)


def agrees(flags: list[str], document: dict[str, Any], _: Path) -> None:
    """The servers gave the same answers, and what was found quotes the flags."""
    kept = ("server_args", "model", "output")
    document |= {key: value for key, value in FOUND.items() if key not in kept}
    document["problems"] = [quoted(flags)]
    document["left_out"] = {"a kind": quoted(flags)}


def is_not_active(flags: list[str], *_: Any) -> None:
    raise servers.WrongPathError(quoted(flags))


def ends(flags: list[str], _: Any, folder: Path) -> None:
    log = folder / "log-of-sglang"
    log.write_text(quoted(flags))
    server = servers.Server(True, flags, 1, log)
    server.process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        raise CommandError(quoted(flags) + quote_end(log))
    finally:
        server.stop()


def breaks(flags: list[str], *_: Any) -> None:
    raise AssertionError(quoted(flags))


def cannot_write(flags: list[str], *_: Any) -> None:
    raise OSError(quoted(flags))


SOME = ("known", "in JSON", "quoted, with spaces", "of several lines", "a shown flag's address")
ENDS = [*product([breaks, agrees], FLAGS), *product([is_not_active, ends, cannot_write], SOME)]


@pytest.mark.parametrize(("end", "name"), ENDS)
def test_nothing_of_verify_has_a_secret(
    end: Callable[..., Any],
    name: str,
    empty_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """However it ends; its page and its document are the real ones."""

    def serve(args: Namespace, document: dict[str, Any]) -> tuple[None, None]:
        end(FLAGS[name], document, args.output)
        return None, None

    monkeypatch.setattr(verify, "serve_both", serve)
    monkeypatch.setattr(verify, "conclude", lambda *_: None)
    arguments = ["verify", "--device", "cpu", "--model-path", "x", "--output", "here"]
    status = main([*arguments, "--", "--dtype", "float32", *FLAGS[name]])
    out, err = capsys.readouterr()
    assert status == {agrees: 0, is_not_active: 1}.get(end, 2), err
    assert not list(places(out=out, err=err, folder=empty_folder))
    assert "..." in out + err
    if end is agrees:
        document = json.loads((empty_folder / "here" / "verify.json").read_text())
        assert document == json.loads(out.splitlines()[-1])
        assert document["server_args"].startswith("--dtype float32 ")
        page = (empty_folder / "here" / "verify.html").read_text()
        assert "<dt>Server flags</dt><dd>--dtype float32" in page


# ---------------------------------------------------------------- the command line itself


@pytest.mark.parametrize(
    "words",
    [
        ["status", "http://localhost:1", "--apikey", MARK],
        ["status", "http://localhost:1", f"--apikey={MARK}"],
        ["status", "http://localhost:1", "--api-key", "a", MARK],
        ["status", f"http://user:{MARK}@localhost:1"],
        ["status", f"https://user:a {MARK}@localhost:1"],
        ["status", f"http://user:{MARK}@localhost:port"],
        ["status", f"http://user:{MARK}@[::1"],
        ["verify", "--repeats", "2", "--api-k", MARK, "--model-path", "x"],
        ["verify", "--apikey", MARK],
        ["doctor", "--apikey", MARK, "--", "--device", "cpu"],
        ["--apikey", MARK],
    ],
)
def test_no_secret_is_in_an_error(words: list[str], empty_folder: Path, capsys: Captured) -> None:
    """Of this command's own parser, or of an address that is wrong."""
    try:
        status = main(words)
    except SystemExit as refused:
        status = int(refused.code or 0)
    out, err = capsys.readouterr()
    assert status == 2
    assert "error: " in err
    assert not list(places(out=out, err=err, folder=empty_folder))


@pytest.mark.parametrize("name", VARIABLES)
def test_no_secret_of_the_environment_is_shown(
    name: str, empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Of variables that others use, such as a library that quotes them."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, VARIABLES[name])
    monkeypatch.setattr(verify, "serve_both", lambda *_: breaks(["--x", VARIABLES[name]]))
    assert main(["verify", "--device", "cpu", "--model-path", "x", "--output", "here"]) == 2
    out, err = capsys.readouterr()
    assert "unrecognized arguments: --x " in err
    assert not list(places(out=out, err=err, folder=empty_folder))


# ---------------------------------------------------------------- scripts


@pytest.mark.parametrize("name", FLAGS)
def test_no_secret_is_in_a_result_of_a_script(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured, empty_folder: Path
) -> None:
    """Results have the command that made them; here with servers that have secrets."""
    flags = ["--tp-size", "2", *FLAGS[name]]
    of_servers = shlex.join(flags)
    for how in (["--server-args", of_servers], [f"--server-args={of_servers}"], ["--", *flags]):
        monkeypatch.setattr(sys, "argv", ["bench.py", "--sizes", "2048", *how])
        command = result_files.origin()["command"]
        assert command.startswith("python bench.py --sizes 2048 ")
        assert "--tp-size 2 " in command
        command_line.failed(environment.SetupError(quoted(FLAGS[name])))
        out, err = capsys.readouterr()
        assert not list(places(out=out + command, err=err, folder=empty_folder))


# ---------------------------------------------------------------- what is hidden, and what is not


@pytest.mark.parametrize("name", FLAGS)
def test_flags_that_are_shown(name: str) -> None:
    """Those before and after it are; its own name is, to see which one it was."""
    shown = shlex.split(redact.redact_flags(["--tp-size", "2", *FLAGS[name], "--dtype", "auto"]))
    assert (shown[:2], shown[-2:]) == (["--tp-size", "2"], ["--dtype", "auto"])
    assert MARK not in " ".join(shown)
    assert shown[2].partition("=")[0] == FLAGS[name][0].partition("=")[0]


@pytest.mark.parametrize(
    "flags",
    [
        ["--model-path", "google/gemma-4-E2B-it", "--chunked-prefill-size", "-1"],
        ["--cuda-graph-bs-decode", "1", "2048", "--trust-remote-code", "--port=30000"],
        ["--model-path", "https://host/model", "--served-model-name", "two words"],
    ],
)
def test_flags_without_a_secret(flags: list[str]) -> None:
    assert redact.redact_flags(flags) == shlex.join(flags)
    redact.learn_secrets(["verify", "--", *flags], {})
    report = f"layers 2048 of 1, {shlex.join(flags)}"
    assert redact.redact(report) == report


def test_reports_keep_their_words() -> None:
    """A new flag's value may be one that reports need."""
    redact.learn_secrets(["--a", "triton", "--b", "2", "--c", "bfloat16"], {"A_KEY": "1"})
    report = "attention by triton, bfloat16, 2 layers of 1"
    assert redact.redact(report) == report
    assert redact.redact({"at": [report], "layers": 2}) == {"at": [report], "layers": 2}
    redact.learn_secrets([], {"MAX_TOKENS": "2048", "PWD": "/home", "NEW_TOKEN_RATIO": "half"})
    assert redact.redact("half of 2048 in /home") == "half of 2048 in /home"
    redact.learn_secrets(["status", "http://reader@host", "http://host"], {"A": "more: a@b"})
    assert redact.redact("a reader has more") == "a reader has more"


def test_another_command_has_other_secrets() -> None:
    redact.learn_secrets(["--api-key", "first-one"], {"A_TOKEN": "second-one"})
    assert redact.redact("first-one second-one") == "... ..."
    redact.learn_secrets([], {})
    assert redact.redact("first-one second-one") == "first-one second-one"


def test_secrets_as_they_are_quoted() -> None:
    """Escaped, by another one that it begins with, and without the address that it stood in."""
    escaped, longer = "p\\q'r s", "first-one-and-more"
    words = ["--api-key", escaped, "--apikey", "first-one", "--watermark-key", longer]
    redact.learn_secrets([*words, "https://user:third-one@host"], {})
    report = f"{escaped} {escaped!r} first-one {longer} third-one"
    assert redact.redact(report) == '... "..." ... ... ...'


def test_only_sglangs_flags_are_listed() -> None:
    """None whose name says what it is; a new one of SGLang's is not shown until it is listed."""
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    listed = redact._SHOWN
    assert {"--model-path", "--device", "--dtype", "--tp-size", "--chunked-prefill-size"} <= listed
    assert not [flag for flag in listed if re.search("(key|secret|password|passphrase)$", flag)]
    texts = set()
    for action in parser._actions:
        if action.type in (str, json.loads) and action.choices is None:
            texts |= set(action.option_strings)
    # Of free texts those are listed that are a name or a path.
    assert not {flag for flag in texts & listed if re.search("args|kwargs|urls?$|header", flag)}
