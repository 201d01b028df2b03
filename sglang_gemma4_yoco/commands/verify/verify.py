"""Compare the answers and the times of a model with and without fast prefill.

The command serves one model twice with the unchanged ``python -m sglang.launch_server``: stock
(SGLANG_GEMMA4_YOCO=0) and fast (SGLANG_GEMMA4_YOCO=1). Both servers get the same prompts at
temperature 0, first one at a time (each answer is printed as it arrives), then eight, five and
three at once. New prompts measure the time to first token. Stock gets the one-at-a-time prompts a
second time, in identical batches, because the fast path cannot cause a difference between two runs
of stock. Stock also gets each prompt twice in a row, so that all but its last token is in the
prefix cache. Flags after -- go to both servers. If they need an API key, set SGLANG_API_KEY.

In float32 on a CPU, all tokens must be equal and all log-probabilities within 1e-3. Elsewhere, and
if two runs of stock in identical batches differ by more than that, stock's own answers to a prompt
set the bound. The distance between two answers is the mean difference of their log-probabilities.
The fast answer must be within A + 0.125 of the nearest stock answer, where A is the largest
distance between two stock answers. Of the fast answers in batches of several, the median distance
counts. If a prompt exceeds the bound, stock answers it eight more times, in other batches, before
the prompt is reported. The rule applies first to what prefills computed, then to whole answers.

A kind of prompt counts as tried if the plugin cut a prefill that ended such a prompt. A shared
prefix must also have been in the prefix cache. The report gives the reason for what was not tried.

The report is printed in Markdown, ready to be pasted into an issue; it is in verify.md too. The
last line of stdout is one JSON document, which is in verify.json too.
Exit status: 0 if fast prefill was active, everything was tried, and the answers agree; 1 if it was
not active, or answers differ; 2 if nothing could be verified, with the reason on stderr; 3 if the
answers agree, but something was not tried.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path

from sglang_gemma4_yoco import COMMIT, __version__, counters
from sglang_gemma4_yoco.commands.console import CommandError, Document, say
from sglang_gemma4_yoco.commands.redact import redact, show_flags
from sglang_gemma4_yoco.commands.verify import prompts as kinds
from sglang_gemma4_yoco.commands.verify import report, servers
from sglang_gemma4_yoco.commands.verify.comparison import (
    Answer,
    Comparison,
    Times,
    find_inequality,
    find_outlier,
    make_finite,
)
from sglang_gemma4_yoco.commands.verify.prompts import Prompt
from sglang_gemma4_yoco.commands.verify.servers import Server, WrongPathError

# Rounds of requests. Timed prompts, too, are sent one at a time.
ALONE, TIMED = "one at a time", "timed"
# The round -> how many are sent at once: batches of other sizes are rounded differently.
AT_ONCE = {f"{count} at once": count for count in (8, 5, 3)}
# Of stock only, and only if answers are too far from its other ones.
MORE = {f"{count} at once": count for count in (7, 6, 4, 2)}
# Stock's repetitions of the prompts that were sent one at a time.
AGAIN = "in identical batches"
CACHED = "from the prefix cache"
_PREFILL_GRAPHS = "--cuda-graph-backend-prefill"
_OWN_FLAGS = ("--model-path", "--model=", "--model ", "--device", "--ssl-")

#: Which server's answers, True for the fast one, and how the prompts were sent.
Way = tuple[bool, str]
Answers = Mapping[Way, list[Answer]]


def parse_positive(text: str) -> int:
    """Return an integer above zero, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above zero")
    return number


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``verify``."""
    add = parser.add_argument
    number: Document = {"type": parse_positive, "metavar": "N"}  # of a number's option
    add("--model-path", required=True, metavar="M", help="a directory or a Hugging Face name")
    add("--label", metavar="TEXT", help="the model's name in reports (default: its path)")
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        default=kinds.BUNDLED,
        help="your own prompts, one per line (default: bundled questions)",
    )
    add(
        "--prompt-tokens",
        nargs="+",
        default=[128, 512, 2048],
        help="lengths of the timed prompts (default: 128 512 2048)",
        **number,
    )
    add("--repeats", default=5, **number, help="timed prompts of each length (default: 5)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU if any")
    add(
        "--in-turn",
        action="store_true",
        help="run one server after the other on a CPU too, which needs half the memory",
    )
    add(
        "--output",
        type=Path,
        metavar="DIR",
        default=time.strftime("gemma4-yoco-verify-%Y%m%d-%H%M%S"),
        help="folder for logs and reports (default: a new one here)",
    )
    add("flags", nargs="*", metavar="FLAG", help="SGLang's flags for both servers, after --")


def find_device(wanted: str) -> str:
    """Return the GPU's name, or ``cpu``."""
    if wanted == "cpu":
        return wanted
    # In a separate process: this one must not hold memory of the GPU while servers run.
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


def fit_prompts(document: Document, args: argparse.Namespace, server: Server) -> list[Prompt]:
    """Return the prompts for servers like this one, which is ready; the timed ones come last.

    Kinds that are left out are added to the document.
    """
    left_out = {}
    info = server.get("/server_info")
    settings = info["internal_states"][0]
    longest = info.get("max_req_input_len", 65537) - kinds.NEW_TOKENS
    if max(args.prompt_tokens) > longest:
        raise CommandError(
            f"--prompt-tokens: with these flags a prompt has at most {longest} tokens"
        )
    if args.device == "cpu":  # more would take minutes
        longest = min(longest, 2560)
    chunk = settings.get("chunked_prefill_size") or -1
    length = chunk + chunk // 4
    if not 0 < length <= longest:
        left_out[kinds.CHUNKS] = f"a chunk has {chunk} tokens: try -- --chunked-prefill-size 1024"
        length = 0
    tokenizer = args.tokenizer
    seen = server.get("/model_info").get("has_image_understanding") and tokenizer.chat_template
    if not seen:
        left_out[kinds.PICTURES] = "the model is served without pictures, or has no chat template"
    dtype = str(settings.get("dtype", "auto")).removeprefix("torch.")
    document |= {"dtype": dtype, "left_out": left_out}
    before = min(kinds.SKIPPED[args.device == "cpu"], longest // 2)
    prompts = kinds.make_prompts(tokenizer, args.texts, before, long=length, pictures=bool(seen))
    for tokens in dict.fromkeys(args.prompt_tokens):
        for _ in range(1 + args.repeats):  # the first one warms up
            prompts.append(kinds.make_timed(tokenizer, tokens, len(prompts)))
    return prompts


@dataclass
class VerifyResult:
    """Answers of the servers, in the order of prompts, and prefills of the fast one by outcome.

    Attributes:
        prefills: by kind of prompt if sent one at a time, else by round.
    """

    answers: Answers = field(default_factory=lambda: defaultdict(list))
    prefills: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


def send_prompt(server: Server, prompt: Prompt) -> Answer:
    """Return the answer to a prompt."""
    began = time.perf_counter()
    reply = server.generate(**prompt.request())
    return Answer.of(reply, time.perf_counter() - began)


def end_round(server: Server, name: str) -> None:
    """End a round of requests; the next one begins with an empty prefix cache."""
    server.forget_prefixes()
    say(f"Done: {server.name}, {name}")


def send_in_turns(
    both: Sequence[Server], prompts: Sequence[Prompt], found: VerifyResult, name: str
) -> None:
    """Send prompts one at a time to each running server in turn, then twice more to stock."""
    turns = list(both)
    for prompt in prompts:
        turns.reverse()  # or the same server would always have the warmer caches
        for server in turns:
            answer = send_prompt(server, prompt)
            found.answers[server.fast, ALONE].append(answer)
            if server.fast:
                found.prefills[prompt.kind] += server.take_forwards()
            if name == ALONE:
                say(f"{prompt.kind}, {server.name}:\n  {answer.text!r}")
    for server in both:
        end_round(server, name)
        if not server.fast:  # each is a separate batch, as before
            # The second time the rest is cached: stock computes the last row alone, like the tail.
            for prompt, way in product(prompts, (AGAIN, CACHED)):
                found.answers[False, way].append(send_prompt(server, prompt))
            end_round(server, f"{name}, again")


def send_at_once(
    server: Server, prompts: Sequence[Prompt], found: VerifyResult, rounds: Mapping[str, int]
) -> None:
    """Send all prompts to a running server in each of these rounds, several at a time."""
    for name, count in rounds.items():
        pool = ThreadPoolExecutor(count)
        try:
            found.answers[server.fast, name] += pool.map(partial(send_prompt, server), prompts)
        finally:  # without waiting: after an interrupt their server is stopped next
            pool.shutdown(wait=False, cancel_futures=True)
        if server.fast:
            found.prefills[name] = server.take_forwards()
        end_round(server, name)


def examine_servers(both: Sequence[Server], prompts: Sequence[Prompt], found: VerifyResult) -> None:
    """Send all prompts to each running server, one at a time and several at once; then time some.

    ``found`` may already have the answers of a server that ran before.
    """
    compared = [prompt for prompt in prompts if prompt.kind != kinds.TIMED]
    for server in both:
        server.forget_prefixes()  # those of requests that SGLang sends when it starts
    send_in_turns(both, compared, found, ALONE)
    for server in both:
        send_at_once(server, compared, found, AT_ONCE)
    send_in_turns(both, prompts[len(compared) :], found, TIMED)
    for server in both:
        if server.fast:
            servers.check_switch(server, "all rounds", *found.prefills.values())
            continue
        servers.check_switch(server, "all rounds")
        if any(find_outliers(prompts, found.answers).values()):
            say("Answers differ: stock gets all prompts again, which shows how it rounds them")
            send_at_once(server, prompts, found, MORE)


def compare_by_kind(
    prompts: Sequence[Prompt], answers: Answers, *ways: Way
) -> dict[str, Comparison]:
    """Compare stock's answers, sent one at a time, with those of ``ways``, by kind of prompt."""
    pairs = defaultdict(list)
    for way in ways:
        # Timed prompts, the last ones, are not sent at once.
        both = zip(prompts, answers[False, ALONE], answers[way], strict=False)
        for prompt, stock, other in both:
            pairs[prompt.kind].append((stock, other))
    return {kind: Comparison.of(compared) for kind, compared in pairs.items()}


def summarise_times(prompts: Sequence[Prompt], answers: Answers) -> list[Document]:
    """Return the times to first token by prompt length, the shortest first.

    The first prompt of each length is a warm-up, whose time does not count.
    """
    points: dict[int, Document] = defaultdict(dict)
    for name, way in {"off": (False, ALONE), "again": (False, AGAIN), "on": (True, ALONE)}.items():
        seconds = defaultdict(list)
        for prompt, answer in zip(prompts, answers[way], strict=True):
            if prompt.kind == kinds.TIMED:
                if answer.cached_tokens:
                    raise CommandError(
                        f"{answer.cached_tokens} tokens of a timed prompt came from a cache: turn "
                        "it off with SGLang's --disable-radix-cache"
                    )
                seconds[len(prompt.body["input_ids"])].append(answer.seconds)
        for tokens, found in seconds.items():
            points[tokens][name] = asdict(Times.of(found[1:]))
    for tokens, point in points.items():
        point |= {"tokens": tokens, "ratio": point["off"]["median"] / point["on"]["median"]}
    return [points[tokens] for tokens in sorted(points)]


def find_outliers(prompts: Sequence[Prompt], answers: Answers) -> dict[str, str | None]:
    """Return, by kind of prompt, how far a fast answer is from stock's if it is too far, or None.

    Stock's answers include those in other batches.
    """
    found = dict[str, str | None]()
    for number, prompt in enumerate(prompts):
        # Timed prompts, the last ones, are not sent at once.
        own = {way: all_of[number] for way, all_of in answers.items() if number < len(all_of)}
        stock = [answer for (fast, _), answer in own.items() if not fast]
        together = [own[True, way] for way in AT_ONCE if (True, way) in own]
        outlier = find_outlier([own[True, ALONE]], stock) or find_outlier(together, stock)
        found[prompt.kind] = found.get(prompt.kind) or outlier
    return found


def list_untried(prefills: Mapping[str, Counter[str]], cached: int) -> dict[str, str]:
    """Return why the answers of a kind of prompt, or of a round, show nothing, by its name.

    Args:
        cached: tokens of the shared prefix that came from the cache.
    """
    untried = {}
    for name, forwards in prefills.items():
        if counters.TAIL_RAN.isdisjoint(forwards):
            untried[name] = f"none of its {forwards.total()} prefills was cut: {dict(forwards)}"
    if not cached:
        untried[kinds.PREFIX] = "no token came from the prefix cache"
    return untried


def conclude(document: Document, prompts: Sequence[Prompt], found: VerifyResult) -> None:
    """Compare the answers, and put the verdict and all figures into the document."""
    compare = partial(compare_by_kind, prompts, found.answers)
    fast = compare((True, ALONE), *product([True], AT_ONCE))
    again = compare((False, AGAIN))
    stock = compare((False, CACHED), *product([False], AT_ONCE))
    cached = Counter[str]()
    for prompt, answer in zip(prompts, found.answers[True, ALONE], strict=True):
        cached[prompt.kind] += answer.cached_tokens
    document["left_out"] |= list_untried(found.prefills, cached[kinds.PREFIX])
    # The fast path need not be more exact than stock is with itself.
    steady = all(difference.is_equal for difference in again.values())
    exact = steady and (document["device"], document["dtype"]) == ("cpu", "float32")
    outliers = find_outliers(prompts, found.answers)
    problems = []
    agreement = {}
    for kind, difference in fast.items():
        problem = outliers[kind]
        if exact:
            problem = find_inequality(difference)
        if problem:
            problems.append(f"{kind}: {problem}")
        prefills = found.prefills[kind]
        agreement[kind] = {
            "prefills": prefills.total(),
            "cut": sum(prefills[outcome] for outcome in counters.CUT),
            "cached_tokens": cached[kind],
            "fast": difference.figures(),
            "again": again[kind].figures(),
            "stock": stock[kind].figures(),
        }
    if failed := sum(prefills[counters.FAILED] for prefills in found.prefills.values()):
        problems.append(f"{failed} prefills failed on the fast path; see server-on.log")
    times = summarise_times(prompts, found.answers)
    longest = times[-1]
    document |= {
        "active": True,
        "agrees": not problems,
        "answers_equal": all(kind.equal_answers == kind.answers for kind in fast.values()),
        "max_logprob_diff": make_finite(max(kind.max_logprob for kind in fast.values())),
        "ttft_off_s": longest["off"]["median"],
        "ttft_on_s": longest["on"]["median"],
        "ratio": longest["ratio"],
        "problems": problems,
        "exact": exact,
        "stock_differs": not steady,
        "agreement": agreement,
        "times": times,
        "prefills": found.prefills,
    }


def serve_both(args: argparse.Namespace, document: Document) -> tuple[list[Prompt], VerifyResult]:
    """Start, examine and stop both servers; return the prompts and the results."""
    flags = ["--model-path", args.model_path, *args.flags]
    stock, fast = servers.make_pair(flags, args.output, device=args.device)
    run_prefills_eagerly(stock)
    groups = [[stock, fast]]
    if args.in_turn or args.device != "cpu":
        # The fast one goes first: if it is not active there is nothing to measure.
        groups = [[fast], [stock]]
    prompts = list[Prompt]()
    found = VerifyResult()
    for group in groups:
        with servers.run_servers(group, 1800):
            prompts = prompts or fit_prompts(document, args, group[0])
            examine_servers(group, prompts, found)
    return prompts, found


def check_arguments(args: argparse.Namespace) -> None:
    """Raise CommandError if an argument is wrong, before anything is started or written."""
    for flag in args.flags:
        if f"{flag} ".startswith(_OWN_FLAGS):
            raise CommandError(
                f"{flag}: verify has a --model-path and a --device of its own, and speaks http to "
                "its servers: remove it after --"
            )
    args.texts = kinds.read_file(args.prompts)
    args.tokenizer = kinds.load_tokenizer(args.model_path)


def begin_document(args: argparse.Namespace) -> Document:
    """Return the JSON document before any result; unknown values are None."""
    return {
        **dict.fromkeys(
            ("agrees", "answers_equal", "max_logprob_diff", "ttft_off_s", "ttft_on_s", "ratio")
        ),
        "model": args.label or args.model_path,
        "device": args.device,
        "sglang": version("sglang"),
        "package": __version__,
        "commit": COMMIT,
        "server_args": show_flags(args.flags),
        "prompt_tokens": max(args.prompt_tokens),
        "active": False,
        "repeats": args.repeats,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "output": str(args.output),
    }


def run(args: argparse.Namespace) -> int:
    """Verify and report; return the exit status."""
    check_arguments(args)
    args.device = find_device(args.device)
    args.output = args.output.absolute()
    document = begin_document(args)
    args.output.mkdir(mode=0o700, parents=True, exist_ok=True)
    as_json = args.output / "verify.json"
    as_report = args.output / "verify.md"
    for earlier in (as_json, as_report):
        earlier.unlink(missing_ok=True)
    say(f"Logs and reports: {args.output}")
    try:
        prompts, found = serve_both(args, document)
    except WrongPathError as wrong:
        say("\n== FAST PREFILL DID NOT DO WHAT THE SWITCH SAYS: NOTHING WAS MEASURED")
        say(str(wrong))
        document["problems"] = [str(wrong)]
    else:
        conclude(document, prompts, found)
    shown = redact(document)
    as_json.write_text(json.dumps(shown, indent=1) + "\n")
    if document["active"]:
        text = report.format_report(shown)
        as_report.write_text(f"{text}\n", "utf-8")
        say(text)
    say(shown)
    if not document["agrees"]:
        return 1
    if document["left_out"]:
        return 3
    return 0
