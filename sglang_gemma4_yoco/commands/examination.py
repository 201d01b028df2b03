"""What running servers are asked, one prompt at a time and several at once, and timed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_gemma4_yoco.commands import prompts as kinds
from sglang_gemma4_yoco.commands.agreement import Answer
from sglang_gemma4_yoco.commands.console import say
from sglang_gemma4_yoco.commands.prompts import Maker, Message, Prompt
from sglang_gemma4_yoco.commands.servers import Server, busy_share, check_switch
from sglang_gemma4_yoco.commands.timing import Timed, measure, requests_of

AT_ONCE = 8  # requests at a time, in the second round
# A prompt beyond a chunk is left out where it would take minutes.
LONGEST = {"cpu": 2560, "cuda": 65536}

Advance = Callable[[str], None]
Steps = Callable[[int], Any]


@dataclass
class Found:
    """What one server did.

    Attributes:
        alone: answers to the prompts, one at a time.
        at_once: answers to the same prompts, several at a time.
        again: answers to the same prompts, each right behind itself: but for its last token, or
            what its log-probabilities were asked of, it is in the prefix cache. Stock alone is
            asked, which computes the last row by itself then, as the fast path's tail does.
        timed: times to first token.
        forwards: its prefills, by what became of them.
    """

    alone: list[Answer] = field(default_factory=list)
    at_once: list[Answer] = field(default_factory=list)
    again: list[Answer] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    forwards: Counter[str] = field(default_factory=Counter)


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
        for reply in pool.map(lambda prompt: server.generate(**prompt.request()), prompts):
            answers.append(Answer.of(reply))
            advance(f"{_which(server)}: several at once")
        return answers
    finally:
        # Not waited for: on the way out of an interrupted run their server is stopped next.
        pool.shutdown(wait=False, cancel_futures=True)


def ask(server: Server, prompts: Sequence[Prompt], advance: Advance) -> Found:
    """A server's answers to all prompts; not yet its times."""
    server.forget_prefixes()
    found = Found()
    for prompt in prompts:
        found.alone.append(Answer.of(server.generate(**prompt.request())))
        advance(f"{_which(server)}: one at a time")
        if not server.fast:
            found.again.append(Answer.of(server.generate(**prompt.request())))
            advance(f"{_which(server)}: and again")
    server.forget_prefixes()
    found.at_once = at_once(server, prompts, advance)
    return found


def _which(server: Server) -> str:
    return "fast" if server.fast else "stock"


def examine(
    servers: Sequence[Server], plan: Plan, lengths: Sequence[int], repeats: int, steps: Steps
) -> list[Found]:
    """Ask and time running servers."""
    found = []
    rounds = sum(2 if server.fast else 3 for server in servers) * len(plan.prompts)
    with steps(rounds + len(servers) * requests_of(lengths, repeats)) as advance:
        for server in servers:
            say(f"Asking {server.name} {len(plan.prompts)} prompts, alone and {AT_ONCE} at a time")
            found.append(ask(server, plan.prompts, advance))
            check_switch(server)
            server.forget_prefixes()
        busy = busy_share()
        if busy > 0.2:
            say(f"   {busy:.0%} of the CPUs is busy with other work: expect scattered times")

        def told(server: Server, length: int, seconds: float) -> None:
            advance(f"{_which(server)}: {length} tokens, {seconds:.3f} s")

        timed = measure(servers, plan.maker, lengths, repeats, told)
    for server, one, times in zip(servers, found, timed, strict=True):
        one.timed = times
        one.forwards = check_switch(server)
    return found
