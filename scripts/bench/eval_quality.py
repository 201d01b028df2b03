#!/usr/bin/env python3
"""Measure a real model's accuracy on GSM8K, with fast prefill off and on.

It sends GSM8K, 5-shot, through lm-eval (its own task, prompts and scoring) at temperature 0 to two
SGLang servers of one checkpoint, off and on, and to the stock server again. It prints the accuracy
of each run, the share of identical answers between off and on and between the two runs of off, and
the answers that differ. In bf16 on a GPU other kernels run for the last rows, so a few answers
differ; accuracy should not. The two runs of off differ if concurrent questions are batched
differently: that is the baseline without fast prefill. ``--concurrency 1`` asks one question at a
time.

    python scripts/bench/eval_quality.py --model google/gemma-4-E2B-it

The servers run one after the other, each alone on the machine.

Output contract: text for people on stdout; the last line is one JSON document. Exit status: 0 if
both servers have answered, rightly or not, and the fast path was active on one of them; 2 if the
run failed. lm-eval downloads GSM8K, unless ``--questions`` names a file with a question and an
answer per line of JSON. Needs the dependency group ``eval``, which the environment of
``scripts/run_tests.py`` has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import failed, new_parser
from scripts.environment import SetupError
from scripts.result_files import origin
from sglang_gemma4_yoco.commands.console import say
from sglang_gemma4_yoco.commands.https import make_session
from sglang_gemma4_yoco.commands.redact import learn_secrets
from sglang_gemma4_yoco.commands.verify.servers import (
    Server,
    WrongPathError,
    check_switch,
    find_free_ports,
    run_servers,
)


@dataclass
class Answers:
    """Answers of one server: texts by question, accuracy by scoring method."""

    texts: dict[str, str] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)


def ask_gsm8k(args: argparse.Namespace, url: str) -> Answers:
    """Empty a server's prefix cache; return its answers to lm-eval's GSM8K."""
    import lm_eval
    import yaml

    say(f"Asking {url}")
    reply = make_session(url).post(f"{url}/flush_cache?timeout=30")
    if not reply.ok:
        raise SetupError(f"{url} did not empty its prefix cache: {reply.status_code} {reply.text}")
    # lm-eval requires a key even if none is checked.
    key = os.environ.get("SGLANG_API_KEY", "none")
    os.environ |= {"OPENAI_API_KEY": key, "NO_PROXY": "127.0.0.1,localhost"}
    home = Path(lm_eval.__file__).parent
    task = yaml.safe_load((home / "tasks/gsm8k/gsm8k.yaml").read_text())
    if args.questions is not None:
        both = dict.fromkeys(("train", "test"), str(args.questions.resolve()))
        task |= {"dataset_path": "json", "dataset_name": None}
        task["dataset_kwargs"] = {"data_files": both}
    kind, path = "local-completions", "v1/completions"
    if args.chat:
        kind, path = "local-chat-completions", "v1/chat/completions"
    about = {"base_url": f"{url}/{path}", "model": "default", "num_concurrent": args.concurrency}
    about |= {"tokenizer_backend": None, "tokenized_requests": False}
    about |= {"max_length": 131072, "timeout": 1800}
    options = {"model": kind, "tasks": [task], "num_fewshot": 5, "batch_size": 1}
    options |= {"apply_chat_template": args.chat, "fewshot_as_multiturn": args.chat}
    options["gen_kwargs"] = {"temperature": 0, "max_gen_toks": args.max_tokens}
    found = lm_eval.simple_evaluate(model_args=about, limit=args.limit, **options)
    answers = Answers()
    for name, value in found["results"]["gsm8k"].items():
        metric, _, scoring = name.partition(",")
        if metric == "exact_match":
            answers.accuracy[scoring] = value
    for sample in found["samples"]["gsm8k"]:
        answers.texts[sample["doc"]["question"]] = sample["resps"][0][0]
    return answers


def share_identical(off: Answers, other: Answers, way: str) -> float:
    """Return the share of identical answers; print the others."""
    equal = 0
    for question, text in off.texts.items():
        if text == other.texts[question]:
            equal += 1
        else:
            say(f"- {question}\n  off: {text!r}\n  {way}: {other.texts[question]!r}")
    say(f"off and {way}: {equal} of {len(off.texts)} answers are equal")
    return equal / len(off.texts)


def compare(found: Mapping[str, Answers]) -> dict[str, Any]:
    """Print the differences of ``again`` and ``on`` from ``off``; return the figures."""
    off = found["off"]
    figures: dict[str, Any] = {
        "questions": len(off.texts),
        "identical_again": share_identical(off, found["again"], "off again"),
        "identical": share_identical(off, found["on"], "on"),
    }
    for way, answers in found.items():
        say(f"accuracy {way}: {answers.accuracy}")
        figures[f"accuracy_{way}"] = answers.accuracy
    return figures


def run(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Ask both servers, stock twice; return the document with the comparison.

    Its ``prefills`` are those of the fast server, by outcome.
    """
    found = {}
    arguments = ["--model-path", args.model, *args.flags]
    for ways in (("off", "again"), ("on",)):
        log = directory / f"server-{ways[0]}.log"
        server = Server(ways[0] == "on", arguments, find_free_ports(1)[0], log)
        with run_servers([server], 1800):
            for way in ways:
                found[way] = ask_gsm8k(args, server.url)
            prefills = check_switch(server)
    about = {"model": args.model, "prefills": prefills}
    return {**origin(), **about, "gsm8k": compare(found)}


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, compare, print; return the exit status."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="a checkpoint to serve, off and then on")
    add("--questions", type=Path, metavar="FILE", help="instead of GSM8K's own")
    add("--limit", type=int, metavar="N", help="the first N questions")
    add("--chat", action="store_true", help="through the chat template")
    add("--max-tokens", type=int, default=256, help="tokens of an answer")
    add("--concurrency", type=int, default=16, help="questions at a time")
    add("flags", nargs="*", metavar="-- FLAG", help="more flags for both servers")
    args = parser.parse_args(argv)
    learn_secrets(args.flags)
    with tempfile.TemporaryDirectory() as directory:
        try:
            print(json.dumps(run(args, Path(directory))))
        except (SetupError, WrongPathError, OSError, ImportError) as failure:
            # While the server's log still exists.
            return failed(failure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
