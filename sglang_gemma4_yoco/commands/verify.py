"""Does fast prefill give the same answers here, and what does it bring?

Serves one model twice with the unchanged ``python -m sglang.launch_server``: stock
(SGLANG_GEMMA4_YOCO=0) and fast (SGLANG_GEMMA4_YOCO=1). Both are asked the same prompts at
temperature 0, one at a time and then several at once, and the time to first token is measured with
prompts that no server has seen before. What follows -- goes to both servers.

On a CPU with the memory the two servers stand side by side and take turns, so that a busy machine
disturbs both alike; elsewhere one runs after the other.

In float32 on a CPU all tokens must be equal, and all log-probabilities within 1e-3. Elsewhere
products round differently with the number of their rows, in stock as well. There, for each kind of
prompt, the mean difference of log-probabilities may be 3 times what stock differs from itself in
other batches, and 0.05 more; the mean KL divergence of the next-token distributions 3 times that of
stock, and 0.01 nats more. It is computed over the 20 likeliest tokens, all others taken as one.

The last line of stdout is one JSON document, which is in verify.json too; verify.html shows it, and
opens without a network.

Exit status: 0 if fast prefill was active and the answers agree; 1 if not; 2 if nothing could be
verified, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_gemma4_yoco import __version__
from sglang_gemma4_yoco.commands import prompts as kinds
from sglang_gemma4_yoco.commands.agreement import Answer, Comparison, beyond
from sglang_gemma4_yoco.commands.console import CommandError, heading, say
from sglang_gemma4_yoco.commands.prompts import Maker, Message, Prompt
from sglang_gemma4_yoco.commands.servers import (
    Server,
    WrongPathError,
    busy_share,
    check_switch,
    choose_ports,
    fit_together,
)
from sglang_gemma4_yoco.commands.timing import Timed, by_length, measure, requests_of
from sglang_gemma4_yoco.telling import report

TIMED = "first tokens of timed prompts"
AT_ONCE = 8  # requests at a time, in the second round
# A prompt beyond a chunk is left out where it would take minutes.
LONGEST = {"cpu": 2560, "cuda": 65536}
_GPU = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


@dataclass
class Found:
    """What one server did.

    Attributes:
        alone: answers to the prompts, one at a time.
        at_once: answers to the same prompts, several at a time.
        timed: times to first token.
        forwards: its prefills, by what became of them.
    """

    alone: list[Answer] = field(default_factory=list)
    at_once: list[Answer] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    forwards: Counter[str] = field(default_factory=Counter)


@dataclass
class Outcome:
    """What is known in the end.

    Attributes:
        document: what goes into verify.json.
        fast, noise: by kind of prompt, fast against stock, and stock against itself.
    """

    document: dict[str, Any]
    fast: dict[str, Comparison] = field(default_factory=dict)
    noise: dict[str, Comparison] = field(default_factory=dict)


Advance = Callable[[str], None]
Steps = Callable[[int], Any]


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


def build_servers(args: argparse.Namespace, model: str, device: str, logs: Path) -> list[Server]:
    """The stock server and the fast one, not started."""
    servers = []
    # Side by side on a GPU, each takes its share of what is free when it starts: half of the
    # memory first, and then nearly all of the rest.
    for fast, port, share in zip((False, True), choose_ports(args.port), (0.45, 0.85), strict=True):
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        if device == "cpu":
            # An idle scheduler spins, and would take a core from the server that is measured.
            command += ["--device", "cpu", "--sleep-on-idle"]
        else:
            command += ["--device", "cuda"]
            if args.servers == "together" and "--mem-fraction-static" not in args.server_args:
                command += ["--mem-fraction-static", str(share)]
        command += [*args.server_args, "--host", "127.0.0.1", "--port", str(port)]
        servers.append(Server(fast, command, port, logs / f"server-{'on' if fast else 'off'}.log"))
    return servers


# ---------------------------------------------------------------- what is asked


@dataclass
class Plan:
    """What every server is asked: made for the first one, when it is ready.

    Attributes:
        exact: whether it computes in float32 on a CPU.
        left_out: kinds of prompts that are not asked, and why.
    """

    maker: Maker
    prompts: list[Prompt]
    exact: bool
    dtype: str
    left_out: dict[str, str]


def make_plan(
    conversations: Sequence[Sequence[Message]],
    maker: Maker,
    server: Server,
    model: str,
    device: str,
) -> Plan:
    """Fit the prompts to what is served, and how."""
    settings = (server.states() or [{}])[0]
    left_out = {}
    text = "\n".join(
        str(message["content"])
        for conversation in conversations
        for message in conversation
        if isinstance(message["content"], str)
    )
    asked = [maker.question(conversation) for conversation in conversations]
    prompts = [*asked, *kinds.with_logprobs(asked)]
    text = text or "Only pictures were asked about."
    prompts += maker.shared_prefix(text)
    if settings.get("disable_radix_cache"):
        left_out[kinds.PREFIX] = "no hit of the prefix cache: it is turned off"
    chunk = settings.get("chunked_prefill_size") or -1
    length = chunk + max(chunk // 4, 16)
    longest = LONGEST["cpu" if device == "cpu" else "cuda"]
    if chunk > 0 and length <= longest:
        prompts.append(maker.long("\n".join(reversed(text.split("\n"))), length))
    else:
        left_out[kinds.CHUNKS] = (
            f"a chunk has {chunk} tokens: try -- --chunked-prefill-size {longest // 5 * 2}"
            if chunk > 0
            else "prompts are not cut into chunks"
        )
    if (server.get("/model_info") or {}).get("has_image_understanding"):
        prompts += [maker.question(picture) for picture in kinds.picture_conversations()]
    else:
        left_out[kinds.PICTURES] = "the model is served without pictures"
    dtype = find_dtype(settings, model)
    return Plan(maker, prompts, (device, dtype) == ("cpu", "float32"), dtype, left_out)


def find_dtype(settings: Mapping[str, Any], model: str) -> str:
    """What the server computes in; "unknown" where neither it nor the checkpoint says so."""
    served = str(settings.get("dtype", "auto")).removeprefix("torch.")
    if served != "auto":
        return served
    try:
        config = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return "unknown"
    text = config.get("text_config") or {}
    named = [part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype")]
    return next((str(dtype) for dtype in named if dtype), "unknown")


def at_once(server: Server, prompts: Sequence[Prompt], advance: Advance) -> list[Answer]:
    """The answers to prompts that are asked several at a time."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        answers = []
        for reply in pool.map(lambda prompt: server.generate(prompt.request()), prompts):
            answers.append(Answer.of(reply))
            advance(f"{_which(server)}: several at once")
        return answers
    finally:
        # Not waited for: on the way out of an interrupted run their server is stopped next.
        pool.shutdown(wait=False, cancel_futures=True)


def ask(server: Server, prompts: Sequence[Prompt], advance: Advance) -> tuple[list[Answer], ...]:
    """A server's answers to all prompts, one at a time and several at once."""
    server.forget_prefixes()
    alone = []
    for prompt in prompts:
        alone.append(Answer.of(server.generate(prompt.request())))
        advance(f"{_which(server)}: one at a time")
    server.forget_prefixes()
    return alone, at_once(server, prompts, advance)


def _which(server: Server) -> str:
    return "fast" if server.fast else "stock"


def examine(
    servers: Sequence[Server], plan: Plan, args: argparse.Namespace, steps: Steps
) -> list[Found]:
    """Ask and time running servers."""
    found = [Found() for _ in servers]
    rounds = 2 * len(plan.prompts) + requests_of(args.prompt_tokens, args.repeats)
    with steps(len(servers) * rounds) as advance:
        for server, one in zip(servers, found, strict=True):
            say(f"Asking {server.name} {len(plan.prompts)} prompts, alone and {AT_ONCE} at a time")
            one.alone, one.at_once = ask(server, plan.prompts, advance)
            check_switch(server)
            server.forget_prefixes()
        busy = busy_share()
        if busy > 0.2:
            say(f"   {busy:.0%} of the CPUs is busy with other work: expect scattered times")

        def told(server: Server, length: int, seconds: float) -> None:
            advance(f"{_which(server)}: {length} tokens, {seconds:.3f} s")

        timed = measure(servers, plan.maker, args.prompt_tokens, args.repeats, told)
    for server, one, times in zip(servers, found, timed, strict=True):
        one.timed = times
        one.forwards = check_switch(server)
    return found


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
    maker: Maker | None = None
    found: dict[bool, Found] = {}
    # Alone, the fast one goes first: if it is not active there is nothing to measure.
    for group in [[stock, fast]] if together else [[fast], [stock]]:
        with ExitStack() as stack:
            began = time.monotonic()
            for server in group:
                say(f"Starting {server.name} on port {server.port}")
                stack.enter_context(server.started(os.environ))
                if device != "cpu":  # the next one takes its share of what this one leaves
                    server.wait_until_ready(args.start_timeout)
            maker = maker or Maker.of(model)
            for server in group:
                server.wait_until_ready(args.start_timeout)
            say(f"   ready after {time.monotonic() - began:.0f} s")
            plan = plan or make_plan(conversations, maker, group[0], model, device)
            for server, one in zip(group, examine(group, plan, args, steps), strict=True):
                found[server.fast] = one
    assert plan is not None
    return plan, found[False], found[True]


# ---------------------------------------------------------------- what it amounts to


def compare(plan: Plan, stock: Found, fast: Found) -> tuple[dict[str, Comparison], ...]:
    """By kind of prompt: fast against stock, and stock against itself."""
    present = dict.fromkeys(prompt.kind for prompt in plan.prompts)

    def of(kind: str, *answers: tuple[list[Answer], list[Answer]]) -> Comparison:
        return Comparison.of(
            (one, other)
            for ones, others in answers
            for prompt, one, other in zip(plan.prompts, ones, others, strict=True)
            if prompt.kind == kind
        )

    noise = {kind: of(kind, (stock.alone, stock.at_once)) for kind in present}
    both = ((stock.alone, fast.alone), (stock.alone, fast.at_once))
    found = {kind: of(kind, *both) for kind in present}
    found[TIMED] = Comparison.of(
        (one.answer, other.answer) for one, other in zip(stock.timed, fast.timed, strict=True)
    )
    return found, noise


def pooled(comparisons: Sequence[Comparison]) -> Comparison:
    """Several comparisons as one."""
    whole = Comparison()
    for one in comparisons:
        whole.answers += one.answers
        whole.equal_answers += one.equal_answers
        whole.tokens += one.tokens
        whole.equal_tokens += one.equal_tokens
        whole.logprobs += one.logprobs
        whole.divergences += one.divergences
    return whole


def problems(
    plan: Plan, fast: dict[str, Comparison], noise: dict[str, Comparison], forwards: Counter[str]
) -> list[str]:
    """Why the two servers do not agree; none if they do."""
    everything = pooled(list(noise.values()))
    found = [
        f"{kind}: {sentence}"
        for kind, one in fast.items()
        for sentence in beyond(one, noise.get(kind, everything), exact=plan.exact)
    ]
    if forwards[report.FAILED]:
        found.append(
            f"{forwards[report.FAILED]} prefills failed on the fast path; see server-on.log"
        )
    return found


def _finite(number: float) -> float | None:
    """As JSON knows it."""
    return number if math.isfinite(number) else None


def _figures(one: Comparison) -> dict[str, Any]:
    return {
        "answers": one.answers,
        "equal_answers": one.equal_answers,
        "tokens": one.tokens,
        "equal_tokens": one.equal_tokens,
        "logprobs": len(one.logprobs),
        "mean_logprob_diff": _finite(one.mean_logprob),
        "max_logprob_diff": _finite(one.max_logprob),
        "mean_kl": _finite(one.mean_kl) if one.divergences else None,
        "max_kl": _finite(one.max_kl) if one.divergences else None,
    }


def empty_document(args: argparse.Namespace, device: str, output: Path) -> dict[str, Any]:
    """What is known before anything is measured."""
    return {
        "model": args.label or args.model_path,
        "device": device,
        "dtype": None,
        "sglang": version("sglang"),
        "package": __version__,
        "server_args": shlex.join(args.server_args),
        "prompt_tokens": max(args.prompt_tokens),
        "active": False,
        "agrees": None,
        "answers_equal": None,
        "max_logprob_diff": None,
        "ttft_off_s": None,
        "ttft_on_s": None,
        "ratio": None,
        "repeats": args.repeats,
        "rule": None,
        "problems": [],
        "left_out": {},
        "agreement": {},
        "times": [],
        "forwards": {},
        "prefix_hit_tokens": None,
        "output": str(output),
    }


def conclude(document: dict[str, Any], plan: Plan, stock: Found, fast: Found) -> Outcome:
    """Judge what was found, and put it into the document."""
    compared, noise = compare(plan, stock, fast)
    wrong = problems(plan, compared, noise, fast.forwards)
    everything = pooled(list(compared.values()))
    off, on = by_length(stock.timed), by_length(fast.timed)
    longest = max(off)
    hits = [
        answer.cached_tokens
        for prompt, answer in zip(plan.prompts, fast.alone, strict=True)
        if prompt.kind == kinds.PREFIX
    ]
    if not hits[-1] and kinds.PREFIX not in plan.left_out:
        plan.left_out[kinds.PREFIX] = "no hit of the prefix cache, though it is on"
    document |= {
        "dtype": plan.dtype,
        "active": True,
        "agrees": not wrong,
        "answers_equal": everything.all_equal,
        "max_logprob_diff": _finite(everything.max_logprob),
        "ttft_off_s": round(off[longest].median, 6),
        "ttft_on_s": round(on[longest].median, 6),
        "ratio": round(off[longest].median / on[longest].median, 4),
        "rule": "exact" if plan.exact else "noise floor",
        "problems": wrong,
        "left_out": plan.left_out,
        "agreement": {
            kind: {
                "fast": _figures(one),
                "stock": _figures(noise[kind]) if kind in noise else None,
            }
            for kind, one in compared.items()
        },
        "times": [
            {
                "tokens": length,
                "off": asdict(off[length]),
                "on": asdict(on[length]),
                "ratio": round(off[length].median / on[length].median, 4),
            }
            for length in off
        ],
        "forwards": dict(fast.forwards),
        "prefix_hit_tokens": hits[-1],
    }
    return Outcome(document, compared, noise)


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
    servers = build_servers(args, model, device, output)
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
        say(f"{server.name}, {server.log}:")
        for line in server.log_lines or ["(nothing)"]:
            say(f"  | {line}")
    heading("Answers")
    show_examples(plan, stock, fast)
    table.show(document)
    (output / "verify.html").write_text(page.render(outcome), "utf-8")
    say(f"Report: {output / 'verify.html'}\n")
    finish(document, output)
    return 0 if document["agrees"] else 1
