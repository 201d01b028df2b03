"""Does fast prefill give the same answers here, and what does it bring?

Serves one model twice with the unchanged ``python -m sglang.launch_server``: stock
(SGLANG_GEMMA4_YOCO=0) and fast (SGLANG_GEMMA4_YOCO=1). Both are asked the same prompts at
temperature 0, one at a time and then several at once; stock also a second time right behind the
first, when all but the last token is in its prefix cache. The time to first token is measured with
prompts that no server has seen before. What follows -- goes to both servers.

On a CPU with the memory the two servers stand side by side and take turns, so that a busy machine
disturbs both alike; elsewhere one runs after the other.

In float32 on a CPU all tokens must be equal, and all log-probabilities within 1e-3. Elsewhere
products round differently with the number of their rows, in stock as well. There, for each kind of
prompt, the mean difference of log-probabilities may be 3 times what stock differs from itself in
other batches (by its noisiest kind of prompt), and 0.05 more; the mean KL divergence of the
next-token distributions 3 times that of stock, and 0.01 nats more; and one prompt of each kind may
be as far off as the furthest of stock's. All of it is asked of the whole answers, and of what
prefills computed by themselves. KL is computed over the 20 likeliest tokens, all others taken as
one.

The last line of stdout is one JSON document, which is in verify.json too; verify.html shows it, and
opens without a network.

Exit status: 0 if fast prefill was active and the answers agree; 1 if not; 2 if nothing could be
verified, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_gemma4_yoco.commands import prompts as kinds
from sglang_gemma4_yoco.commands.console import CommandError, heading, say
from sglang_gemma4_yoco.commands.examination import Found, Plan, Steps, examine, make_plan
from sglang_gemma4_yoco.commands.prompts import Maker, Message
from sglang_gemma4_yoco.commands.servers import (
    Server,
    WrongPathError,
    fit_together,
    pair,
    running,
)
from sglang_gemma4_yoco.commands.verdict import conclude, empty_document

_PREFILL_GRAPHS = "--cuda-graph-backend-prefill"
_GPU = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


# ---------------------------------------------------------------- the command line


def positive(text: str) -> int:
    """An argparse type: an integer above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above zero")
    return number


def add_to(commands: Any) -> None:
    """Add the parser of ``verify`` to an argparse subparsers action."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = commands.add_parser(
        "verify",
        help=summary,
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model-path",
        required=True,
        metavar="M",
        help="a checkpoint's directory or a model on the Hugging Face hub",
    )
    add("--label", metavar="TEXT", help="how the report calls it (default: as --model-path)")
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="ask these instead of the bundled questions: one prompt per line, or JSON lines with "
        '{"prompt": ...} or {"messages": ...}',
    )
    add(
        "--prompt-tokens",
        type=positive,
        nargs="+",
        default=[128, 512, 2048],
        metavar="N",
        help="lengths of the timed prompts (default: 128 512 2048)",
    )
    add(
        "--repeats",
        type=positive,
        default=5,
        metavar="N",
        help="timed prompts of each length (default: %(default)s)",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: the GPU if PyTorch sees one",
    )
    add(
        "--servers",
        choices=("auto", "together", "in-turn"),
        default="auto",
        help="side by side or one after the other (default: together on a CPU with the memory)",
    )
    add(
        "--port",
        type=positive,
        metavar="N",
        help="serve on this port and the next (default: any two free ones)",
    )
    add(
        "--start-timeout",
        type=positive,
        default=1800,
        metavar="SECONDS",
        help="how long a server may take to start, downloads included (default: %(default)s)",
    )
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="for logs and reports (default: gemma4-yoco-verify-DATE-TIME here)",
    )
    add("server_args", nargs="*", metavar="FLAG", help="SGLang's, for both servers, after --")
    parser.set_defaults(run=run)


# ---------------------------------------------------------------- before anything runs


def presentation() -> tuple[Any, Any]:
    """The modules that show results.

    Raises:
        CommandError: the libraries that they need are missing.
    """
    try:
        from sglang_gemma4_yoco.commands import page, table
    except ModuleNotFoundError as missing:
        raise CommandError(
            f"verify needs {missing.name}: pip install 'sglang-gemma4-yoco[verify]'"
        ) from missing
    return page, table


def find_model(model: str) -> str:
    """Check a local path; leave the name of a model on the Hugging Face hub to SGLang."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise CommandError(f"{model} has no config.json: name a checkpoint's directory.")
        return str(path.resolve())
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise CommandError(
            f"--model-path {model}: there is no such directory. Name a directory with a checkpoint "
            "or a model on the Hugging Face hub, such as google/gemma-4-E2B-it."
        )
    return model


def find_device(wanted: str) -> str:
    """The GPU's name, or ``cpu``."""
    if find_spec("sglang") is None:
        raise CommandError(f"{sys.executable} has no SGLang: pip install sglang")
    if wanted == "cpu":
        return "cpu"
    # In a process of its own: this one must not hold memory of the GPU while servers run.
    done = subprocess.run([sys.executable, "-c", _GPU], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise CommandError(f"PyTorch cannot be imported by {sys.executable}: {reason}")
    name = done.stdout.strip()
    if wanted == "cuda" and not name:
        raise CommandError("PyTorch sees no GPU: check the driver with nvidia-smi, or --device cpu")
    return name or "cpu"


def make_output(wanted: Path | None) -> Path:
    """The directory of this run."""
    path = wanted or Path(time.strftime("gemma4-yoco-verify-%Y%m%d-%H%M%S"))
    path = path.expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "verify.json").unlink(missing_ok=True)
    except OSError as failure:
        raise CommandError(f"{path} cannot be written ({failure}): choose --output") from failure
    return path


def run_prefills_eagerly(stock: Server) -> None:
    """Take prefill graphs from the stock server, which cannot record them without the plugin."""
    if any(flag.partition("=")[0] == _PREFILL_GRAPHS for flag in stock.arguments):
        stock.arguments.append(f"{_PREFILL_GRAPHS}=disabled")  # the last one counts
        say("The stock server runs its prefills eagerly: SGLang cannot record them by itself.")


def serve(
    args: argparse.Namespace,
    model: str,
    device: str,
    servers: Sequence[Server],
    steps: Steps,
    conversations: Sequence[Sequence[Message]],
) -> tuple[Plan, Found, Found]:
    """Start, examine and stop both servers; what was asked, and what stock and fast did."""
    together = args.servers == "together" or (
        args.servers == "auto" and device == "cpu" and fit_together(model)
    )
    say("Both servers at once." if together else "One server after the other.")
    stock, fast = servers
    plan: Plan | None = None
    maker = Maker.of(model)
    found: dict[bool, Found] = {}
    # Alone, the fast one goes first: if it is not active there is nothing to measure.
    for group in [[stock, fast]] if together else [[fast], [stock]]:
        with running(group, args.start_timeout, one_by_one=device != "cpu"):
            plan = plan or make_plan(conversations, maker, group[0], model, device)
            examined = examine(group, plan, args.prompt_tokens, args.repeats, steps)
        found |= {server.fast: one for server, one in zip(group, examined, strict=True)}
    assert plan is not None
    return plan, found[False], found[True]


def show_examples(plan: Plan, stock: Found, fast: Found, most: int = 3) -> None:
    """Print some answers: those that differ, or else the first ones."""
    pairs = list(zip(plan.prompts, stock.alone, fast.alone, strict=True))
    differing = [pair for pair in pairs if pair[1].tokens != pair[2].tokens]
    for prompt, one, other in (differing or pairs)[:most]:
        say(f"{prompt.kind}: {prompt.title}")
        if one.tokens == other.tokens:
            say(f"   both:  {one.text!r}")
        else:
            say(f"   stock: {one.text!r}")
            say(f"   fast:  {other.text!r}")


def finish(document: dict[str, Any], output: Path) -> None:
    """Write the document, and print it as the last line."""
    (output / "verify.json").write_text(json.dumps(document, indent=1) + "\n")
    say(json.dumps(document))


def run(args: argparse.Namespace) -> int:
    """Serve, ask, judge, show; returns the exit status."""
    page, table = presentation()
    conversations = kinds.bundled() if args.prompts is None else kinds.read_file(args.prompts)
    model = find_model(args.model_path)
    device = find_device(args.device)
    output = make_output(args.output)
    heading("Servers")
    say(f"SGLang {version('sglang')} on {device}; {model}; logs in {output}")
    document = empty_document(args, device, output)
    servers = pair(
        ["--model-path", model, *args.server_args],
        output,
        device=device,
        port=args.port,
        together=args.servers == "together",
    )
    run_prefills_eagerly(servers[0])
    try:
        plan, stock, fast = serve(args, model, device, servers, table.steps, conversations)
    except WrongPathError as wrong:
        heading("FAST PREFILL DID NOT DO WHAT THE SWITCH SAYS: NOTHING WAS MEASURED")
        say(str(wrong))
        document["problems"] = str(wrong).splitlines()[:1]
        finish(document, output)
        return 1
    outcome = conclude(document, plan, stock, fast)
    heading("What the plugin said")
    for server in servers:
        say(f"{server.name}, {server.log_file}:")
        for line in server.log_lines() or ["(nothing)"]:
            say(f"  | {line}")
    heading("Answers")
    show_examples(plan, stock, fast)
    table.show(document)
    (output / "verify.html").write_text(page.render(outcome), "utf-8")
    say(f"Report: {output / 'verify.html'}\n")
    finish(document, output)
    return 0 if document["agrees"] else 1
