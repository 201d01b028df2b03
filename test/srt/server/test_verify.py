"""``sglang-gemma4-yoco verify``, and the demo that runs it, as users start them."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from harness import forked, verify_rounds
from harness.doctor import environment
from harness.documented import sample
from harness.ended import assert_ended, assert_killed_alone
from harness.server import (
    changed_package,
    python_path,
    stand_in_for_sglang,
    wait_until,
)
from harness.typed_secrets import MARK, places
from scripts.environment import REPO
from sglang_gemma4_reference.checkpoint import E2B_TINY_SHARP, write_checkpoint
from sglang_gemma4_yoco import counters, settings
from sglang_gemma4_yoco.commands import https, status
from sglang_gemma4_yoco.commands.main import main
from sglang_gemma4_yoco.commands.verify import prompts, servers, verify

CONTRACT = {
    "model", "device", "sglang", "prompt_tokens", "active", "answers_equal", "max_logprob_diff",
    "ttft_off_s", "ttft_on_s", "ratio", "repeats",
}  # fmt: skip
VERIFY = [sys.executable, "-m", "sglang_gemma4_yoco", "verify", "--device", "cpu"]
Done = subprocess.CompletedProcess[str]
QUICK = ["--prompt-tokens", "64", "--repeats", "1"]
CHUNKED = ["--chunked-prefill-size", "128"]


def run(command: Sequence[str], cwd: Path, status: int = 0, **variables: str) -> Done:
    """Run a command with none of the package's variables but these."""
    how: Any = {"capture_output": True, "text": True, "timeout": 500}
    done = subprocess.run(command, cwd=cwd, env=environment(**variables), **how)
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def document_of(done: Done) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


# ---------------------------------------------------------------- end to end


HOW = ["--prompt-tokens", "256", "--repeats", "2"]
LABEL = "E2B_TINY"


def by_the_demo(_: Path, directory: Path) -> Done:
    """Run the demo as a user: all processes are spawned, and the checkpoint is its own."""
    command = [sys.executable, str(REPO / "scripts" / "demo.py"), "--no-venv", "--device", "cpu"]
    command += ["--preset", LABEL, "--work-dir", str(directory), *HOW]
    return run([*command, "--", *CHUNKED], directory)


def in_this_process(checkpoint: Path, directory: Path) -> Done:
    """Run ``verify`` as the demo does, with forked servers that require a key."""

    def start(server: servers.Server) -> None:
        assert forked.as_this_process(server.env)
        where: Any = {"cwd": directory, "env": server.env, "log": server.log_file}
        server.process = forked.Program(server.command(), **where)

    questions = directory / "questions.txt"
    questions.write_text("\n".join(prompts.read_file(prompts.BUNDLED)[:2]))
    command = ["verify", "--model-path", str(checkpoint), "--label", LABEL, "--device", "cpu"]
    command += [*HOW, "--prompts", str(questions), "--output", str(directory / "logs")]
    command += ["--", *CHUNKED, "--api-key", MARK]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment(**{https.API_KEY: MARK}), clear=True),
        mock.patch.object(servers.Server, "start", start),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        assert main(command) == 0, out.getvalue() + err.getvalue()
    return subprocess.CompletedProcess(command, 0, out.getvalue(), err.getvalue())


@pytest.fixture(
    scope="module", params=[in_this_process, pytest.param(by_the_demo, marks=pytest.mark.release)]
)
def demonstrated(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Done:
    """Return the result of ``verify`` on the smallest checkpoint, or of the demo."""
    done: Done = request.param(tiny_checkpoint, tmp_path_factory.mktemp("demo"))
    return done


def test_the_document_of_the_demo(demonstrated: Done) -> None:
    document = document_of(demonstrated)
    assert document.keys() >= CONTRACT
    assert (document["model"], document["device"]) == (LABEL, "cpu")
    assert (document["prompt_tokens"], document["repeats"]) == (256, 2)
    assert document["active"] is document["answers_equal"] is document["agrees"] is True
    assert 0 < document["max_logprob_diff"] < 1e-4
    assert document["ttft_off_s"] > 0 < document["ttft_on_s"]
    ratio = document["ttft_off_s"] / document["ttft_on_s"]
    assert document["ratio"] == pytest.approx(ratio, abs=1e-3)


def test_the_servers_key_is_nowhere(demonstrated: Done) -> None:
    """SGLang logs it; the remaining log does not have it, nor does any output."""
    if "--api-key" not in demonstrated.args:
        pytest.skip("the demo's own servers want none")
    document = document_of(demonstrated)
    assert document["server_args"] == "--chunked-prefill-size 128 --api-key"
    folder = Path(document["output"])
    for log in ("server-off.log", "server-on.log"):
        assert re.search(r"api_key\W+\.\.\.", (folder / log).read_text())
    assert not list(places(out=demonstrated.stdout, err=demonstrated.stderr, folder=folder))


def test_every_kind_of_prompt_is_sent_and_compared(demonstrated: Done) -> None:
    """Two runs of stock in identical batches are equal to the last bit, hits and chunks included.

    In other batches stock, too, differs from itself in the last bits.
    """
    document = document_of(demonstrated)
    assert document["left_out"] == {}
    assert document["stock_differs"] is False
    assert document["agreement"].keys() == {*prompts.KINDS, prompts.TIMED}
    for kind, found in document["agreement"].items():
        for way in ("fast", "again", "stock"):
            assert found[way]["equal_answers"] == found[way]["answers"] > 0, kind
        assert found["again"]["max_logprob_diff"] == 0.0, kind
        assert 0 < found["stock"]["max_logprob_diff"] < 1e-4, kind
    assert document["agreement"][prompts.TIMED]["fast"]["answers"] == 3  # one warms up
    assert document["prefills"].keys() >= {*verify.AT_ONCE, *prompts.KINDS, prompts.TIMED}
    assert document["prefills"][prompts.CHUNKS][counters.TAIL_SKIPPED] > 0
    for kind, found in document["agreement"].items():
        assert 0 < found["cut"] <= found["prefills"], kind
    assert document["agreement"][prompts.PREFIX]["cached_tokens"] >= prompts.PREFIX_TOKENS // 2


def words_in(text: str) -> set[str]:
    """Return the lines of a text without numbers, what aligns them, and what was run."""
    varying = r"commit.*|flags:.*|E2B_\w+|[\d.e+-]*\d|[\s-]"
    return {re.sub(varying, "", line) for line in text.splitlines()}


def test_what_people_see(demonstrated: Done) -> None:
    document = document_of(demonstrated)
    asked = r"questions, SGLANG_GEMMA4_YOCO=%s:\n  (.+)\n"
    stock = re.findall(asked % r"0 \(stock\)", demonstrated.stdout)
    assert stock == re.findall(asked % r"1 \(fast prefill\)", demonstrated.stdout)
    assert len(stock) == 3  # and the one with the prefix
    for words in ("Fast prefill was active", "the answers agree", "256", "2/2"):
        assert words in demonstrated.stdout, words
    # The sample is of another model, with other numbers.
    assert words_in(sample("verify")) <= words_in(demonstrated.stdout)
    output = Path(document["output"])
    assert json.loads((output / "verify.json").read_text()) == document
    assert (output / "verify.md").read_text() in demonstrated.stdout


# ---------------------------------------------------------------- right and wrong packages


@pytest.mark.release
def test_a_defect_in_one_prompt_is_found(tmp_path: Path) -> None:
    """The model multiplies rounding errors, so that stock in bf16 differs from itself.

    ``scripts/bench/verify_rounds.py`` counts more rounds.
    """
    draw = random.Random(0)
    with verify_rounds.serve(tmp_path, 0) as served:
        document = verify_rounds.run_round(served, draw).document
        assert document["exact"] is document["stock_differs"] is False
        assert document["problems"] == []
        assert document["left_out"] == {}
        noise = [one["stock"]["max_logprob_diff"] for one in document["agreement"].values()]
        assert max(noise) > 1e-3
        found = []
        for kind in prompts.KINDS:
            one = verify_rounds.run_round(served, draw, kind)
            assert one.shown, kind
            found.append(one.is_reported(kind))
    assert sum(found) >= 4  # a prompt may be as sensitive to rounding as to the defect


@pytest.mark.release
def test_a_broken_package_is_found(tmp_path: Path) -> None:
    """The copy keeps the row before the last one of each prompt; the bound is stock's rounding."""
    sharp = write_checkpoint(tmp_path / "sharp", E2B_TINY_SHARP)
    rows = "np.repeat(ends - kept_ends, kept)"
    row_before = {rows: f"{rows} - np.repeat(new > kept, kept)"}
    path = changed_package(tmp_path / "copy", "core/kept_batch.py", row_before)
    mine = tmp_path / "mine.txt"
    mine.write_text("Is this one right?")
    command = [*VERIFY, "--model-path", str(sharp), *QUICK, "--prompts", str(mine)]
    command += ["--", "--dtype", "bfloat16"]
    # Its own self-check would turn it off.
    variables = {"PYTHONPATH": path, settings.name_of("self_check"): "0"}
    # Audited prefills would answer what stock answers: the servers of verify make none.
    variables[settings.name_of("audit")] = "1"
    done = run(command, tmp_path, 1, **variables)
    document = document_of(done)
    assert document["active"] is True
    assert document["dtype"] == "bfloat16"
    assert document["exact"] is document["agrees"] is document["answers_equal"] is False
    assert document["max_logprob_diff"] > 1
    assert "the answers do NOT agree" in done.stdout


@pytest.mark.release
def test_a_server_that_is_not_active_is_not_measured(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The servers run in turn: the stock server is not even started."""
    command = [*VERIFY, "--model-path", str(tiny_checkpoint), *QUICK, "--in-turn"]
    many = {settings.name_of("min_skipped_rows"): "1000000"}
    done = run([*command, "--output", "here"], tmp_path, 1, **many)
    document = document_of(done)
    assert document.keys() >= CONTRACT
    assert document["active"] is False
    for measured in ("answers_equal", "max_logprob_diff", "ttft_off_s", "ttft_on_s", "ratio"):
        assert document[measured] is None, measured
    assert "NOT active (" in document["problems"][0]
    assert "too_few_rows_could_be_skipped" in document["problems"][0]
    assert not (tmp_path / "here" / "server-off.log").exists()


@pytest.mark.parametrize(
    ("typed", "eager"),
    [
        (["--cuda-graph-backend-prefill", "breakable"], True),
        (["--cuda-graph-backend-prefill=breakable"], True),
        (["--dtype", "float32"], False),
    ],
)
def test_stock_cannot_capture_prefills(tmp_path: Path, typed: list[str], eager: bool) -> None:
    stock = servers.Server(False, typed, 1, tmp_path / "log")
    verify.run_prefills_eagerly(stock)
    assert stock.arguments == [*typed, *["--cuda-graph-backend-prefill=disabled"] * eager]


NO_ENTRY: dict[str, Any] = {}
CUT = {status.ENTRY: {"active": True, "reason": None, "forwards": {counters.TAIL_EAGER: 3}}}
REFUSED = {status.ENTRY: {"active": True, "reason": None, "forwards": {"LoRA": 2}}}
OFF = {status.ENTRY: {"active": False, "reason": "SGLANG_GEMMA4_YOCO=0", "forwards": {}}}


@pytest.mark.parametrize(
    ("fast", "states", "wrong"),
    [
        (False, [NO_ENTRY], None),  # the package changes nothing while it is switched off
        (False, [OFF], None),
        (False, [NO_ENTRY, CUT], "0 (stock): the fast path was active"),
        (True, [CUT], None),
        (True, [NO_ENTRY, CUT], None),
        (True, [NO_ENTRY], "NOT active (the server has no entry gemma4_yoco. Likely reasons: "),
        (True, [OFF], "1 (fast prefill): the fast path was NOT active (SGLANG_GEMMA4_YOCO=0)"),
        (True, [REFUSED], "NOT active (LoRA)"),
    ],
)
def test_the_switch_is_checked(
    tmp_path: Path, fast: bool, states: list[dict[str, Any]], wrong: str | None
) -> None:
    server = servers.Server(fast, [], 1, tmp_path / "log")
    with mock.patch.object(server, "states", return_value=states):
        if wrong is None:
            servers.check_switch(server)
        if fast:  # earlier checks do not count
            wrong = wrong or "the fast path was NOT active ("
        if wrong is not None:
            with pytest.raises(servers.WrongPathError, match=re.escape(wrong)):
                servers.check_switch(server)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--model-path", "/no/such/model"],
            "--model-path '/no/such/model' does not exist, or has no tokenizer: ",
        ),
        (["--model-path", "{tmp}"], " has no tokenizer: "),
        (["--prompts", "{tmp}/none"], "No such file or directory: '"),
        (["--prompts", "{tmp}/empty"], "/empty has no prompt"),
        (["--output", "{tmp}/empty/dir"], "Not a directory: '"),
        (["--", "--ssl-certfile", "x"], "--ssl-certfile: verify has a --model-path and a --device"),
        (["--", "--device=cuda"], "--device=cuda: verify has a --model-path and a --device of"),
        (["--", "--model-path", "other"], "--model-path: verify has a --model-path and a"),
        (["--", "--model", "other"], "--model: verify has a --model-path and a --device"),
    ],
)
def test_what_cannot_be_verified(
    tiny_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    command = ["verify", "--device", "cpu", "--model-path", str(tiny_checkpoint)]
    for argument in arguments:
        command.append(argument.format(tmp=tmp_path))
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_the_demo_refuses_what_verify_does_not_take(tmp_path: Path) -> None:
    """Python alone decides that, before anything is installed."""
    command = [sys.executable, "-S", str(REPO / "scripts" / "demo.py")]
    command += ["--venv", str(tmp_path / "venv"), "--work-dir", str(tmp_path / "work")]
    done = run([*command, "--repeats", "0"], tmp_path, 2)
    assert done.stdout == ""
    assert "argument --repeats: 0 is not above zero" in done.stderr
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- interruptions

SERVER = """
    import multiprocessing, signal, sys, time
    def child():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if __name__ == "__main__":
        if "--dies" in sys.argv:
            print(*(f"line {n}" for n in range(100)), sep="\\n")
            sys.exit(3)
        multiprocessing.get_context("spawn").Process(target=child).start()
        time.sleep(600)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start servers whose ``sglang.launch_server`` is the program above."""
    monkeypatch.setenv("PYTHONPATH", python_path(stand_in_for_sglang(tmp_path / "path", SERVER)))
    monkeypatch.chdir(tmp_path)


def test_a_hangup_that_is_ignored_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command under ``nohup`` continues when its terminal is closed."""

    def hang_up(_: Any) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 0

    monkeypatch.setattr(status, "run", hang_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["status", "http://localhost"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def servers_of(command: psutil.Process) -> list[psutil.Process]:
    """Return the servers of a command and all their children, once they are complete."""

    def find() -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for one in command.children():
            if "sglang.launch_server" in " ".join(one.cmdline()):
                found += one, *one.children(recursive=True)
        # Two servers, and for each what ends its group, a child, and multiprocessing's tracker.
        if len(found) < 8:
            found.clear()
        return found

    return wait_until(find, "servers with children", 120)


@pytest.mark.usefixtures("stand_in")
def test_a_command_that_is_killed_leaves_no_process(tiny_checkpoint: Path) -> None:
    """It is killed by SIGKILL, while servers start whose children ignore SIGTERM."""
    assert_killed_alone([*VERIFY, "--model-path", str(tiny_checkpoint)], servers_of)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_leave_no_process(
    tiny_checkpoint: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """They arrive while servers start whose children ignore SIGTERM."""
    family = []

    def interrupt() -> None:
        family.extend(servers_of(psutil.Process()))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    # pytest may run in the background, where Ctrl-C is ignored, or under nohup.
    handler: Any = signal.SIG_DFL
    if number == signal.SIGINT:
        handler = signal.default_int_handler
    before = signal.signal(number, handler)
    thread.start()
    try:
        status = main([*VERIFY[3:], "--model-path", str(tiny_checkpoint)])
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        thread.join()
        signal.signal(number, before)
    assert status == 128 + number
    assert ("interrupted" in capsys.readouterr().err) is (number == signal.SIGINT)
    assert family
    assert_ended(family)


@pytest.mark.usefixtures("stand_in")
def test_a_server_that_ends_shows_its_log(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody else can read the log, even if an earlier run has left a readable one."""
    log = tmp_path / "here" / "server-on.log"
    log.parent.mkdir()
    log.touch(0o644)
    command = [*VERIFY[3:], "--model-path", str(tiny_checkpoint), "--in-turn", "--output", "here"]
    assert main([*command, "--", "--dies"]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert "  | line 99" in shown
    assert "  | line 0" not in shown
    assert shown[0].startswith("error: SGLANG_GEMMA4_YOCO=1 (fast prefill) ended with status 3")
    assert log.stat().st_mode & 0o777 == 0o600
