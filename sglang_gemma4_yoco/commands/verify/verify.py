"""Does fast prefill give the same answers here, and how much faster is it?

Serves one model twice with the unchanged ``python -m sglang.launch_server``: stock
(SGLANG_GEMMA4_YOCO=0) and fast (SGLANG_GEMMA4_YOCO=1). Both get the same prompts at temperature 0,
one at a time, when each pair of answers is printed as it comes, and then several at once. The time
to first token is measured with new prompts. In each of these rounds the fast server must have cut
prefills. Stock gets all that is sent one at a time once more, in identical batches: what differs
then is not the fast path's doing. It also gets each prompt twice in a row, so that all but its
last token is in the prefix cache. What follows -- goes to both servers. If they need an API key,
put it into the variable SGLANG_API_KEY.

In float32 on a CPU all tokens must be equal, and all log-probabilities within 1e-3. Elsewhere, and
where two runs of stock in identical batches differ by more than that, for each kind of prompt
log-probabilities may differ on average by 3 * A + B / N + 0.05. A is how far stock differs from
itself on average (by its noisiest kind of prompt, in identical or in other batches), B at most, and
N half the number of answers that are compared. Whole answers are judged by this rule, and then the
parts of them that prefills computed.

The last line of stdout is one JSON document, which is in verify.json too; verify.html shows it.
Exit status: 0 if fast prefill was active and the answers agree; 1 if not; 2 if nothing could be
verified, with the reason on stderr.
"""

import argparse
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_gemma4_yoco import __version__, counters
from sglang_gemma4_yoco.commands.console import NO_SGLANG, CommandError, say
from sglang_gemma4_yoco.commands.redact import redact, show_flags
from sglang_gemma4_yoco.commands.verify import page, servers
from sglang_gemma4_yoco.commands.verify import prompts as kinds
from sglang_gemma4_yoco.commands.verify.compare import (
    Answer,
    Compared,
    Comparison,
    Times,
    find_problems,
    make_finite,
)
from sglang_gemma4_yoco.commands.verify.prompts import Prompt
from sglang_gemma4_yoco.commands.verify.servers import Server, WrongPathError

# Rounds of requests. Those with AGAIN are stock's second run of identical batches.
ALONE, AT_ONCE, TIMED = "one at a time", "several at once", "timed"
AGAIN, CACHED = "again", "from the prefix cache"
ALONE_AGAIN, TIMED_AGAIN = f"{ALONE}, {AGAIN}", f"{TIMED}, {AGAIN}"
_PREFILL_GRAPHS = "--cuda-graph-backend-prefill"
_OWN_FLAGS = ("--model-path", "--model=", "--model ", "--device", "--ssl-")

Answers = list[tuple[Prompt, Answer]]
Pairs = Sequence[tuple[Answers, Answers]]


def parse_positive(text: str) -> int:
    """An integer above zero, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above zero")
    return number


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``verify``."""
    add = parser.add_argument
    number: dict[str, Any] = {"type": parse_positive, "metavar": "N"}
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
    add("--output", type=Path, metavar="DIR", help="of logs and reports (default: a new one here)")
    add("flags", nargs="*", metavar="FLAG", help="SGLang's, for both servers, after --")


def find_device(wanted: str) -> str:
    """The GPU's name, or ``cpu``."""
    if wanted == "cpu":
        return "cpu"
    # In a process of its own: this one must not hold memory of the GPU while servers run.
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    name = done.stdout.strip()
    if wanted == "cuda" and not name:
        raise CommandError("PyTorch sees no GPU: check it with nvidia-smi, or use --device cpu")
    return name or "cpu"


def run_prefills_eagerly(stock: Server) -> None:
    """Disable prefill graphs of the stock server, which cannot capture them without the package."""
    if any(flag.startswith(_PREFILL_GRAPHS) for flag in stock.arguments):
        stock.arguments.append(f"{_PREFILL_GRAPHS}=disabled")  # the last one counts
        say("The stock server runs its prefills eagerly: SGLang cannot capture them by itself.")


def fit_prompts(
    document: dict[str, Any], args: argparse.Namespace, tokenizer: Any, server: Server
) -> list[Prompt]:
    """The prompts for servers like this one, which is ready; kinds that are left out are noted."""
    left_out = {}
    info = server.get("/server_info")
    settings = info["internal_states"][0]
    longest = info.get("max_req_input_len", 65537) - 1  # a prompt of so many tokens is refused
    if max(args.prompt_tokens) > longest:
        raise CommandError(
            f"--prompt-tokens: with these flags a prompt has at most {longest} tokens"
        )
    if args.device == "cpu":  # where more would take minutes
        longest = min(longest, 2560)
    length = 0
    chunk = settings.get("chunked_prefill_size") or -1
    if chunk > 0:
        length = chunk + max(chunk // 4, 16)
    if not 0 < length <= longest:
        left_out[kinds.CHUNKS] = f"a chunk has {chunk}: try -- --chunked-prefill-size 1024"
        length = 0
    seen = server.get("/model_info").get("has_image_understanding") and tokenizer.chat_template
    if not seen:
        left_out[kinds.PICTURES] = "the model is served without pictures, or has no chat template"
    dtype = str(settings.get("dtype", "auto")).removeprefix("torch.")
    rule = "noise floor"
    if (args.device, dtype) == ("cpu", "float32"):
        rule = "exact"
    document |= {"dtype": dtype, "rule": rule, "left_out": left_out}
    prompts = kinds.make_prompts(tokenizer, args.texts, long=length, pictures=bool(seen))
    for tokens in dict.fromkeys(args.prompt_tokens):
        for kind in (kinds.WARM_UP, *[kinds.TIMED] * args.repeats):
            prompts.append(kinds.make_timed(tokenizer, tokens, len(prompts), kind))
    return prompts


@dataclass
class Found:
    """What one server answered, and its prefills by outcome, by round."""

    answers: dict[str, Answers] = field(default_factory=lambda: defaultdict(list))
    forwards: dict[str, Counter[str]] = field(default_factory=dict)


def send_prompt(server: Server, prompt: Prompt) -> tuple[Prompt, Answer]:
    """A prompt and its answer. Timed prompts must be uncached."""
    began = time.perf_counter()
    reply = server.generate(**prompt.request())
    answer = Answer.of(reply, time.perf_counter() - began)
    if prompt.kind == kinds.TIMED and answer.cached_tokens:
        cached = f"{server.name} took {answer.cached_tokens} tokens of a timed prompt from a cache"
        raise CommandError(f"{cached}: turn it off with SGLang's --disable-radix-cache.")
    return prompt, answer


def end_round(server: Server, found: Found, name: str) -> None:
    """Count the prefills of a round of requests; the next one begins with an empty prefix cache.

    Raises as ``check_switch``: where no prefill of this round was cut, equal answers show nothing.
    """
    cached = sum(answer.cached_tokens for _, answer in found.answers[name])
    during = f"the round {name!r} ({cached} prompt tokens came from the prefix cache)"
    earlier = sum(found.forwards.values(), Counter[str]())
    found.forwards[name] = servers.check_switch(server, during, since=earlier)
    server.forget_prefixes()
    say(f"{server.name}, {name}: {len(found.answers[name])} requests")


def send_in_turns(
    both: Sequence[Server], prompts: Sequence[Prompt], found: dict[bool, Found], name: str
) -> None:
    """Send prompts one at a time to each running server in turn, and then to stock once more.

    What both have answered to a question is printed as soon as both have.
    """
    turns = list(both)
    for number, prompt in enumerate(prompts):
        turns.reverse()  # or the same server would always have the warmer caches
        for server in turns:
            answers, sent = found[server.fast].answers, send_prompt(server, prompt)
            if prompt.kind != kinds.WARM_UP:
                answers[name].append(sent)
            if name == ALONE and not server.fast:
                # Stock computes the last row by itself then, as the fast path's tail does.
                answers[CACHED].append(send_prompt(server, prompt))
        if name == ALONE and len(found) == 2:
            _, stock = found[False].answers[ALONE][number]
            _, fast = found[True].answers[ALONE][number]
            say(f"{prompt.kind}:\n  stock: {stock.text!r}\n  fast:  {fast.text!r}")
    for server in both:
        one = found[server.fast]
        end_round(server, one, name)
        if not server.fast:  # each is a batch of its own, as before
            again = f"{name}, {AGAIN}"
            for prompt, _ in one.answers[name]:
                one.answers[again].append(send_prompt(server, prompt))
            end_round(server, one, again)


def send_at_once(server: Server, prompts: Sequence[Prompt], found: Found) -> None:
    """Send all prompts to a running server, several at a time."""
    pool = ThreadPoolExecutor(8)
    try:
        found.answers[AT_ONCE] += pool.map(partial(send_prompt, server), prompts)
    finally:  # without waiting: after an interrupt their server is stopped next
        pool.shutdown(wait=False, cancel_futures=True)
    end_round(server, found, AT_ONCE)


def examine_servers(
    both: Sequence[Server], prompts: Sequence[Prompt], found: dict[bool, Found]
) -> None:
    """Send all prompts to each running server, one at a time and several at once; then time some.

    ``found`` has what each has answered, also those that ran before; True is the fast one.
    """
    others = [prompt for prompt in prompts if prompt.kind in kinds.KINDS]
    timed = [prompt for prompt in prompts if prompt.kind not in kinds.KINDS]
    for server in both:
        server.forget_prefixes()  # those of requests that SGLang sends when it starts
    send_in_turns(both, others, found, ALONE)
    for server in both:
        send_at_once(server, others, found[server.fast])
    send_in_turns(both, timed, found, TIMED)


def compare_by_kind(pairs: Pairs) -> Compared:
    """Answers compared with others to the same prompts, by the prompts' kind."""
    found = defaultdict(list)
    for ones, others in pairs:
        for (prompt, one), (_, other) in zip(ones, others, strict=True):
            found[prompt.kind].append((one, other))
    return {kind: Comparison.of(both) for kind, both in found.items()}


def judge(compared: Compared, noise: Collection[Comparison], *, exact: bool) -> list[str]:
    """What differs by more than it may, each sentence with its kind of prompt."""
    sentences = []
    for kind, one in compared.items():
        for problem in find_problems(one, noise, exact=exact):
            sentences.append(f"{kind}: {problem}")
    return sentences


def summarise_times(off: Answers, again: Answers, on: Answers) -> list[dict[str, Any]]:
    """The times to first token by prompt length, the shortest first."""
    points: dict[int, dict[str, Any]] = defaultdict(lambda: defaultdict(list))
    for way, answers in {"off": off, "again": again, "on": on}.items():
        for prompt, answer in answers:
            points[len(prompt.body["input_ids"])][way].append(answer.seconds)
    summarised = []
    for tokens, seconds in sorted(points.items()):
        point: dict[str, Any] = {way: asdict(Times.of(own)) for way, own in seconds.items()}
        ratio = point["off"]["median"] / point["on"]["median"]
        summarised.append(point | {"tokens": tokens, "ratio": ratio})
    return summarised


def note_missing_hit(left_out: dict[str, str], answers: Answers) -> None:
    """Note where no prompt with a shared prefix has hit the prefix cache."""
    if not any(answer.cached_tokens for prompt, answer in answers if prompt.kind == kinds.PREFIX):
        left_out[kinds.PREFIX] = "no hit of the prefix cache"


def conclude(document: dict[str, Any], stock: Found, fast: Found) -> None:
    """Compare, judge, and put all figures into the document."""
    mine, own, alone = fast.answers, stock.answers, stock.answers[ALONE]
    compared = compare_by_kind(
        [(alone, mine[ALONE]), (alone, mine[AT_ONCE]), (own[TIMED], mine[TIMED])]
    )
    again = compare_by_kind([(alone, own[ALONE_AGAIN]), (own[TIMED], own[TIMED_AGAIN])])
    others = compare_by_kind([(alone, own[AT_ONCE]), (alone, own[CACHED])])
    unsteady = judge(again, (), exact=True)
    if unsteady:  # what stock does not keep cannot be asked of the fast path
        document["rule"] = "noise floor"
    noise, exact = [*again.values(), *others.values()], document["rule"] == "exact"
    problems = judge(compared, noise, exact=exact)
    if failed := sum(forwards[counters.FAILED] for forwards in fast.forwards.values()):
        problems.append(f"{failed} prefills failed on the fast path; see server-on.log")
    note_missing_hit(document["left_out"], mine[ALONE])
    agreement: dict[str, dict[str, Any]] = defaultdict(dict)
    for way, found in {"fast": compared, "again": again, "stock": others}.items():
        for kind in compared:
            agreement[kind][way] = found.get(kind, Comparison()).figures()
    times = summarise_times(own[TIMED], own[TIMED_AGAIN], mine[TIMED])
    document |= {
        "active": True,
        "agrees": not problems,
        "answers_equal": all(one.equal_answers == one.answers for one in compared.values()),
        "max_logprob_diff": make_finite(max(one.max_logprob for one in compared.values())),
        "ttft_off_s": times[-1]["off"]["median"],  # of the longest prompts
        "ttft_on_s": times[-1]["on"]["median"],
        "ratio": times[-1]["ratio"],
        "problems": problems,
        "stock_differs": unsteady,
        "agreement": agreement,
        "times": times,
        "rounds": fast.forwards,
    }


def serve_both(args: argparse.Namespace, document: dict[str, Any]) -> tuple[Found, Found]:
    """Start, examine and stop both servers; returns what stock and fast did."""
    tokenizer = kinds.load_tokenizer(args.model_path)
    flags = ["--model-path", args.model_path, *args.flags]
    together = args.servers == "together" or (args.servers, args.device) == ("auto", "cpu")
    for flag in args.flags:
        if f"{flag} ".startswith(_OWN_FLAGS):
            raise CommandError(
                f"{flag}: verify has a --model-path and a --device of its own, and speaks http to "
                "its servers: leave it out behind --"
            )
    stock, fast = servers.make_pair(flags, args.output, device=args.device, together=together)
    run_prefills_eagerly(stock)
    prompts: list[Prompt] = []
    found: dict[bool, Found] = defaultdict(Found)
    # The fast one goes first: if it is not active there is nothing to measure.
    groups = [[fast], [stock]]
    if together:
        groups = [[stock, fast]]
    for group in groups:
        with servers.run_servers(group, 1800, one_by_one=args.device != "cpu"):
            prompts = prompts or fit_prompts(document, args, tokenizer, group[0])
            examine_servers(group, prompts, found)
    return found[False], found[True]


def begin_document(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON document before anything is known; what is not known is None."""
    unknown = ("agrees", "answers_equal", "max_logprob_diff", "ttft_off_s", "ttft_on_s", "ratio")
    return dict.fromkeys(unknown) | {
        "model": args.label or args.model_path,
        "device": args.device,
        "sglang": version("sglang"),
        "package": __version__,
        "server_args": show_flags(args.flags),
        "prompt_tokens": max(args.prompt_tokens),
        "active": False,
        "repeats": args.repeats,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "output": str(args.output),
    }


def run(args: argparse.Namespace) -> int:
    """Serve, ask, judge, show; returns the exit status."""
    if find_spec("sglang") is None:
        raise CommandError(NO_SGLANG)
    output = args.output or Path(time.strftime("gemma4-yoco-verify-%Y%m%d-%H%M%S"))
    args.device, args.output = find_device(args.device), output.absolute()
    document = begin_document(args)
    args.texts = kinds.read_file(args.prompts)
    args.output.mkdir(mode=0o700, parents=True, exist_ok=True)  # while they run, logs have keys
    as_json, as_page = args.output / "verify.json", args.output / "verify.html"
    for earlier in (as_json, as_page):
        earlier.unlink(missing_ok=True)
    say(f"Logs and reports: {args.output}")
    try:
        stock, fast = serve_both(args, document)
    except WrongPathError as wrong:
        say("\n== FAST PREFILL DID NOT DO WHAT THE SWITCH SAYS: NOTHING WAS MEASURED")
        say(str(wrong))
        document["problems"] = str(wrong).splitlines()[:1]
    else:
        conclude(document, stock, fast)
    with as_json.open("w") as file:
        say(document, file, indent=1)
    if document["active"]:
        shown = redact(document)
        say(page.format_report(shown))
        as_page.write_text(page.render_page(shown), "utf-8")
    say(document)
    return int(not document["agrees"])
