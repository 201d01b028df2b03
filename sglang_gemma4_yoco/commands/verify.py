"""Does fast prefill give the same answers here, and how much faster is it?

Serves one model twice with the unchanged ``python -m sglang.launch_server``: stock
(SGLANG_GEMMA4_YOCO=0) and fast (SGLANG_GEMMA4_YOCO=1). Both get the same prompts at temperature 0,
one at a time and then several at once; stock also gets each prompt twice in a row, so that all but
its last token is in the prefix cache. The time to first token is measured with new prompts. In each
of these rounds the fast server must have cut prefills. What follows -- goes to both servers. If
they need an API key, put it into the variable SGLANG_API_KEY.

In float32 on a CPU all tokens must be equal, and all log-probabilities within 1e-3. Elsewhere
rounding depends on the number of rows, in stock as well: for each kind of prompt, log-probabilities
may differ on average by 3 * A + B / N + 0.05. A is how far stock differs from itself in other
batches on average (by its noisiest kind of prompt), B at most, and N the number of prompts. Whole
answers are judged by this rule, and then the parts of them that prefills computed.

The last line of stdout is one JSON document, which is in verify.json too; verify.html shows it.
Exit status: 0 if fast prefill was active and the answers agree; 1 if not; 2 if nothing could be
verified, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_gemma4_yoco import __version__, log
from sglang_gemma4_yoco.commands import prompts as kinds
from sglang_gemma4_yoco.commands import servers
from sglang_gemma4_yoco.commands.compare import Answer, Compared, Comparison, Times, beyond, finite
from sglang_gemma4_yoco.commands.console import CommandError, heading, say
from sglang_gemma4_yoco.commands.prompts import Prompt
from sglang_gemma4_yoco.commands.servers import Server, WrongPathError

ALONE, AGAIN, AT_ONCE, TIMED = "one at a time", "once more", "several at once", "timed"
_PREFILL_GRAPHS = "--cuda-graph-backend-prefill"
_GPU = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"

Answers = list[tuple[Prompt, Answer]]


def positive(text: str) -> int:
    """An integer above zero, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above zero")
    return number


def add_to(commands: Any) -> None:
    """Add the parser of ``verify`` to an argparse subparsers action."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    as_is = argparse.RawDescriptionHelpFormatter
    about = {"help": summary, "description": summary, "epilog": rest, "formatter_class": as_is}
    parser = commands.add_parser("verify", **about)
    add = parser.add_argument
    number = {"type": positive, "metavar": "N"}
    add("--model-path", required=True, metavar="M", help="a directory, or a name on Hugging Face")
    add("--label", metavar="TEXT", help="its name in the report (default: as --model-path)")
    lines = "your own, one per line (default: bundled questions)"
    add("--prompts", type=Path, metavar="FILE", default=kinds.BUNDLED, help=lines)
    lengths = "of the timed prompts (default: 128 512 2048)"
    add("--prompt-tokens", nargs="+", default=[128, 512, 2048], **number, help=lengths)
    add("--repeats", default=5, **number, help="timed prompts of each length (default: 5)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU if any")
    ways = "default: together on a CPU, in turn on a GPU"
    add("--servers", choices=("auto", "together", "in-turn"), default="auto", help=ways)
    add("--port", **number, help="serve on this port and the next (default: any two free ones)")
    add("--start-timeout", default=1800, **number, help="seconds for a start (default: 1800)")
    add("--output", type=Path, metavar="DIR", help="of logs and reports (default: a new one here)")
    add("server_args", nargs="*", metavar="FLAG", help="SGLang's, for both servers, after --")
    parser.set_defaults(run=run)


def find_device(wanted: str) -> str:
    """The GPU's name, or ``cpu``."""
    if wanted == "cpu":
        return "cpu"
    # In a process of its own: this one must not hold memory of the GPU while servers run.
    done = subprocess.run([sys.executable, "-c", _GPU], capture_output=True, text=True, check=False)
    name = done.stdout.strip()
    if done.returncode or (wanted == "cuda" and not name):
        why = done.stderr.strip().rpartition("\n")[2] or "check the driver with nvidia-smi"
        raise CommandError(f"PyTorch sees no GPU: {why}, or use --device cpu")
    return name or "cpu"


def run_prefills_eagerly(stock: Server) -> None:
    """Take prefill graphs from the stock server, which cannot capture them without the package."""
    if any(flag.startswith(_PREFILL_GRAPHS) for flag in stock.arguments):
        stock.arguments.append(f"{_PREFILL_GRAPHS}=disabled")  # the last one counts
        say("The stock server runs its prefills eagerly: SGLang cannot capture them by itself.")


@dataclass
class Plan:
    """The requests to both servers."""

    prompts: list[Prompt]
    timed: list[list[Prompt]]  # of each length; the first one warms up
    dtype: str
    exact: bool  # float32 on a CPU
    left_out: dict[str, str]  # kinds of prompts that are not sent, and why


def make_plan(
    texts: Sequence[str], tokenizer: Any, args: argparse.Namespace, server: Server, device: str
) -> Plan:
    """Fit the prompts to a server that is ready."""
    settings, left_out = server.states()[0], {}
    if settings.get("disable_radix_cache"):
        left_out[kinds.PREFIX] = "no hit of the prefix cache: it is turned off"
    chunk = settings.get("chunked_prefill_size") or -1
    length = chunk + max(chunk // 4, 16)
    if not 0 < length <= (2560 if device == "cpu" else 65536):  # more would take minutes
        hint = "try -- --chunked-prefill-size 1024"
        left_out[kinds.CHUNKS], length = f"a chunk has {chunk} tokens: {hint}", 0
    seen = server.get("/model_info").get("has_image_understanding") and tokenizer.chat_template
    if not seen:
        left_out[kinds.PICTURES] = "the model is served without pictures, or has no chat template"
    prompts = kinds.make(tokenizer, texts, long=length, pictures=bool(seen))
    count = 1 + args.repeats
    timed = [
        [kinds.timed(tokenizer, length, number * count + i) for i in range(count)]
        for number, length in enumerate(dict.fromkeys(args.prompt_tokens))
    ]
    dtype = str(settings.get("dtype", "auto")).removeprefix("torch.")
    return Plan(prompts, timed, dtype, (device, dtype) == ("cpu", "float32"), left_out)


@dataclass
class Found:
    """What one server answered, and its prefills by outcome, by round."""

    answers: dict[str, Answers] = field(default_factory=lambda: defaultdict(list))
    forwards: dict[str, Counter[str]] = field(default_factory=dict)


@contextmanager
def round_of(server: Server, found: Found, name: str) -> Iterator[Answers]:
    """One round of requests, from an empty prefix cache on; yields a list for the answers.

    Raises as ``check_switch``: where no prefill of this round was cut, equal answers show nothing.
    """
    server.forget_prefixes()
    before = server.forwards()
    yield found.answers[name]
    cached = sum(answer.cached_tokens for _, answer in found.answers[name])
    during = f"the round {name!r} ({cached} prompt tokens came from the prefix cache)"
    found.forwards[name] = servers.check_switch(server, before, during)


def send(server: Server, prompt: Prompt, bar: Any) -> tuple[Prompt, Answer]:
    """A prompt and its answer; ``bar`` is a tqdm. Timed prompts must be uncached."""
    began = time.perf_counter()
    reply = server.generate(**prompt.request())
    answer = Answer.of(reply, time.perf_counter() - began)
    bar.set_description(f"{'fast' if server.fast else 'stock'}: {prompt.kind}", refresh=False)
    bar.update()
    if prompt.kind == kinds.TIMED and answer.cached_tokens:
        cached = f"{server.name} took {answer.cached_tokens} tokens of a timed prompt from a cache"
        raise CommandError(f"{cached}: turn it off with SGLang's --disable-radix-cache.")
    return prompt, answer


def ask(server: Server, prompts: Sequence[Prompt], bar: Any) -> Found:
    """A server's answers to all prompts, one at a time and then several at once."""
    found = Found()
    with round_of(server, found, ALONE) as answers:
        for prompt in prompts:
            answers.append(send(server, prompt, bar))
            if not server.fast:
                # Stock computes the last row by itself then, as the fast path's tail does.
                found.answers[AGAIN].append(send(server, prompt, bar))
    with round_of(server, found, AT_ONCE) as answers, ExitStack() as stack:
        pool = ThreadPoolExecutor(8)
        # Not waited for: on the way out of an interrupted run their server is stopped next.
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        answers += pool.map(lambda prompt: send(server, prompt, bar), prompts)
    return found


def examine(both: Sequence[Server], plan: Plan) -> list[Found]:
    """Send all prompts to running servers, one server after the other; then time them in turns."""
    from tqdm import tqdm  # comes with SGLang

    total = sum(2 if server.fast else 3 for server in both) * len(plan.prompts)
    total += len(both) * sum(map(len, plan.timed))
    with tqdm(total=total, unit="request") as bar, ExitStack() as rounds:
        found = [ask(server, plan.prompts, bar) for server in both]
        turns = [
            (server, rounds.enter_context(round_of(server, one, TIMED)))
            for server, one in zip(both, found, strict=True)
        ]
        for prompts in plan.timed:
            for prompt in prompts:
                turns.reverse()  # or the same server would always meet the warmer caches
                for server, answers in turns:
                    sent = send(server, prompt, bar)
                    if prompt is not prompts[0]:  # a first time is always slower
                        answers.append(sent)
    return found


def serve(
    args: argparse.Namespace, model: str, device: str, groups: Sequence[Sequence[Server]]
) -> tuple[Plan, Found, Found]:
    """Start, examine and stop group after group; the requests, and what stock and fast did."""
    texts, tokenizer, plan = kinds.read_file(args.prompts), kinds.tokenizer_of(model), None
    found: dict[bool, Found] = {}
    for group in groups:
        with servers.running(group, args.start_timeout, one_by_one=device != "cpu"):
            plan = plan or make_plan(texts, tokenizer, args, group[0], device)
            for server, one in zip(group, examine(group, plan), strict=True):
                found[server.fast] = one
    assert plan is not None
    return plan, found[False], found[True]


def by_kind(*pairs: tuple[Answers, Answers]) -> Compared:
    """Answers compared with others to the same prompts, by the prompts' kind."""
    found = defaultdict(list)
    for ones, others in pairs:
        for (prompt, one), (_, other) in zip(ones, others, strict=True):
            found[prompt.kind].append((one, other))
    return {kind: Comparison.of(both) for kind, both in found.items()}


def conclude(
    document: dict[str, Any], plan: Plan, stock: Found, fast: Found
) -> tuple[Compared, Compared]:
    """Put all figures into the document; returns fast against stock, and stock against itself."""
    mine, own, alone = fast.answers, stock.answers, stock.answers[ALONE]
    compared = by_kind((alone, mine[ALONE]), (alone, mine[AT_ONCE]), (own[TIMED], mine[TIMED]))
    noise = by_kind((alone, own[AT_ONCE]), (alone, own[AGAIN]))
    wrong = [
        f"{kind}: {sentence}"
        for kind, one in compared.items()
        for sentence in beyond(one, noise.values(), exact=plan.exact)
    ]
    if failed := sum(forwards[log.FAILED] for forwards in fast.forwards.values()):
        wrong.append(f"{failed} prefills failed on the fast path; see server-on.log")
    hits = max(a.cached_tokens for prompt, a in mine[ALONE] if prompt.kind == kinds.PREFIX)
    if not hits:
        plan.left_out.setdefault(kinds.PREFIX, "no hit of the prefix cache, though it is on")
    times = []
    for prompts in plan.timed:
        off, on = (
            Times.of([answer.seconds for prompt, answer in one[TIMED] if prompt in prompts])
            for one in (own, mine)
        )
        point: dict[str, Any] = {"tokens": len(prompts[0].body["input_ids"])}
        ratio = round(off.median / on.median, 4)
        times.append(point | {"off": asdict(off), "on": asdict(on), "ratio": ratio})
    longest = max(times, key=lambda point: point["tokens"])
    document |= {
        "dtype": plan.dtype,
        "active": True,
        "agrees": not wrong,
        "answers_equal": all(one.equal_answers == one.answers for one in compared.values()),
        "max_logprob_diff": finite(max(one.max_logprob for one in compared.values())),
        "ttft_off_s": round(longest["off"]["median"], 6),
        "ttft_on_s": round(longest["on"]["median"], 6),
        "ratio": longest["ratio"],
        "rule": "exact" if plan.exact else "noise floor",
        "problems": wrong,
        "left_out": plan.left_out,
        "agreement": {
            kind: {"fast": one.figures(), "stock": noise.get(kind, Comparison()).figures()}
            for kind, one in compared.items()
        },
        "times": times,
        "rounds": fast.forwards,
        "prefix_hit_tokens": hits,
    }
    return compared, noise


def run(args: argparse.Namespace) -> int:
    """Serve, ask, judge, show; returns the exit status."""
    try:
        from sglang_gemma4_yoco.commands import page

        sglang = version("sglang")
    except ModuleNotFoundError as missing:
        how = "pip install '.[verify]' in a checkout of this package"
        raise CommandError(f"verify needs {missing.name}: {how}") from missing
    path, device = Path(args.model_path), find_device(args.device)
    model = str(path.absolute()) if path.is_dir() else args.model_path
    output = args.output or Path(time.strftime("gemma4-yoco-verify-%Y%m%d-%H%M%S"))
    output = output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    (output / "verify.json").unlink(missing_ok=True)
    heading("Servers")
    say(f"SGLang {sglang} on {device}; {model}; logs in {output}")
    flags = ["--model-path", model, *args.server_args]
    together = args.servers == "together" or (args.servers, device) == ("auto", "cpu")
    say("Both servers at once." if together else "One server after the other.")
    stock, fast = servers.pair(flags, output, device=device, port=args.port, together=together)
    run_prefills_eagerly(stock)
    # The fast one goes first: if it is not active there is nothing to measure.
    groups = [[stock, fast]] if together else [[fast], [stock]]
    unknown = ("agrees", "answers_equal", "max_logprob_diff", "ttft_off_s", "ttft_on_s", "ratio")
    document: dict[str, Any] = dict.fromkeys(unknown) | {
        "model": args.label or args.model_path,
        "device": device,
        "sglang": sglang,
        "package": __version__,
        "server_args": re.sub(r"(api-key[ =])\S+", r"\1...", shlex.join(args.server_args)),
        "prompt_tokens": max(args.prompt_tokens),
        "active": False,
        "repeats": args.repeats,
        "output": str(output),
    }
    try:
        found = serve(args, model, device, groups)
    except WrongPathError as wrong:
        heading("FAST PREFILL DID NOT DO WHAT THE SWITCH SAYS: NOTHING WAS MEASURED")
        say(str(wrong))
        document["problems"] = str(wrong).splitlines()[:1]
    else:
        compared = conclude(document, *found)
        page.show(document)
        (output / "verify.html").write_text(page.render(document, *compared), "utf-8")
        say(f"Report: {output / 'verify.html'}\n")
    (output / "verify.json").write_text(json.dumps(document, indent=1) + "\n")
    say(json.dumps(document))
    return 0 if document["agrees"] else 1
