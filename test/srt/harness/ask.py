"""The same requests to a server with the fast path and to a stock one, and their answers."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

from harness.disaggregated import Disaggregated, listed
from harness.layer_rows import assert_all_fast, assert_all_stock
from harness.server import CHUNK, Server
from sglang_gemma4_reference import workload
from sglang_gemma4_reference.checkpoint import E2B_TINY, build_tokenizer, write_checkpoint
from sglang_gemma4_reference.row_trace import Prefill
from sglang_gemma4_reference.workload import (
    LOGPROB_TOLERANCE,
    Client,
    common_prefix_length,
    is_close_call,
)
from sglang_gemma4_yoco.commands.verify import comparison as comparing
from sglang_gemma4_yoco.commands.verify.comparison import Comparison, Position

TOLERANCE = LOGPROB_TOLERANCE  # of fp32 log-probabilities
NEW_TOKENS = 12
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}

# A stream loses the log-probability of a token that ends inside a character.
NOT_ASCII = [
    token
    for text, token in build_tokenizer(E2B_TINY.vocab_size).get_vocab().items()
    if not text.removeprefix("Ġ").isascii()
]


@dataclass(frozen=True)
class Answer(comparing.Answer):
    """Answer to one request; in the chat API tokens are known by their text.

    Attributes:
        loaded_tokens: of the cached ones, those that came back from the host.
        retractions: how often the request was retracted, and computed again.
        wanted: the number of tokens that it must have.
    """

    loaded_tokens: int = 0
    retractions: int = 0
    wanted: int = NEW_TOKENS

    @property
    def logprobs(self) -> list[float]:
        """Return the log-probabilities of the generated tokens."""
        return [position.logprob for position in self.generated]

    @property
    def input_logprobs(self) -> list[float]:
        """Return the log-probabilities of the prompt's tokens, if requested."""
        return [position.logprob for position in self.read]


A = TypeVar("A")
R = TypeVar("R")
Either = Server | Disaggregated
S = TypeVar("S", bound=Either)


@dataclass(frozen=True)
class Compared(Generic[A]):
    """The same requests on both servers: their answers, and the fast one's prefill forwards."""

    on: list[A]
    off: list[A]
    prefills: list[Prefill]

    @property
    def rows(self) -> list[list[int]]:
        """Return the rows that each layer of the fast server computed, forward by forward."""
        return [prefill.rows for prefill in self.prefills]


def compare(servers: tuple[S, S], ask: Callable[[S], list[A]]) -> Compared[A]:
    """Send the same requests to both servers, whose prefix caches start empty."""
    answers, prefills = [], []
    for server in servers:
        server.forget_prefixes()
        mark = server.mark()
        answers.append(ask(server))
        prefills.append(server.prefills(since=mark))
    assert_all_stock(prefills[1])
    assert prefills[1], "the row trace of the stock server is empty"
    return Compared(on=answers[0], off=answers[1], prefills=prefills[0])


def assert_alike(
    servers: tuple[S, S],
    ask: Callable[[S], list[A]],
    *,
    rows: Sequence[list[int]] | None = None,
    minimum: int | None = 1,
    captured: Sequence[int] = (),
    buckets: Sequence[int] = (),
    close_calls: int = 0,
) -> Compared[A]:
    """Assert that one server takes the fast path for these requests, and gives stock's answers.

    Args:
        ask: sends the requests to one server. Results other than ``Answer`` must be equal.
        rows: the rows that each layer must compute, by forward; None: those that
            ``assert_all_fast`` requires for ``minimum``, ``captured`` and ``buckets``.
        close_calls: as for ``assert_same_answers``.
    """
    both = compare(servers, ask)
    if rows is None:
        assert_all_fast(both.prefills, minimum, captured, buckets)
    else:
        assert both.rows == rows
    if all(isinstance(answer, Answer) for answer in both.on):
        assert_same_answers(both, close_calls=close_calls)
    else:
        assert both.on == both.off
    return both


def by_process(prefills: Sequence[Prefill]) -> list[list[Prefill]]:
    """Return the prefill forwards of each model process."""
    found = defaultdict(list)
    for prefill in prefills:
        found[prefill.process].append(prefill)
    return list(found.values())


def assert_ranks_alike(prefills: Sequence[Prefill], ranks: int) -> None:
    """Assert that ``ranks`` processes ran every batch, and cut it alike."""
    first, *others = by_process(prefills)
    assert len(others) == ranks - 1
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert replace(same, process=one.process) == one


def assert_same_answers(both: Compared[Any], *, close_calls: int = 0) -> None:
    """Assert equal tokens, and log-probabilities within the tolerance.

    Args:
        close_calls: the number of answers that may diverge where stock's two likeliest tokens are
            almost tied; both servers' log-probabilities of both are compared there too. For
            requests whose forwards are batched differently in each run, which changes last bits.
    """
    assert len(both.on) == len(both.off) > 0
    parted = 0
    for on, off in zip(both.on, both.off, strict=True):
        assert len(on.tokens) == len(off.tokens) == off.wanted
        assert Comparison.of([(on, off)]).max_logprob <= TOLERANCE, f"{on} and {off}"
        assert on.cached_tokens == off.cached_tokens
        parted += on.tokens != off.tokens
    assert parted <= close_calls, f"{parted} answers diverge"


def assert_same_tokens(
    both: Compared[list[int]], prompts: Sequence[list[int]], stock: Server
) -> None:
    """Assert equal tokens, but for one close call, which stock's log-probabilities confirm."""
    parted = 0
    for prompt, on, off in zip(prompts, both.on, both.off, strict=True):
        assert len(on) == len(off) > 0
        same = common_prefix_length(on, off)
        if same < len(off):
            likeliest = Client(stock.url).likeliest([*prompt, *off[:same]])
            assert is_close_call(likeliest), f"token {same} of {off} and {on}: {likeliest}"
            parted += 1
    assert parted <= 1, f"{parted} answers diverge"


def tokens(count: int, seed: int) -> list[int]:
    """Return random text tokens, always the same for a seed."""
    return workload.random_tokens(random.Random(seed), count, E2B_TINY.vocab_size)


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of these lengths; those of one length differ by the seed."""
    return [tokens(length, seed=seed + length) for length in lengths]


def one_by_one(*prompts: list[int], **body: Any) -> Callable[[Either], list[Answer]]:
    """Return a function for ``compare`` that sends the requests one after another."""
    return lambda server: [generate(server, prompt, **body)[0] for prompt in prompts]


def at_once(ask: Callable[[R], A], requests: Sequence[R]) -> list[A]:
    """Return the answers to these requests, each sent by a concurrent client."""
    with ThreadPoolExecutor(len(requests)) as clients:
        return list(clients.map(ask, requests))


def generate(
    server: Either, input_ids: Any, *, new_tokens: int = NEW_TOKENS, **body: Any
) -> list[Answer]:
    """Return greedy answers of /generate to one prompt (a list of ids) or to a batch of them."""
    sampling = GREEDY | {"max_new_tokens": new_tokens}
    body = {"return_logprob": True, "top_logprobs_num": 2, **body}
    replies = server.generate(input_ids=input_ids, sampling_params=sampling, **body)
    return [_answer(reply, new_tokens) for reply in listed(replies)]


def outputs(server: Server, prompt: Any, processor: Any = None, **sampling: Any) -> list[list[int]]:
    """Return the token ids of every answer to one prompt, or to a batch of them.

    These request no log-probabilities; SGLang mixes decode steps only with chunks of such requests.
    ``processor`` is a custom one of their logits.
    """
    how = {"sampling_params": GREEDY | sampling, "custom_logit_processor": processor}
    replies = server.generate(input_ids=prompt, **how)
    return [reply["output_ids"] for reply in listed(replies)]


def drafted(server: Server, prompts: list[list[int]]) -> list[tuple[Any, ...]]:
    """Return greedy answers to concurrent prompts: tokens, correct drafts and proposed drafts.

    Correct drafts are a histogram: the numbers of steps with 0, 1, 2, ... of them. The number of
    proposed drafts is None without an assistant.
    """
    sampling = GREEDY | {"max_new_tokens": 24}
    replies = server.generate(input_ids=prompts, sampling_params=sampling)
    found = []
    for reply in replies:
        about = reply["meta_info"]
        proposed = about.get("spec_num_proposed_drafts")
        found.append((reply["output_ids"], about["spec_correct_drafts_histogram"], proposed))
    return found


def next_turn(server: Either, prompt: list[int], more: list[int]) -> list[Answer]:
    """Return the answers to a prompt, and to that prompt with its answer and more tokens."""
    [first] = generate(server, prompt)
    return [first, *generate(server, [*prompt, *first.tokens, *more])]


def assert_new_weights(
    servers: tuple[Server, Server], directory: Path, **how: Any
) -> Compared[Answer]:
    """Run ``assert_alike`` with the servers' own weights, with others, and with their own again."""
    own = servers[0].checkpoint
    other = write_checkpoint(directory / "other", replace(E2B_TINY, seed=7))

    def ask(server: Server) -> list[Answer]:
        answers = []
        for weights in (own, other, own):  # finally its own, for other tests
            body = {"model_path": str(weights), "flush_cache": True}
            assert server.post("/update_weights_from_disk", body).json()["success"]
            answers += generate(server, tokens(77, seed=32))
        return answers

    both = assert_alike(servers, ask, **how)
    before, changed, after = (answer.logprobs for answer in both.on)
    assert before != pytest.approx(changed, abs=TOLERANCE, rel=0)
    assert before == pytest.approx(after, abs=TOLERANCE, rel=0)
    return both


def traffic(server: Server, requests: Sequence[workload.Request], clients: int) -> list[Any]:
    """Return the answers to random requests; assert that no slot leaks."""
    server.forget_prefixes()
    client = Client(server.url)
    answers = workload.ask_all(client, requests, concurrency=clients)
    assert workload.held_tokens(client) == 0
    assert "leak detected" not in server.log().lower()
    return answers


def assert_same_traffic(
    requests: Sequence[workload.Request], stock: list[Any], tested: list[Any], server: Server
) -> None:
    """Assert that both servers' answers to random requests agree, and that some were compared.

    Args:
        server: the stock one.
    """
    result = workload.compare(requests, stock, tested, Client(server.url).likeliest)
    assert result.differences == []
    assert result.close_calls <= 1 + len(requests) // 200
    assert result.answered >= len(requests) - sum(request.interrupted for request in requests)
    assert result.compared_tokens > 2 * len(requests)
    assert result.compared_logprobs > 5 * len(requests)


def beside_decoding(server: Server, short: list[int], long: list[int]) -> list[list[int]]:
    """Return answers to two prompts, the long one sent while the other's answer is generated.

    The short prompt's answer has 120 tokens, so as not to end too soon on a busy machine.
    """
    mark = server.mark()
    with ThreadPoolExecutor(1) as client:
        decoding = client.submit(outputs, server, short, max_new_tokens=120)
        server.wait_for_prefills(1, since=mark)
        [answer] = outputs(server, long)
        [decoded] = decoding.result()
    return [decoded, answer]


def _answer(reply: dict[str, Any], wanted: int) -> Answer:
    meta = reply["meta_info"]
    return Answer(
        **vars(comparing.Answer.of(reply)),
        loaded_tokens=(meta.get("cached_tokens_details") or {}).get("host", 0),
        retractions=meta.get("num_retractions", 0),
        wanted=wanted,
    )


def chat(server: Server, content: Any, *, stream: bool = False, **body: Any) -> Answer:
    """Return the greedy answer of /v1/chat/completions to one user message."""
    reply = server.chat(
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logit_bias=dict.fromkeys(map(str, NOT_ASCII), -100),
        logprobs=True,
        top_logprobs=2,
        stream=stream,
        **body,
    )
    found = []
    for part in listed(reply):
        for choice in part["choices"]:
            for entry in (choice["logprobs"] or {}).get("content", ()):
                likeliest = {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
                found.append(Position(entry["token"], entry["logprob"], likeliest))
    return Answer(tuple(found))


def over_a_chunk_boundary() -> list[dict[str, Any]]:
    """Return the content of a user message: an image whose tokens fall into two chunks."""
    return [{"type": "text", "text": "x" * (CHUNK - 20)}, *picture("purple", size=480)]


def picture(colour: str, size: int = 96) -> list[dict[str, Any]]:
    """Return the content of a user message: a square image of one colour, and a question."""
    return [
        {"type": "image_url", "image_url": {"url": workload.picture(colour, size)}},
        {"type": "text", "text": "What is this?"},
    ]
