"""Random requests to a server, reproducible by seed, and the comparison of two answers.

The traffic resembles that of an operator's users: short and long prompts, shared prefixes, images,
input and output log-probabilities, greedy and sampled answers, several answers to one prompt, stop
strings, streams; some clients disconnect, some requests are aborted.

The parts of answers that are the same on every run are compared: all tokens and log-probabilities
of greedy answers; the log-probabilities of the prompt and of the two likeliest first tokens of
sampled ones (SGLang uses the seed of a request only with deterministic inference, which runs as
stock); the common part of aborted ones.
"""

from __future__ import annotations

import base64
import io
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import requests
from PIL import Image

from sglang_gemma4_reference.row_trace import Prefill
from sglang_gemma4_yoco.commands import https
from sglang_gemma4_yoco.commands.verify import comparison as comparing
from sglang_gemma4_yoco.commands.verify.comparison import Position

LOGPROB_TOLERANCE = 1e-4
CLOSE_CALL = 2 * LOGPROB_TOLERANCE
"""Greedy answers may diverge if the two likeliest tokens' log-probabilities are this close. The
requests that share a forward differ between runs, and with them the last bits of every sum. If each
of the two may be off by the tolerance, their order is known from twice the tolerance on."""

FIRST_TEXT_TOKEN = 20  # the tokens before it are special ones
_TIMEOUT = 300.0
_LENGTHS = {(1, 64): 70, (65, 500): 20, (501, 1500): 8, (1501, 4000): 2}  # in percent
_PREFIXES = 12
_COLOURS = ("red", "green", "blue", "yellow", "black", "white")
_STOPS = (" ", "a", "e", "1", ".")
_SAMPLINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
)

Tokens = tuple[int, ...]
T = TypeVar("T")
#: The log-probabilities of the two likeliest tokens after a prompt.
Likeliest = Callable[[Sequence[int]], tuple[float, float]]


@dataclass(frozen=True)
class Request:
    """One request to /generate.

    Attributes:
        body: its JSON.
        leaves_after: seconds after which the client disconnects, or None.
        aborted_after: seconds after which another client aborts the request, or None.
    """

    body: dict[str, Any]
    leaves_after: float | None = None
    aborted_after: float | None = None

    @property
    def greedy(self) -> bool:
        """Return True if the whole answer is the same on every run."""
        return bool(self.body["sampling_params"]["temperature"] == 0)

    @property
    def interrupted(self) -> bool:
        """Return True if the request may end before its answer does."""
        return self.leaves_after is not None or self.aborted_after is not None


@dataclass(frozen=True)
class Output:
    """One generated text.

    Attributes:
        tokens: the generated tokens.
        positions: the same with their log-probabilities and those of the two likeliest tokens, or
            empty if not requested.
        finish: ``length``, ``stop`` or ``abort``; None if the client saw no end.
    """

    tokens: Tokens = ()
    positions: tuple[Position, ...] = ()
    finish: str | None = None


@dataclass(frozen=True)
class Answer:
    """Answer to one request.

    Attributes:
        outputs: as many as requested; none if there was an error, or the request was interrupted
            before the first token.
        read: the prompt's tokens with their log-probabilities, as requested, or empty.
        error: that of the server or the connection, if there is no answer.
    """

    outputs: tuple[Output, ...] = ()
    read: tuple[Position, ...] = ()
    error: str | None = None

    @property
    def aborted(self) -> bool:
        """Return True if the answer ended early."""
        ends = {output.finish for output in self.outputs}
        return not ends or not ends.isdisjoint((None, "abort"))

    @property
    def begun(self) -> bool:
        """Return True if the answer has a first token."""
        return bool(self.outputs and self.outputs[0].tokens)


def has_failed(request: Request, answer: Answer) -> bool:
    """Return True if a request that nobody interrupted has no whole answer."""
    return answer.error is not None or (answer.aborted and not request.interrupted)


# -- the requests --------------------------------------------------------------------------------


def _random_length(draw: random.Random, longest: int) -> int:
    [(low, high)] = draw.choices(list(_LENGTHS), list(_LENGTHS.values()))
    return draw.randint(min(low, longest), min(high, longest))


def random_tokens(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    """Return ``count`` random text tokens."""
    return [draw.randrange(FIRST_TEXT_TOKEN, vocabulary) for _ in range(count)]


def picture(colour: str, size: int) -> str:
    """Return a square image of one colour as a data URL."""
    file = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def random_requests(count: int, *, seed: int, vocabulary: int, longest: int) -> list[Request]:
    """Return ``count`` requests with prompts of 1 to ``longest`` tokens, most of them short.

    Args:
        seed: the same requests for the same seed.
        vocabulary: token ids from ``FIRST_TEXT_TOKEN`` to below this are text.
    """
    draw = random.Random(seed)
    prefixes = []
    for _ in range(_PREFIXES):
        prefixes.append(random_tokens(draw, draw.randint(10, min(600, longest)), vocabulary))
    rids = [f"{seed}-{number}" for number in range(count)]
    return [_random_request(draw, rid, prefixes, vocabulary, longest) for rid in rids]


def _random_request(
    draw: random.Random, rid: str, prefixes: list[list[int]], vocabulary: int, longest: int
) -> Request:
    body: dict[str, Any] = {"stream": draw.random() < 0.3}
    sampling: dict[str, Any] = {"max_new_tokens": draw.randint(1, 12), "ignore_eos": True}
    is_image = draw.random() < 0.06
    if is_image:
        question = "".join(draw.choices("abcdefgh ", k=draw.randint(1, 60)))
        body["text"] = f"<bos><|turn>user\n<|image|>{question}<turn|>\n<|turn>model\n"
        body["image_data"] = picture(draw.choice(_COLOURS), 48)
    else:
        prompt = random_tokens(draw, _random_length(draw, longest), vocabulary)
        if draw.random() < 0.4:
            prefix = draw.choice(prefixes)
            prompt = prefix[: draw.randint(1, len(prefix))] + prompt
            del prompt[longest:]
        body["input_ids"] = prompt
    if is_image or draw.random() < 0.35:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
        if not is_image and draw.random() < 0.5:
            body["logprob_start_len"] = draw.randrange(len(prompt))
    if draw.random() < 0.75:
        sampling["temperature"] = 0
        if draw.random() < 0.15:
            sampling["stop"] = draw.sample(_STOPS, 2)
    else:
        sampling |= draw.choice(_SAMPLINGS)
    body["sampling_params"] = sampling
    kind = draw.random()
    if kind < 0.04:
        return Request(body | {"rid": rid}, aborted_after=draw.uniform(0, 0.3))
    if kind < 0.08:
        return Request(body, leaves_after=draw.uniform(0.02, 0.3))
    if kind < 0.14:
        sampling["n"] = draw.randint(2, 3)
    return Request(body)


# -- sending --------------------------------------------------------------------------------------


def shared_prefixes(count: int, *, seed: int, shared: int, own: tuple[int, int]) -> str:
    """Return prompts as the dataset ``custom`` of ``sglang.benchmark.serving``, in JSON lines.

    SGLang's generated-shared-prefix varies the length of the prefix too. The tokenizer of the
    random checkpoints makes one token of each character.

    Args:
        count: of prompts.
        seed: of the own tokens.
        shared: tokens that all prompts share, the same ones for every seed.
        own: the fewest and the most further tokens.
    """
    draw, lines = random.Random(seed), []
    for _ in range(count):
        length = draw.randint(*own)
        prompt = "s" * shared + f"{draw.getrandbits(4 * length):0{length}x}"
        turns = [{"content": prompt}, {"content": "its answer"}]
        lines.append(json.dumps({"conversations": turns}))
    return "\n".join(lines)


class Client:
    """Clients of one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = https.make_session(url)

    def post(self, path: str, body: dict[str, Any]) -> requests.Response:
        """POST ``body`` as JSON, and wait for the whole answer."""
        return self._http.post(self.url + path, json=body, timeout=_TIMEOUT)

    def get(self, path: str) -> Any:
        """GET a JSON document."""
        response = self._http.get(self.url + path, timeout=_TIMEOUT)
        response.raise_for_status()
        return response.json()

    def ask(self, request: Request) -> Answer:
        """Send one request; errors are part of the answer."""
        abort = None
        if request.aborted_after is not None:
            rid = {"rid": request.body["rid"]}
            abort = threading.Timer(request.aborted_after, self.post, ("/abort_request", rid))
            abort.start()
        try:
            return self._answer(request)
        except (requests.RequestException, ValueError) as failure:
            left = request.leaves_after is not None and "timed out" in str(failure)
            if left:
                return Answer()
            return Answer(error=repr(failure))
        finally:
            if abort is not None:
                abort.cancel()

    def _answer(self, request: Request) -> Answer:
        patience = request.leaves_after or _TIMEOUT
        leaves_at = time.monotonic() + patience
        with self._http.post(
            f"{self.url}/generate", json=request.body, timeout=(_TIMEOUT, patience), stream=True
        ) as response:
            if not response.ok:
                if request.aborted_after is not None and "abort" in response.text.lower():
                    return Answer()
                return Answer(error=f"{response.status_code} {response.text}")
            if not request.body["stream"]:
                replies = response.json()
                return _read(replies if isinstance(replies, list) else [replies])
            latest = {}
            for line in response.iter_lines():
                text = line.decode().removeprefix("data: ")
                if text == "[DONE]" or time.monotonic() > leaves_at:
                    break
                if text:
                    reply = json.loads(text)
                    if "error" in reply:
                        return Answer(error=str(reply["error"]))
                    latest[reply.get("index", 0)] = reply
            return _read([latest[i] for i in sorted(latest)])

    def likeliest(self, prompt: Sequence[int]) -> tuple[float, float]:
        """Return the log-probabilities of the two likeliest tokens after ``prompt``."""
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": False}
        answer = self.ask(Request(body | {"return_logprob": True, "top_logprobs_num": 2}))
        best, second = answer.outputs[0].positions[0].likeliest.values()
        return best, second


def _read(replies: Sequence[dict[str, Any]]) -> Answer:
    outputs, read = list[Output](), tuple[Position, ...]()
    for number, reply in enumerate(replies):
        about = reply["meta_info"]
        # A request that is aborted while it waits has no number of cached tokens.
        found = comparing.Answer.of({"meta_info": {"cached_tokens": 0, **about}})
        finish = about["finish_reason"] or {}
        outputs.append(Output(tuple(reply["output_ids"]), found.generated, finish.get("type")))
        if number == 0:
            read = found.read
    return Answer(tuple(outputs), read)


def ask_all(
    client: Client,
    workload: Sequence[Request],
    *,
    concurrency: int,
    answered: Callable[[], object] = lambda: None,
) -> list[Answer]:
    """Return the answers to all requests, with ``concurrency`` of them in flight at any time.

    ``answered`` is called after each answer, by one thread at a time.
    """
    lock = threading.Lock()

    def ask(request: Request) -> Answer:
        answer = client.ask(request)
        with lock:
            answered()
        return answer

    with ThreadPoolExecutor(concurrency) as clients:
        return list(clients.map(ask, workload))


# -- the server's forwards -------------------------------------------------------------------------

ACTIVE = "active"
SKIPPED = "active_intermediate_chunk"
SERVED_BY_STOCK = "failed"
STOCK = "stock"
NOTHING_TO_SKIP = "one new token each"


def outcome(prefill: Prefill) -> str:
    """Return the outcome of one prefill forward, by the rows that its layers computed."""
    total = sum(prefill.extend_lens)
    if prefill.rows[0] == 2 * total:
        return SERVED_BY_STOCK
    if prefill.rows[-1] == 0:
        return SKIPPED
    if prefill.rows[-1] < total or prefill.replays:  # a few rows may be padded to all
        return ACTIVE
    if total == len(prefill.extend_lens):
        return NOTHING_TO_SKIP
    return STOCK


def outcomes(prefills: Iterable[Prefill]) -> Counter[str]:
    """Return the number of prefill forwards by outcome."""
    return Counter(map(outcome, prefills))


def read_rows(prefill: Prefill) -> int:
    """Return the number of rows of a forward that are read, by the fields of the scheduler's batch.

    In a forward in which no prompt ends it is 0, unless a running request decodes in it (one row),
    or hidden states or log-probabilities of the prompt are requested.
    """
    lens = prefill.extend_lens
    starts = lens
    if prefill.logprob_starts is not None:
        starts = prefill.logprob_starts
    wanted = [max(n - start, 0) for n, start in zip(lens, starts, strict=True)]
    goes_on = not prefill.ends_prompt and min(lens) > 1 and prefill.captures == "NULL"
    if goes_on and not any(wanted):
        return 0
    return sum(max(n, 1) for n in wanted)


def held_tokens(client: Client) -> int:
    """Return the number of slots neither free nor in the prefix cache, once no request is left.

    Raises:
        TimeoutError: some requests are still running or waiting.
    """
    ends = time.monotonic() + 60.0
    while True:
        [load] = client.get("/v1/loads")["loads"]
        under_way = load["num_running_reqs"] + load["num_waiting_reqs"]
        held: int = load["num_used_tokens"]
        if time.monotonic() > ends and under_way:
            raise TimeoutError(f"{under_way} requests are still under way")
        if not under_way and (held == 0 or time.monotonic() > ends):
            return held
        time.sleep(0.2)


# -- comparing -----------------------------------------------------------------------------------


@dataclass
class Comparison:
    """Agreement of two servers' answers to the same requests.

    Attributes:
        answered: requests that got whole answers from the server under test.
        compared_tokens: tokens found equal.
        compared_logprobs: log-probabilities found within the tolerance.
        largest_difference: of two log-probabilities.
        close_calls: answers that diverge at two tokens of nearly the same log-probability.
        differences: those beyond the tolerance, as text, with the request's number.
    """

    answered: int = 0
    compared_tokens: int = 0
    compared_logprobs: int = 0
    largest_difference: float = 0.0
    close_calls: int = 0
    differences: list[str] = field(default_factory=list)


def compare(
    workload: Sequence[Request],
    stock: Sequence[Answer],
    tested: Sequence[Answer],
    likeliest: Likeliest,
) -> Comparison:
    """Compare the answers of a server under test with those of a stock one.

    Args:
        likeliest: the log-probabilities of the two likeliest tokens after a prompt, by the stock
            server; called where greedy answers diverge.
    """
    result = Comparison()
    for number, (request, one, other) in enumerate(zip(workload, stock, tested, strict=True)):
        try:
            _compare(request, one, other, likeliest, result)
        except _DifferentError as difference:
            result.differences.append(f"request {number}: {difference}")
    return result


def common_prefix_length(one: Sequence[T], other: Sequence[T]) -> int:
    """Return the length of two answers' common prefix, in tokens."""
    same = 0
    for mine, yours in zip(one, other, strict=False):
        if mine != yours:
            break
        same += 1
    return same


def is_close_call(likeliest: tuple[float, float]) -> bool:
    """Return True if rounding could change the likeliest token; False if either is NaN."""
    best, second = likeliest
    return best - second <= CLOSE_CALL


class _DifferentError(Exception):
    pass


def _compare(
    request: Request,
    stock: Answer,
    tested: Answer,
    likeliest: Likeliest,
    result: Comparison,
) -> None:
    for answer, server in ((stock, "stock"), (tested, "tested")):
        if has_failed(request, answer):
            raise _DifferentError(f"no answer from the {server} server: {answer.error}")
    result.answered += not tested.aborted
    # They come with the first token; an interrupted answer may have ended before.
    if not request.interrupted or (stock.begun and tested.begun):
        _compare_positions(stock.read, tested.read, "input", result)
    if not request.interrupted and len(stock.outputs) != len(tested.outputs):
        raise _DifferentError(f"{len(stock.outputs)} and {len(tested.outputs)} outputs")
    for one, other in zip(stock.outputs, tested.outputs, strict=False):
        if request.greedy:
            _compare_greedy(request, one, other, likeliest, result)
        else:
            _compare_sampled(request, one, other, result)


def _compare_greedy(
    request: Request,
    stock: Output,
    tested: Output,
    likeliest: Likeliest,
    result: Comparison,
) -> None:
    same = common_prefix_length(stock.tokens, tested.tokens)
    if same < min(len(stock.tokens), len(tested.tokens)):
        result.close_calls += 1
        if not stock.positions:
            both = likeliest([*request.body["input_ids"], *stock.tokens[:same]])
            if not is_close_call(both):
                parted = f"token {same} of {stock.tokens} and {tested.tokens}"
                raise _DifferentError(f"{parted}, {both[0] - both[1]:.2g} apart")
    elif not request.interrupted:
        ends = (len(stock.tokens), stock.finish)
        if ends != (len(tested.tokens), tested.finish):
            raise _DifferentError(f"{stock} and {tested} end differently")
    result.compared_tokens += same
    # Where they diverge, both tokens are compared, so the two are almost tied on both servers.
    compared = min(same + 1, len(stock.tokens), len(tested.tokens))
    _compare_positions(stock.positions[:compared], tested.positions[:compared], "output", result)


def _compare_sampled(request: Request, stock: Output, tested: Output, result: Comparison) -> None:
    """Compare the two likeliest first tokens; all others depend on the sampled ones before."""
    wanted = request.body["sampling_params"]["max_new_tokens"]
    if not request.interrupted and len(tested.tokens) != wanted:
        raise _DifferentError(f"{len(tested.tokens)} of {wanted} sampled tokens")
    if request.body.get("return_logprob") and len(tested.positions) != len(tested.tokens):
        counts = f"{len(tested.positions)} log-probabilities of {len(tested.tokens)}"
        raise _DifferentError(f"{counts} sampled tokens")
    for position in tested.positions:
        if not math.isfinite(position.logprob):
            raise _DifferentError(f"a sampled token with log-probability {position.logprob}")
    if request.interrupted and not (stock.positions and tested.positions):
        return
    one, other = _likeliest_first(stock), _likeliest_first(tested)
    _compare_positions(one, other, "likeliest", result)


def _likeliest_first(output: Output) -> tuple[Position, ...]:
    if not output.positions:
        return ()
    tokens = output.positions[0].likeliest
    return tuple(Position(token, logprob, {}) for token, logprob in tokens.items())


def _compare_positions(
    stock: tuple[Position, ...], tested: tuple[Position, ...], of: str, result: Comparison
) -> None:
    if len(stock) != len(tested):
        raise _DifferentError(f"{len(stock)} and {len(tested)} {of} log-probabilities")
    pair = comparing.Answer(stock), comparing.Answer(tested)
    differences = comparing.Comparison.of([pair]).logprobs
    result.compared_logprobs += len(differences)
    for number, difference in enumerate(differences):
        if difference > LOGPROB_TOLERANCE:
            both = f"{stock[number]} and {tested[number]}"
            raise _DifferentError(f"{of} log-probability {number} of {len(stock)}: {both}")
        result.largest_difference = max(result.largest_difference, difference)
