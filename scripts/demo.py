#!/usr/bin/env python3
"""Compare SGLang's time to first token and its answers with and without this package.

``python3 scripts/demo.py`` needs Python 3.11 or later and 12 GB of disk, nothing else. It

1. makes a virtual environment with SGLang and this package (11 GB of disk, once),
2. makes a small random Gemma 4 with E2B's proportions (unless ``--model`` names a real one),
3. runs ``sglang-gemma4-yoco verify`` on it: the model is served stock (``SGLANG_GEMMA4_YOCO=0``)
   and with fast prefill (``SGLANG_GEMMA4_YOCO=1``) by the unchanged
   ``python -m sglang.launch_server``, both get the same prompts, tokens and log-probabilities
   are compared, and the time to first token is measured with prompts that are new to the servers.

Without a GPU the two servers run at the same time and are measured alternately, so that other load
on the machine affects both alike. On a GPU, where two servers of one model may not fit, they run
one after the other.

Output, for people::

    each answer as soon as it arrives; the report: the result of the comparison and a table of
    times, in Markdown

and, as the last line of stdout, for programs, one JSON document with at least::

    {"model": str, "device": str, "sglang": str, "prompt_tokens": int, "active": bool,
     "answers_equal": bool | null, "max_logprob_diff": float | null, "ttft_off_s": float | null,
     "ttft_on_s": float | null, "ratio": float | null, "repeats": int}

``active`` is what the servers report: true if the fast path ran in one of them only. If it is
false, nothing was measured. Values that were not measured are null.

Exit status: 0 if it was active and the answers agree; 1 if not; 2 if the demo could not run (one
message on stderr, no JSON); 3 if the answers agree, but something was not tried, which is named.
Answers agree if all tokens are equal and all log-probabilities within 1e-3. That is the rule for
float32, the type on a CPU; on a GPU, in bfloat16, other kernels round differently, so the bound is
how far stock's answers to the same prompt are apart (``sglang-gemma4-yoco verify --help`` gives the
rule). All other options are verify's, such as ``--prompt-tokens``, ``--repeats`` and
``--in-turn``. For the small random model, fewer questions and shorter timed prompts are the
defaults.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import failed, make_checkpoint, make_log_dir, make_work_dir, new_parser
from scripts.environment import REPO, SGLANG_VERSION, SetupError, prepare
from sglang_gemma4_yoco.commands.console import say
from sglang_gemma4_yoco.commands.main import exit_on_signals
from sglang_gemma4_yoco.commands.redact import learn_secrets
from sglang_gemma4_yoco.commands.verify import verify

# For a random model two questions and shorter prompts are enough.
QUESTIONS = "What is the capital of France?\nName three prime numbers.\n"
SHORT = ("--prompt-tokens", "512", "--repeats", "3")


def bootstrap(args: argparse.Namespace) -> NoReturn:
    """Continue inside the demo's own virtual environment."""
    python = str(prepare(args.venv, sglang=args.sglang_version))
    command = [python, str(Path(__file__).resolve()), *args.own, "--no-venv", "--", *args.flags]
    os.execv(python, command)


def demo(args: argparse.Namespace) -> NoReturn:
    """Run ``verify`` inside a complete environment."""
    names = ("sglang", "sglang_gemma4_yoco", "sglang_gemma4_reference")
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise SetupError(f"{sys.executable} lacks {missing}: install these, or leave out --no-venv")
    if verify.find_device(args.device) == "cpu":
        args.device, os.environ["SGLANG_PLATFORM"] = "cpu", "gemma4_cpu"
    logs = make_log_dir(args.work_dir)
    command = [sys.executable, "-m", "sglang_gemma4_yoco", "verify"]
    command += ["--device", args.device, "--output", str(logs)]
    flags = args.flags
    if args.model is not None:
        command += ["--model-path", args.model, "--prompt-tokens", "2048"]
    else:
        model = make_checkpoint(args.preset, args.work_dir)
        say("Its weights are random, so its answers make no sense; only their equality counts.")
        questions = logs / "questions.txt"
        questions.write_text(QUESTIONS)
        command += ["--model-path", str(model), "--label", args.preset]
        command += ["--prompts", str(questions), *SHORT]
        flags = ["--chunked-prefill-size", "512", *flags]
    command += [*args.of_verify, "--", *flags]
    sys.stdout.flush()
    # Replace this process, so that Ctrl-C and the exit status are those of verify.
    os.execv(command[0], command)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line; options that the demo lacks are verify's."""
    parser = new_parser(__doc__)
    parser.usage = "%(prog)s [options] [options of verify] [-- SERVER_FLAG ...]"
    add = parser.add_argument
    add("--model", help="a checkpoint's folder, or a model on the Hugging Face hub")
    add("--preset", default="E2B_MINI", help="random model, such as E2B_MINI or E4B_MINI")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to serve")
    add("--venv", type=Path, default=REPO / ".venv", help="the environment to make or reuse")
    add("--no-venv", action="store_true", help="use this interpreter's environment as it is")
    add("--sglang-version", default=SGLANG_VERSION, help="a release; newest; prerelease")
    add("--work-dir", type=Path, default=REPO / ".demo", help="for logs and random checkpoints")
    end = argv.index("--") if "--" in argv else len(argv)
    args, of_verify = parser.parse_known_args(argv[:end])
    args.own, args.of_verify = argv[:end], of_verify
    known = argparse.ArgumentParser()  # rejects unknown options before anything is installed
    verify.add_options(known)
    known.parse_args(["--model-path", "any", *of_verify])
    args.flags = argv[end + 1 :]
    learn_secrets(args.flags)
    return args


def main(argv: Sequence[str]) -> int:
    """Set up the environment and start again in it, or run the demo; return the exit status."""
    args = parse(argv)
    exit_on_signals()
    try:
        if not sys.platform.startswith("linux") or sys.version_info < (3, 11):
            raise SetupError("SGLang runs on Linux, with Python 3.11 or later.")
        args.work_dir = make_work_dir(args.work_dir)
        if not args.no_venv:
            bootstrap(args)
        demo(args)
    except (SetupError, OSError) as failure:
        return failed(failure)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
