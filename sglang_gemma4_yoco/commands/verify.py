"""Does fast prefill give the same answers here, and what does it bring?

Serves one model twice with the unchanged ``python -m sglang.launch_server``: stock
(SGLANG_GEMMA4_YOCO=0) and fast (SGLANG_GEMMA4_YOCO=1). Both get the same prompts at temperature 0,
one at a time and then several at once; stock also a second time right after the first, when all but
the last token is in its prefix cache. The time to first token is measured with prompts that no
server has seen before. Prefills must have been cut in each of these rounds. What follows -- goes to
both servers. If they ask for an API key (SGLang reads it from its --config, too), put it into the
variable SGLANG_API_KEY.

In float32 on a CPU all tokens must be equal, and all log-probabilities within 1e-3. Elsewhere
products round differently with the number of their rows, in stock as well. There, for each kind of
prompt, the mean difference of log-probabilities may be 3 times what stock differs from itself in
other batches (by its noisiest kind of prompt), and 0.05 more; and one prompt of each kind may be as
far off as the furthest of stock's. Whole answers are judged by this rule, and once more what
prefills alone computed.

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

from sglang_gemma4_yoco import __version__, log
from sglang_gemma4_yoco.commands import prompts as kinds
from sglang_gemma4_yoco.commands import servers
from sglang_gemma4_yoco.commands.compare import Answer, Comparison, Times, beyond
from sglang_gemma4_yoco.commands.console import CommandError, heading, say
from sglang_gemma4_yoco.commands.prompts import Maker, Prompt
from sglang_gemma4_yoco.commands.servers import Server, WrongPathError

ALONE, AGAIN, AT_ONCE, TIMED = "one at a time", "once more", "several at once", "timed"
_WORKERS = 8  # requests at a time, in the round ``AT_ONCE``
_PREFILL_GRAPHS = "--cuda-graph-backend-prefill"
_GPU = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"

Answers = list[Answer]
Compared = dict[str, Comparison]
Advance = Callable[[str], None]


def positive(text: str) -> int:
    """An argparse type: an integer above zero."""
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
    of_model = "a checkpoint's directory or a model on the Hugging Face hub"
    add("--model-path", required=True, metavar="M", help=of_model)
    add("--label", metavar="TEXT", help="its name in the report (default: as --model-path)")
    of_prompts = 'instead of the bundled questions: one per line, as text or as {"prompt": ...}'
    add("--prompts", type=Path, metavar="FILE", help=of_prompts)
    lengths = {"type": positive, "nargs": "+", "default": [128, 512, 2048], "metavar": "N"}
    add("--prompt-tokens", **lengths, help="of the timed prompts (default: 128 512 2048)")
    of_repeats = "timed prompts of each length (default: %(default)s)"
    add("--repeats", type=positive, default=5, metavar="N", help=of_repeats)
    of_device = "default: the GPU if PyTorch sees one"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=of_device)
    of_ways = "both at once or one after the other (default: together on a CPU with the memory)"
    add("--servers", choices=("auto", "together", "in-turn"), default="auto", help=of_ways)
    of_port = "serve on this port and the next (default: any two free ones)"
    add("--port", type=positive, metavar="N", help=of_port)
    of_timeout = "for the start of a server, downloads included (default: %(default)s)"
    add("--start-timeout", type=positive, default=1800, metavar="SECONDS", help=of_timeout)
    of_output = "for logs and reports (default: gemma4-yoco-verify-DATE-TIME here)"
    add("--output", type=Path, metavar="DIR", help=of_output)
    add("server_args", nargs="*", metavar="FLAG", help="SGLang's, for both servers, after --")
    parser.set_defaults(run=run)


def find_model(model: str) -> str:
    """Check a local path; leave the name of a model on the Hugging Face hub to SGLang."""
    path = Path(model).expanduser()
    if (path / "config.json").exists():
        return str(path.resolve())
    if path.is_dir() or model.startswith(("/", ".", "~")) or model.count("/") != 1:
        neither = "is no directory with a config.json, and no name on the Hugging Face hub"
        raise CommandError(f"--model-path {model} {neither}, such as google/gemma-4-E2B-it.")
    return model


def find_device(wanted: str) -> str:
    """The GPU's name, or ``cpu``."""
    if find_spec("sglang") is None:
        raise CommandError(f"{sys.executable} has no SGLang: pip install sglang")
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
    if any(flag.partition("=")[0] == _PREFILL_GRAPHS for flag in stock.arguments):
        stock.arguments.append(f"{_PREFILL_GRAPHS}=disabled")  # the last one counts
        say("The stock server runs its prefills eagerly: SGLang cannot capture them by itself.")


@dataclass
class Plan:
    """The requests to both servers."""

    prompts: list[Prompt]
    timed: dict[int, list[Prompt]]  # by their length; the first of each length warms up
    dtype: str
    exact: bool  # float32 on a CPU
    left_out: dict[str, str]  # kinds of prompts that are not sent, and why


def make_plan(
    texts: Sequence[str], maker: Maker, args: argparse.Namespace, server: Server, device: str
) -> Plan:
    """Fit the prompts to a server that is ready."""
    settings, left_out = server.states()[0], {}
    questions = list(map(maker.question, texts))
    prompts = [*questions, *kinds.with_logprobs(questions), *maker.shared_prefix("\n".join(texts))]
    if settings.get("disable_radix_cache"):
        left_out[kinds.PREFIX] = "no hit of the prefix cache: it is turned off"
    longest = 2560 if device == "cpu" else 65536  # more would take minutes
    chunk = settings.get("chunked_prefill_size") or -1
    length = chunk + max(chunk // 4, 16)
    if 0 < length <= longest:
        prompts.append(maker.long("\n".join(reversed(texts)), length))
    else:
        hint = f"try -- --chunked-prefill-size {longest // 5 * 2}"
        left_out[kinds.CHUNKS] = f"a chunk has {chunk} tokens: {hint}"
    if server.get("/model_info").get("has_image_understanding") and maker.has_template:
        pairs = (("red", "green"), ("blue", "yellow"))
        prompts += [maker.about_picture(kinds.picture(*colours)) for colours in pairs]
    else:
        left_out[kinds.PICTURES] = "the model is served without pictures, or has no chat template"
    count = 1 + args.repeats
    timed = {
        length: [maker.timed(length, number * count + i) for i in range(count)]
        for number, length in enumerate(dict.fromkeys(args.prompt_tokens))
    }
    dtype = str(settings.get("dtype", "auto")).removeprefix("torch.")
    return Plan(prompts, timed, dtype, (device, dtype) == ("cpu", "float32"), left_out)


@dataclass
class Found:
    """What one server did: answers and prefills (by outcome) by round, times by length."""

    answers: dict[str, Answers] = field(default_factory=lambda: defaultdict(list))
    forwards: dict[str, Counter[str]] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


@contextmanager
def round_of(server: Server, found: Found, name: str) -> Iterator[Answers]:
    """One round of requests, from an empty prefix cache on; yields a list for the answers.

    Raises:
        WrongPathError: no prefill of this round was cut and the switch is on, so that its answers
            say nothing; or it is off, and one was.
    """
    server.forget_prefixes()
    before = server.forwards()
    answers = found.answers[name]
    yield answers
    cached = sum(answer.cached_tokens for answer in answers)
    during = f"the round {name!r} ({cached} prompt tokens came from the prefix cache)"
    found.forwards[name] = servers.check_switch(server, before, during)


def send(server: Server, prompt: Prompt, round_name: str, advance: Advance) -> Answer:
    """The answer to one prompt."""
    answer = Answer.of(server.generate(**prompt.request()))
    advance(f"{'fast' if server.fast else 'stock'}: {round_name}")
    return answer


def ask(server: Server, prompts: Sequence[Prompt], advance: Advance) -> Found:
    """A server's answers to all prompts, one at a time and then several at once."""
    found = Found()
    with round_of(server, found, ALONE) as answers:
        for prompt in prompts:
            answers.append(send(server, prompt, ALONE, advance))
            if not server.fast:
                # Stock computes the last row by itself then, as the fast path's tail does.
                found.answers[AGAIN].append(send(server, prompt, AGAIN, advance))
    pool = ThreadPoolExecutor(_WORKERS)
    with round_of(server, found, AT_ONCE) as answers:
        try:
            answers += pool.map(lambda prompt: send(server, prompt, AT_ONCE, advance), prompts)
        finally:
            # Not waited for: on the way out of an interrupted run their server is stopped next.
            pool.shutdown(wait=False, cancel_futures=True)
    return found


def first_token(server: Server, prompt: Prompt, advance: Advance) -> tuple[float, Answer]:
    """The seconds until a prompt's one token has arrived, and the answer; it must be uncached."""
    began = time.perf_counter()
    reply = server.generate(**prompt.request())
    seconds = time.perf_counter() - began
    advance(f"{'fast' if server.fast else 'stock'}: {TIMED}, {seconds:.3f} s")
    answer = Answer.of(reply)
    if answer.cached_tokens:
        cached = f"{server.name} took {answer.cached_tokens} tokens of a timed prompt from a cache"
        raise CommandError(f"{cached}: turn it off with SGLang's --disable-radix-cache.")
    return seconds, answer


def examine(both: Sequence[Server], plan: Plan, progress: Any) -> list[Found]:
    """Ask running servers, then time them in turns."""
    rounds = sum(2 if server.fast else 3 for server in both) * len(plan.prompts)
    with progress(rounds + len(both) * sum(map(len, plan.timed.values()))) as advance:
        found = [ask(server, plan.prompts, advance) for server in both]
        turns = list(zip(both, found, strict=True))
        with ExitStack() as timed:
            for server, one in turns:
                timed.enter_context(round_of(server, one, TIMED))
            for length, prompts in plan.timed.items():
                for number, prompt in enumerate(prompts):
                    turns.reverse()  # or the same server would always meet the warmer caches
                    for server, one in turns:
                        seconds, answer = first_token(server, prompt, advance)
                        if number:  # a first time is always slower
                            one.seconds[length].append(seconds)
                            one.answers[TIMED].append(answer)
    return found


def serve(
    args: argparse.Namespace, model: str, device: str, both: Sequence[Server], progress: Any
) -> tuple[Plan, Found, Found]:
    """Start, examine and stop both servers; the requests, and what stock and fast did."""
    together = args.servers == "together" or (
        args.servers == "auto" and device == "cpu" and servers.fit_together(model)
    )
    say("Both servers at once." if together else "One server after the other.")
    texts = kinds.bundled() if args.prompts is None else kinds.read_file(args.prompts)
    maker, plan = Maker.of(model), None
    found: dict[bool, Found] = {}
    # Alone, the fast one goes first: if it is not active there is nothing to measure.
    for group in [both] if together else [[both[1]], [both[0]]]:
        with servers.running(group, args.start_timeout, one_by_one=device != "cpu"):
            plan = plan or make_plan(texts, maker, args, group[0], device)
            for server, one in zip(group, examine(group, plan, progress), strict=True):
                found[server.fast] = one
    assert plan is not None
    return plan, found[False], found[True]


def compare(
    plan: Plan, stock: Found, fast: Found, *, prefilled: bool = False
) -> tuple[Compared, Compared]:
    """By kind of prompt: fast against stock, and stock against itself; or only their prefills."""
    alone = stock.answers[ALONE]

    def by_kind(*others: Answers) -> Compared:
        pairs = defaultdict(list)
        for answers in others:
            for prompt, one, other in zip(plan.prompts, alone, answers, strict=True):
                both = (one.prefilled, other.prefilled) if prefilled else (one, other)
                pairs[prompt.kind].append(both)
        return {kind: Comparison.of(both) for kind, both in pairs.items()}

    found = by_kind(fast.answers[ALONE], fast.answers[AT_ONCE])
    timed = zip(stock.answers[TIMED], fast.answers[TIMED], strict=True)
    found[kinds.TIMED] = Comparison.of(timed)
    return found, by_kind(stock.answers[AT_ONCE], stock.answers[AGAIN])


def problems(plan: Plan, stock: Found, fast: Found) -> list[str]:
    """Why the two servers do not agree; none if they do."""
    compared, noise = compare(plan, stock, fast)
    judged = [(compared, noise, "")]
    if not plan.exact:
        # Most tokens come from decode steps, the same in both servers, and hide the first ones.
        del compared[kinds.TIMED]
        judged.append((*compare(plan, stock, fast, prefilled=True), ", prefills alone"))
    found = [
        f"{kind}{part}: {sentence}"
        for of_fast, of_stock, part in judged
        for kind, one in of_fast.items()
        for sentence in beyond(one, of_stock.values(), exact=plan.exact)
    ]
    failed = sum(forwards[log.FAILED] for forwards in fast.forwards.values())
    if failed:
        found.append(f"{failed} prefills failed on the fast path; see server-on.log")
    return found


def conclude(
    document: dict[str, Any], plan: Plan, stock: Found, fast: Found
) -> tuple[Compared, Compared]:
    """Put the verdict and all figures into the document; returns what ``compare`` does."""
    compared, noise = compare(plan, stock, fast)
    wrong, everything = problems(plan, stock, fast), sum(compared.values(), Comparison())
    alone = zip(plan.prompts, fast.answers[ALONE], strict=True)
    hit = max(one.cached_tokens for prompt, one in alone if prompt.kind == kinds.PREFIX)
    if not hit:
        plan.left_out.setdefault(kinds.PREFIX, "no hit of the prefix cache, though it is on")
    times = []
    for length in plan.timed:
        off, on = Times.of(stock.seconds[length]), Times.of(fast.seconds[length])
        ratio = round(off.median / on.median, 4)
        times.append({"tokens": length, "off": asdict(off), "on": asdict(on), "ratio": ratio})
    longest: dict[str, Any] = max(times, key=itemgetter("tokens"))
    document |= {
        "dtype": plan.dtype,
        "active": True,
        "agrees": not wrong,
        "answers_equal": everything.equal_answers == everything.answers,
        "max_logprob_diff": everything.figures()["max_logprob_diff"],
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
        "prefix_hit_tokens": hit,
    }
    return compared, noise


def run(args: argparse.Namespace) -> int:
    """Serve, ask, judge, show; returns the exit status."""
    try:
        from sglang_gemma4_yoco.commands import page
    except ModuleNotFoundError as missing:
        how = "pip install '.[verify]' in a checkout of this package"
        raise CommandError(f"verify needs {missing.name}: {how}") from missing
    model, device = find_model(args.model_path), find_device(args.device)
    output = args.output or Path(time.strftime("gemma4-yoco-verify-%Y%m%d-%H%M%S"))
    output = output.expanduser().absolute()
    output.mkdir(parents=True, exist_ok=True)
    (output / "verify.json").unlink(missing_ok=True)
    heading("Servers")
    say(f"SGLang {version('sglang')} on {device}; {model}; logs in {output}")
    flags = ["--model-path", model, *args.server_args]
    together = args.servers == "together"
    both = servers.pair(flags, output, device=device, port=args.port, together=together)
    run_prefills_eagerly(both[0])
    unknown = ("agrees", "answers_equal", "max_logprob_diff", "ttft_off_s", "ttft_on_s", "ratio")
    document: dict[str, Any] = dict.fromkeys(unknown) | {
        "model": args.label or args.model_path,
        "device": device,
        "sglang": version("sglang"),
        "package": __version__,
        "server_args": re.sub(r"(api-key[ =])\S+", r"\1...", shlex.join(args.server_args)),
        "prompt_tokens": max(args.prompt_tokens),
        "active": False,
        "repeats": args.repeats,
        "output": str(output),
    }
    try:
        plan, stock, fast = serve(args, model, device, both, page.progress)
    except WrongPathError as wrong:
        heading("FAST PREFILL DID NOT DO WHAT THE SWITCH SAYS: NOTHING WAS MEASURED")
        say(str(wrong))
        document["problems"] = str(wrong).splitlines()[:1]
    else:
        compared = conclude(document, plan, stock, fast)
        page.show(document, page.console_of())
        (output / "verify.html").write_text(page.render(document, *compared), "utf-8")
        say(f"Report: {output / 'verify.html'}\n")
    (output / "verify.json").write_text(json.dumps(document, indent=1) + "\n")
    say(json.dumps(document))
    return 0 if document["agrees"] else 1
