#!/usr/bin/env python3
"""Does a real model answer as well with fast prefill as without it?

Sends two SGLang servers of one checkpoint, off and on, the same questions at temperature 0:

* GSM8K, 5-shot, through lm-eval (its own task, prompts and scoring);
* 30 pictures of two colours each, made here: "name the two colours".

For both it prints the accuracy of each server, the share of answers that are the same character by
character, and the answers that are not. In bf16 on a GPU other kernels run for the last rows,
so a few answers differ; accuracy should not.

Output contract: for people on stdout; the last line is one JSON document. Exit status 0 when both
servers have answered, rightly or not; 2 when something went wrong.

    python scripts/bench/eval_quality.py --model google/gemma-4-E2B-it   # one after the other
    python scripts/bench/eval_quality.py --off http://127.0.0.1:30000 --on http://127.0.0.1:30001

Needs ``uv pip install --group eval`` in a checkout; lm-eval can also live in an environment of its
own, named with ``--lm-eval``. lm-eval downloads GSM8K, unless ``--questions`` names a file with a
question and an answer per line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from command_line import failed, heading, new_parser
from environment import SetupError
from result_files import origin
from sglang_gemma4_yoco.commands.console import say
from sglang_gemma4_yoco.commands.prompts import COLOURS, WHICH_COLOURS, picture
from sglang_gemma4_yoco.commands.servers import (
    Server,
    WrongPathError,
    check_switch,
    free_ports,
    running,
    session,
)

PICTURES = list(itertools.permutations(COLOURS, 2))  # 30


@dataclass
class Answers:
    """What one server answered to one set of questions.

    Attributes:
        texts: by question.
        accuracy: by the way of scoring.
    """

    texts: dict[str, str] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)


def ask_colours(url: str, max_tokens: int) -> Answers:
    """Ask for the colours of all pictures; right is an answer that names both."""
    http = session(url)
    answers = Answers()
    right = 0
    for pair in PICTURES:
        content = [
            {"type": "image_url", "image_url": {"url": picture(*pair)}},
            {"type": "text", "text": WHICH_COLOURS},
        ]
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        reply = http.post(f"{url}/v1/chat/completions", json=body, timeout=600)
        if not reply.ok:
            raise SetupError(f"{url} refused a picture: {reply.status_code} {reply.text}")
        text = reply.json()["choices"][0]["message"]["content"] or ""
        answers.texts[" and ".join(pair)] = text
        right += all(colour in text.lower() for colour in pair)
    answers.accuracy["both named"] = right / len(PICTURES)
    return answers


# ---------------------------------------------------------------- GSM8K


def ask_gsm8k(args: argparse.Namespace, url: str, directory: Path) -> Answers:
    """Run lm-eval's GSM8K against one server."""
    directory.mkdir()
    task, include = "gsm8k", []
    if args.questions is not None:
        task = "gsm8k_local"
        local_task(args, directory / f"{task}.yaml", task)
        include = ["--include_path", str(directory)]
    path = "v1/chat/completions" if args.chat else "v1/completions"
    model_args = {
        "base_url": f"{url}/{path}",
        "model": "default",
        "tokenizer_backend": "None",
        "tokenized_requests": "False",
        "num_concurrent": args.concurrency,
        "max_length": 131072,
        "timeout": 1800,
    }
    kind = "local-chat-completions" if args.chat else "local-completions"
    server = ",".join(f"{key}={value}" for key, value in model_args.items())
    options = f"--model {kind} --model_args {server} --tasks {task} --num_fewshot 5 --batch_size 1"
    options += f" --gen_kwargs temperature=0,max_gen_toks={args.max_tokens} --log_samples"
    command = [str(args.lm_eval), "-m", "lm_eval", *options.split(), *include]
    command += ["--output_path", str(directory / "out")]
    if args.chat:
        command += ["--apply_chat_template", "--fewshot_as_multiturn"]
    if args.limit is not None:
        command += ["--limit", str(args.limit)]
    # lm-eval asks for a key even where none is checked.
    env = {"OPENAI_API_KEY": "none", **os.environ, "NO_PROXY": "127.0.0.1,localhost"}
    log = directory / "lm-eval.log"
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=env, check=False)
    if done.returncode:
        raise SetupError(f"lm-eval failed: {shlex.join(command)}", log)
    return read_gsm8k(directory / "out", task)


def local_task(args: argparse.Namespace, path: Path, task: str) -> None:
    """Write lm-eval's own GSM8K task, with the questions of a local file."""
    find = "import importlib.util as u; print(u.find_spec('lm_eval').submodule_search_locations[0])"
    home = subprocess.run(
        [str(args.lm_eval), "-c", find], capture_output=True, text=True, check=True
    ).stdout.strip()
    questions = str(args.questions.resolve())
    task_file = {
        "include": f"{home}/tasks/gsm8k/gsm8k.yaml",
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"train": questions, "test": questions}},
    }
    path.write_text(json.dumps(task_file))  # JSON is YAML


def read_gsm8k(out: Path, task: str) -> Answers:
    """Accuracies and answers from the files that lm-eval wrote."""
    (results,) = out.rglob("results_*.json")
    scores = json.loads(results.read_text())["results"][task]
    answers = Answers()
    for name, value in scores.items():
        metric, _, scoring = name.partition(",")
        if metric == "exact_match":
            answers.accuracy[scoring] = value
    (samples,) = out.rglob(f"samples_{task}_*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        answers.texts[sample["doc"]["question"]] = sample["resps"][0][0]
    return answers


# ---------------------------------------------------------------- the comparison


def ask(args: argparse.Namespace, url: str, directory: Path) -> dict[str, Answers]:
    """Ask one server everything."""
    say(f"Asking {url}")
    found = {}
    if "gsm8k" in args.sets:
        found["gsm8k"] = ask_gsm8k(args, url, directory)
    if "colours" in args.sets:
        found["colours"] = ask_colours(url, args.max_tokens)
    return found


def compare(off: Answers, on: Answers) -> dict[str, Any]:
    """Accuracies, and the share of answers that are the same; shows the others."""
    if off.texts.keys() != on.texts.keys():
        raise SetupError("the two servers were not asked the same questions")
    differing = [question for question in off.texts if off.texts[question] != on.texts[question]]
    for question in differing:
        say(f"Q: {question}\n   off: {off.texts[question]!r}\n   on:  {on.texts[question]!r}")
    count = len(off.texts)
    say(f"{count - len(differing)} of {count} answers are the same character by character")
    for scoring, accuracy in off.accuracy.items():
        say(f"accuracy, {scoring}: off {accuracy:.3f}, on {on.accuracy[scoring]:.3f}")
    return {
        "questions": count,
        "identical": (count - len(differing)) / count,
        "accuracy_off": off.accuracy,
        "accuracy_on": on.accuracy,
    }


@contextmanager
def served(args: argparse.Namespace, directory: Path, *, fast: bool) -> Iterator[Server]:
    """A server of ``--model``, alone on the machine."""
    arguments = ["--model-path", args.model, *shlex.split(args.server_args)]
    log = directory / f"server-{'on' if fast else 'off'}.log"
    server = Server(fast, arguments, free_ports(1)[0], log)
    with running([server], args.start_timeout):
        yield server
        check_switch(server)


def run(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Ask both servers and compare."""
    found = {}
    for way, url in (("off", args.off), ("on", args.on)):
        if url is not None:
            found[way] = ask(args, url.rstrip("/"), directory / way)
            continue
        with served(args, directory, fast=way == "on") as server:
            found[way] = ask(args, server.url, directory / way)
    document: dict[str, Any] = {
        **origin(),
        "model": args.model,
        # Of servers that were started elsewhere it is not known.
        "active": True if args.off is None else None,
    }
    for name in args.sets:
        heading(name)
        document[name] = compare(found["off"][name], found["on"][name])
    return document


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; see ``--help``."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--model", help="a checkpoint to serve, off and then on")
    add("--off", metavar="URL", help="a server with the fast path off")
    add("--on", metavar="URL", help="a server with the fast path on")
    add("--sets", nargs="+", choices=["gsm8k", "colours"], default=["gsm8k", "colours"])
    add("--questions", type=Path, metavar="FILE", help="instead of GSM8K's own")
    add("--limit", type=int, metavar="N", help="the first N questions of GSM8K")
    add("--chat", action="store_true", help="GSM8K through the chat template")
    add("--max-tokens", type=int, default=256, help="of an answer")
    add("--concurrency", type=int, default=16, help="questions of GSM8K at a time")
    add("--lm-eval", type=Path, default=sys.executable, metavar="PYTHON", help="which has lm-eval")
    add("--server-args", default="", metavar="'...'", help="for both servers")
    add("--start-timeout", type=float, default=1800.0, metavar="SECONDS")
    args = parser.parse_args(argv)
    if (args.off is None) != (args.on is None) or (args.off is None) == (args.model is None):
        parser.error("name either --model, or both --off and --on")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, compare, print."""
    args = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as directory:
        try:
            print(json.dumps(run(args, Path(directory))))
        except (SetupError, WrongPathError) as failure:  # here, while its log still exists
            return failed(failure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
